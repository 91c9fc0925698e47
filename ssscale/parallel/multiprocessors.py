"""Multiprocessors of a GPU for exchanges that run beside computation (`parallel.free_multiprocessors`).

cuBLAS's matrix products on Hopper start one thread block for each multiprocessor and divide the work evenly among them. If an
exchange occupies some multiprocessors, their blocks start when it ends, and the product waits for them: it takes up to
the sum of both times (docs/log/2026-11-25-two-gpus.md). Here products start fewer blocks, and NCCL takes no more
multiprocessors than are left.
"""

import os
import warnings

import torch

from ssscale.errors import UserError

KEY = "parallel.free_multiprocessors"
LIMIT = "NCCL_MAX_CTAS"  # NCCL reads it when a communicator is created


def limit_exchanges(number: int) -> None:
    """Lets each exchange take at most `number` multiprocessors. Called before torch.distributed starts.

    Raises UserError without a GPU, and if the environment has another limit.
    """
    if number == 0:
        return
    if not torch.cuda.is_available():
        raise UserError(f"{KEY}={number} needs a GPU, and there is none: leave it out")
    set_before = os.environ.setdefault(LIMIT, str(number))
    if set_before != str(number):
        raise UserError(f"{KEY}={number} and {LIMIT}={set_before} in the environment differ: set only one of them")


def leave_free(number: int) -> None:
    """Makes matrix products leave `number` multiprocessors free, in the whole process. Raises UserError for too many."""
    if number == 0:
        return
    have = torch.cuda.get_device_properties().multi_processor_count
    if number >= have:
        raise UserError(f"{KEY}={number} must be below {have}, the multiprocessors of this GPU")
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the only one for which torch passes the number on
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting the SM carveout")
        torch._C._set_sm_carveout_experimental(number)
