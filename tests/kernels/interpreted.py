"""Runs a script of kernels under Triton's interpreter, which TRITON_INTERPRET=1 chooses before Triton is imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_interpreted(script: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The results by case, one JSON object a line; a process for each argument, side by side, or one for none."""
    environment = {
        "PYTHONPATH": str(HERE.parents[1]),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1" if len(arguments) > 1 else "2",
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
    }
    running = [
        subprocess.Popen(
            [sys.executable, HERE / script, *([argument] if argument else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for argument in arguments or ("",)
    ]
    results = {}
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        results |= {result.pop("case"): result for result in map(json.loads, out.splitlines())}
    return results


def hasten() -> None:
    """Makes the interpreter of Triton 3.6 and 3.7 take half of the time or less. All results keep their bits."""
    patch_language_once()
    leave_out_unused_checks()
    remember_types()
    reduce_slices()


def patch_language_once() -> None:
    """Makes the interpreter replace the functions of `triton.language` once per process.

    It does so at each call of one kernel function by another, although nothing is left to replace.
    """
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


def leave_out_unused_checks() -> None:
    """Makes the interpreter compute sums and products of integers once.

    It repeats them in int64 and compares them with the range of the dtype, but without `debug` it asserts nothing.
    """
    from dataclasses import replace

    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Makes what depends on shapes and dtypes alone once, instead of for each operation."""
    import math

    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    np_dtypes: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    find_np_dtype, make_block = interpreter._get_np_dtype, tl.block_type.__init__
    broadcast = TritonSemantic.broadcast_impl_value

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = find_np_dtype(dtype)
        return np_dtypes[dtype.name]

    def block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = tl.core.tuple([tl.constexpr(n) for n in key]), tl.constexpr(math.prod(key))
        self.shape, self.numel = shapes[key]

    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = lambda self, x, y: (x, y) if x.shape is y.shape else broadcast(self, x, y)


def reduce_slices() -> None:
    """Makes `tl.reduce` with a function of ours call it once per slice, in the same order, instead of once per number."""
    import numpy as np
    from triton.runtime.interpreter import ReduceOps

    def generic_reduce(self: Any, tensors: Any) -> list[Any]:
        shape = list(tensors[0].handle.data.shape)
        # Of one dim: slices are numbers, which the interpreter keeps in arrays of one.
        total, *others = (
            tuple(self.to_tensor(x.handle.data.take(i, self.axis), x.dtype) for x in tensors)
            for i in range(shape[self.axis])
        )
        for other in others:
            total = self.combine_fn.fn(*total, *other)
            total = total if isinstance(total, tuple) else (total,)
        shape[self.axis : self.axis + 1] = [1] if self.keep_dims else []
        return [self.to_tensor(np.reshape(x.handle.data, shape), y.dtype) for x, y in zip(total, tensors, strict=True)]

    ReduceOps.generic_reduce = generic_reduce


def repair_bfloat16() -> None:
    """Makes the interpreter of Triton 3.6 and 3.7 compute with bfloat16, which it keeps as bits in uint16.

    It multiplies the bits as integers in dot, and truncates where the GPU rounds.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    create_dot, cast = builder.create_dot, builder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def cast_impl(self: object, x: Any, dtype: Any) -> Any:
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, dtype)
        rounded = torch.from_numpy(x.data.copy()).bfloat16()
        return handle(rounded.view(torch.int16).numpy().view("uint16"), dtype.scalar)

    builder.create_dot = lambda self, a, b, *others: create_dot(self, widened(a), widened(b), *others)
    builder.cast_impl = cast_impl
