"""Changes to DeepSpeed 0.19 and their reasons. `DeepSpeedEngine` applies them."""

import importlib
import types
from typing import Any

import torch
from torch import Tensor


def leave_out_shared_memory() -> None:
    """Stops DeepSpeed from compiling its shared-memory all-reduce for CPUs; gloo is used instead.

    The first start would compile it, which needs a C++ compiler and takes half a minute. A start that is killed during
    this time leaves a lock behind, and every later start waits for it forever.
    """
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def add_gradients_in_one_kernel(optimizer: Any) -> None:
    """Makes BF16_Optimizer add a bf16 gradient to its fp32 sum in one kernel. Other optimizers are left unchanged.

    DeepSpeed converts the gradient to fp32 first. That needs 1.8 times the memory traffic and costs 8 ms of a 312 ms step
    with 1.2 billion parameters on an H200.
    """
    if hasattr(optimizer, "_update_hp_grad"):
        optimizer._update_hp_grad = types.MethodType(_add_gradient, optimizer)


def replace_update(optimizer: Any, update: Any) -> None:
    """Makes BF16_Optimizer collect gradients and update weights through `update` (`ssscale.engine.update`).

    DeepSpeed passes over memory ten times between backward and forward. It copies most gradients to one tensor, rounds them
    to bf16 and copies them back even if there is nothing to reduce. It clips them in place, zeroes them twice, and rounds
    the weights in a pass of their own (docs/log/2026-11-24-optimizer-step.md).
    """
    optimizer._update_hp_grad = update.take
    optimizer.get_grads_for_reduction = update.to_reduce
    optimizer.step = update.step
    optimizer.zero_grad = update.clear


@torch.no_grad()
def _add_gradient(optimizer: Any, weight: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
    if weight.grad is None:
        return
    total = optimizer.fp32_groups_gradients[group][index]
    total.add_(weight.grad.view(total.shape))
    weight._hp_grad = total
    optimizer.fp32_groups_has_gradients[group][index] = True
