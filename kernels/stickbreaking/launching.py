"""Launches of compiled kernels that take less time of the host than Triton's own.

At each launch, Triton derives from all arguments which compiled kernel serves them. With some fifty arguments, this takes
longer than the rest of the launch. A model launches the same kernels with the same sizes in every layer.

**Dependent launches.** From Hopper on, a kernel may be launched before the one before it has ended (CUDA's programmatic
dependent launch). Its programs take the multiprocessors that the last programs of the other leave, and wait in `begin`, so that
nothing passes between the end of one and the start of the other. The first kernel of an operator is launched as usual, for
it is not known what comes before it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 4096  # launches to remember; sizes vary between batches

_remembered: dict[Any, tuple[Any, list[Any]]] = {}  # by what decides: the compiled kernel, its compile-time constants


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. `triton.cdiv` also serves kernels, and takes ten times as long on the host."""
    return -(-a // b)


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel can be launched on the device before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr) -> None:
    """Waits until the kernel that was launched before has ended. Then the next one may start, which waits in the same way.

    Every program calls it first. So a kernel that has ended was preceded by all that were launched before it.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def _decisive(x: Any) -> Any:
    """Returns what decides about the compiled kernel: of a tensor, its dtype and whether its address is a multiple of 16."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return None if x is None else (x.base.dtype, *x.block_shape)


def launch_kernel(
    kernel: Any,
    programs: int | tuple[int, int],
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    constants: Mapping[str, Any],
    follows: bool,
) -> None:
    """kernel[programs](*tensors, *numbers, **constants, EARLY=...).

    tensors: also TMA descriptors and None, but the first is a tensor. All are on the current device. numbers: each always
        of the same type.
    constants: the compile-time arguments, which are the last ones of the kernel, and Triton's options.
    follows: whether a kernel of the same operator is the one that was launched before.

    EARLY, the kernel's last argument, is whether the device can launch kernels before others have ended.
    """
    grid = programs if isinstance(programs, tuple) else (programs, 1)
    early = starts_early(tensors[0].device)
    constants = {**constants, "EARLY": early}
    if early and follows:
        constants["launch_pdl"] = True
    key = kernel, tensors[0].device, *map(_decisive, tensors), *numbers, *constants.items()
    found = _remembered.get(key)
    if found is not None:
        compiled, last = found
        compiled[*grid, 1](*tensors, *numbers, *last)
        return
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if compiled is not None:  # as Triton's interpreter returns
        if len(_remembered) >= MOST:
            _remembered.clear()
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        _remembered[key] = compiled, [constants[name] for name in names]
