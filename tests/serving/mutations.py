"""Breaks the plugin and the operator, one line at a time, and runs tests that must fail: `make test-vllm-mutations`.

`python -m tests.serving.mutations EXPORTS`, in the environment with vLLM. Each mutation is made in a copy of the sources.
"""

import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN, KERNELS = "ssscale/serving/vllm/ssscale_vllm/", "kernels/stickbreaking/"
COPIED = ("ssscale_kernels.py", "kernels", "ssscale/serving/vllm")


class Mutation(NamedTuple):
    """file: below PLUGIN or KERNELS. before, after: the text, which occurs once. tests: for pytest's -k."""

    file: str
    before: str
    after: str
    tests: str


MUTATIONS = {
    "s is ignored": Mutation(
        PLUGIN + "mixers/ssmax.py",
        'weights["s"].float() if "s" in weights else self.fixed',
        "1.0",
        "greedy and ssmax-bias-chunked",
    ),
    "b is ignored": Mutation(
        PLUGIN + "mixers/ssmax.py",
        'found + weights["b"].float() if "b" in weights else found',
        "found",
        "greedy and ssmax-bias-chunked",
    ),
    "n is one too large": Mutation(
        PLUGIN + "mixers/ssmax.py", "n = positions + 1", "n = positions + 2", "greedy and ssmax-chunked"
    ),
    "p_n is the next one": Mutation(
        PLUGIN + "mixers/ssmax.py",
        "pn[n.clamp(max=len(pn)) - 1]",
        "pn[n.clamp(max=len(pn) - 1)]",
        "greedy and ssmax-pn-chunked",
    ),
    "n counts keys beyond the window": Mutation(
        PLUGIN + "mixers/ssmax.py", "n = n.clamp(max=window)", "pass", "greedy and ssmax-window-chunked"
    ),
    "keys rotate by the position after": Mutation(
        PLUGIN + "attention.py",
        "k = rotate(k, own, None)",
        "k = rotate(k, own and tuple(x.roll(1, 0) for x in own), None)",
        "greedy and softmax-linear-chunked",
    ),
    "RoPE's scaling is ignored": Mutation(
        PLUGIN + "positions.py",
        "positions.float() / self.divisor",
        "positions.float()",
        "greedy and softmax-linear-chunked",
    ),
    "the embedding multiplier is ignored": Mutation(
        PLUGIN + "model.py", "x = x * model.width.embedding_multiplier", "pass", "greedy and softmax-width-chunked"
    ),
    "the residual multiplier is ignored": Mutation(
        PLUGIN + "model.py", "= model.width.residual_multiplier,", "= 1.0,", "greedy and softmax-width-chunked"
    ),
    "the scale of q·k is ignored": Mutation(
        PLUGIN + "attention.py",
        "model.width.attention_scale,",
        "model.head_dim**-0.5,",
        "greedy and softmax-width-chunked",
    ),
    "the divisor of logits is ignored": Mutation(
        PLUGIN + "model.py", " / model.width.logits_divisor", "", "log_probabilities"
    ),
    "a query attends to its own key": Mutation(
        KERNELS + "paged_torch.py",
        "visible = (key < position",
        "visible = (key <= position",
        "greedy and stickbreaking-chunked",
    ),
    "the remainder is ignored": Mutation(
        PLUGIN + "backends/stickbreaking.py",
        "remainder=self.remainder,",
        "remainder=False,",
        "greedy and stickbreaking-remainder-chunked",
    ),
    "a chunk's offset is ignored": Mutation(
        KERNELS + "paged_torch.py",
        "position = (lengths - num_queries)[:, None] + rows",
        "position = 0 * lengths[:, None] + rows",
        "greedy and stickbreaking-chunked",
    ),
    "the order of blocks is ignored": Mutation(
        KERNELS + "paged_torch.py",
        "block_table[batch, : used.shape[1]].long(), 0)",
        "block_table[batch, : used.shape[1]].long(), 2**40).sort(-1)[0].where(used, 0)",
        "float64",
    ),
    "new keys go to the slot after": Mutation(
        PLUGIN + "backends/stickbreaking.py",
        "slots[real] % k_cache.shape[1]",
        "(slots[real] + 1) % k_cache.shape[1]",
        "greedy and stickbreaking-chunked",
    ),
}


def run(folder: Path, tests: str) -> tuple[int, str]:
    """Returns pytest's exit code and its last line. Runs in a copy of this process, because importing vLLM takes long."""
    output = folder / "output"
    child = os.fork()
    if child == 0:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(folder / "ssscale/serving/vllm"), str(folder)]
        import ssscale_vllm

        import ssscale_kernels

        assert all(str(folder) in str(module.__path__) for module in (ssscale_kernels, ssscale_vllm))
        options = ["--confcutdir=tests/serving", "--timeout", "1200", "--tb=line", "-m", "vllm"]
        files = ["tests/serving/test_vllm.py", "tests/serving/test_backend.py"]
        os._exit(pytest.main([*options, *files, "-k", tests]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, output.read_text(encoding="utf-8").strip().splitlines()[-1]


def main(exports: str, *only: str) -> None:
    """Raises SystemExit if a mutation goes unseen, or if the tests fail without any."""
    os.environ["SSSCALE_EXPORTS"] = exports
    importlib.import_module("vllm.v1.worker.cpu_worker")
    importlib.import_module("vllm.entrypoints.llm")
    chosen = {name: mutation for name, mutation in MUTATIONS.items() if not only or any(word in name for word in only)}
    unseen = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        tests = " or ".join(f"({tests})" for tests in sorted({mutation.tests for mutation in chosen.values()}))
        code, line = run(folder, tests)
        print(f"without a mutation: {line}", flush=True)
        if code != 0:
            raise SystemExit("error: these tests fail without a mutation")
        for name, mutation in chosen.items():
            file, began = folder / mutation.file, time.monotonic()
            whole = file.read_text(encoding="utf-8")
            assert whole.count(mutation.before) == 1, (
                f"{name}: {mutation.file} has it {whole.count(mutation.before)} times"
            )
            file.write_text(whole.replace(mutation.before, mutation.after), encoding="utf-8")
            code, line = run(folder, mutation.tests)
            file.write_text(whole, encoding="utf-8")
            seen = code == 1 and re.search(r"\d+ failed", line) is not None
            unseen += [] if seen else [name]
            print(f"{'seen' if seen else 'UNSEEN'}: {name}: {line} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} mutations fail the tests")
    if unseen:
        raise SystemExit(f"error: unseen: {', '.join(unseen)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
