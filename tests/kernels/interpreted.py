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


def patch_language_once() -> None:
    """Makes the interpreter replace the functions of `triton.language` once per process.

    It does so at each call of one kernel function by another, although nothing is left to replace: 40 % of the time.
    """
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


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
