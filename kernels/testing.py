"""Compiles kernels for Hopper without a GPU, so that tests can check registers, spills and instructions."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

TARGET = "sm_90a"


class Resources(NamedTuple):
    """What a compiled kernel needs and contains."""

    registers: int  # per thread
    stack_bytes: int  # per thread
    shared_bytes: int  # per program
    wgmma: int  # instructions that multiply matrices asynchronously
    async_copies: int  # instructions that copy global to shared memory asynchronously
    serialized: bool  # whether ptxas has each of them wait for the one before (its message C7515)
    # Loads and stores of local memory in each innermost loop that multiplies matrices, in program order.
    spills_in_loops: tuple[int, ...]


def compile_for_hopper(
    kernel: Any,
    types: dict[str, str | tuple[str, ...]],
    constants: dict[str, Any],
    **options: Any,
) -> CompiledKernel:
    """Compiles `kernel`, a @triton.jit function, with `options` such as num_warps.

    types: the type of every argument that is not a constant, such as "*bf16", "i32" or "fp32", or of the parts of a
    tuple. Pointers count as aligned to 16 bytes, and integers whose type is in upper case ("I32") as multiples of 16; a
    launch finds out both by itself.
    constants: the values of the other arguments.
    """
    names = kernel.arg_names
    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(names):
        if name in types:
            found = types[name]
            several = isinstance(found, tuple)
            parts = [part.lower() for part in (found if isinstance(found, tuple) else (found,))]
            signature[name] = tuple(parts) if several else parts[0]
            divisible = [j for j, part in enumerate(parts) if part[0] == "*" or found == "I32"]
            aligned |= {(i, j) if several else (i,): [["tt.divisibility", 16]] for j in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(compiled: CompiledKernel) -> Resources:
    """The resources of a kernel, from the output of ptxas."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = tools / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = (
            subprocess.run([tool, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    ptx = compiled.asm["ptx"]
    return Resources(
        registers,
        stack,
        compiled.metadata.shared,
        ptx.count("wgmma.mma_async"),
        ptx.count("cp.async.c"),
        "C7515" in _messages(tools / "ptxas", ptx),
        _spills_in_loops(sass),
    )


def _messages(ptxas: Path, ptx: str) -> str:
    """What ptxas says, which Triton does not show."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name={TARGET}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _spills_in_loops(sass: str) -> tuple[int, ...]:
    """A loop is what a branch to an earlier address encloses, unless it leads back from code out of line that awaits a load."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", sass)]
    loops = []
    for i, (address, text) in enumerate(code):
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        awaits = i >= 2 and "TRYWAIT" in code[i - 2][1] and "BRA" in code[i - 1][1]
        if target and int(target[1], 16) < address and not awaits:
            body = [line for at, line in code if int(target[1], 16) <= at <= address]
            if any(re.search("HG?MMA", line) for line in body):
                spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in body)
                loops.append((int(target[1], 16), address, spills))
    # A loop around another one runs once per run of tiles and may spill; the inner one runs once per tile.
    return tuple(
        spills
        for first, last, spills in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b, _ in loops)
    )
