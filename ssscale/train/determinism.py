"""`train.deterministic`: results that have the same bits in every run on the same GPUs."""

import logging
import os
import sys

logger = logging.getLogger("ssscale")

# cuBLAS reads this when it is first used. Without it, its products may depend on which stream got which workspace.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Inductor reads this when it is first imported. Without it, it measures how many elements a block of some reductions should
# add up, and another choice is another order of summation.
INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"


def make_deterministic() -> None:
    """Makes torch, cuBLAS and Inductor choose algorithms that give the same bits in every run.

    Must be called before CUDA is used. The kernels of softmax and SSMax read torch's flag and choose FlashAttention-2
    with deterministic gradients. Operators of torch without a deterministic algorithm raise an error on GPUs.
    """
    import torch

    os.environ.setdefault(WORKSPACE, ":4096:8")
    os.environ[INDUCTOR] = "1"
    if "torch._inductor.config" in sys.modules:
        # A module from sys.modules has no declared attributes. Importing it would load Inductor where nothing compiles.
        sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # Else torch fills each new tensor with NaN, which costs a pass over memory. Nothing here reads what it has not written.
    # (This is the setter of torch.utils.deterministic.fill_uninitialized_memory.)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    logger.info("train.deterministic: the same bits in every run on the same GPUs and layout")
