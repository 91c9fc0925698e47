"""Tells whether two checkouts execute the same code for a run file, whatever else differs between them.

    python -m tests.executed OLD NEW --data FOLDER --work FOLDER config=1b_sb model.num_layers=2 model.hidden_size=128 ...

OLD, NEW: checkouts. Each trains two steps in a process of its own on the CPU. What is compared: every function of the
checkout that was called, by its syntax tree without docstrings and comments; the graphs of the blocks that torch.compile
captures; losses, gradient norms and the bits of the weights before and after the steps. What runs only on a GPU (kernels
in `kernels/`, the code that Inductor generates from equal graphs) is not executed here: compare `kernels/` with git.

Exit code 0 if all is equal, else 1, with a line for each difference.
"""

import argparse
import ast
import difflib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OURS = ("ssscale", "kernels", "launch")
RECORDED = ("loss", "grad_norm", "lr")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@functools.cache
def trees(file: str) -> dict[int, str]:
    """By first line, the digest of each function's and class's syntax tree without docstrings."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]
    named = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    first = {min([n.lineno, *(d.lineno for d in n.decorator_list)]): digest(ast.dump(n).encode()) for n in named}
    return first


class Calls:
    """Notes the code objects below `root` that are called."""

    def __init__(self, root: str) -> None:
        self.root, self.codes = f"{root}/", set[CodeType]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(tuple(f"{self.root}{folder}/" for folder in OURS)):
            self.codes.add(code)

    def functions(self) -> dict[str, str]:
        """`file name` → digest. Comprehensions and lambdas count as lines of the function around them."""
        named = (code for code in self.codes if not code.co_name.startswith("<"))
        return {
            f"{c.co_filename[len(self.root) :]} {c.co_qualname} {c.co_firstlineno}": trees(c.co_filename)[
                c.co_firstlineno
            ]
            for c in named
        }


def record(root: str, data: str, out: str, arguments: list[str]) -> dict[str, Any]:
    """Trains two steps with the checkout at `root`, the first on the path, and returns all that is compared."""
    calls, graphs = Calls(root), []
    sys.setprofile(calls)
    threading.setprofile(calls)
    from ssscale.config import load_config
    from ssscale.model.decoder import Decoder
    from ssscale.parallel.groups import initialize
    from ssscale.train.loop import train
    from ssscale.train.pretrain import pretraining

    def capture(graph: Any, inputs: Any) -> Any:
        text = re.sub(r"#.*", "", graph.print_readable(print_output=False))
        graphs.append("\n".join(line for line in text.splitlines() if line.strip()))
        return graph

    compile_parts = Decoder.compile_parts
    Decoder.compile_parts = lambda self, backend="", **how: compile_parts(self, backend=capture, **how)
    fixed = [f"data.path={data}", f"run_dir={out}", "train.compile=block", "train.max_steps=2", "train.log_every=1"]
    quiet = ["train.eval_every=0", "train.save_every=0", "train.observe_every=0", "data.num_workers=0"]
    run = pretraining(load_config([*arguments, *fixed, *quiet]), initialize())

    def weights() -> dict[str, str]:
        named = run.engine.module.named_parameters()
        return {name: digest(weight.detach().float().numpy().tobytes()) for name, weight in named}

    start = weights()
    train(run)
    sys.setprofile(None)
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = {f"step {one['step']}": {key: one[key] for key in RECORDED} for one in lines if "loss" in one}
    return {
        "function": calls.functions(),
        "graph": dict(enumerate(graphs)),
        "step": steps,
        "weight at the start": start,
        "weight at the end": weights(),
    }


def in_process(root: Path, data: str, work: Path, arguments: list[str]) -> dict[str, Any]:
    work.mkdir(parents=True)
    command = [sys.executable, __file__, "--record", str(root), data, str(work / "run"), *arguments]
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{root}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((work / "run.json").read_text(encoding="utf-8"))
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Functions are matched by file and name, since their lines move."""
    found = []
    for kind in old:
        before, after = old[kind], new[kind]
        if kind == "function":
            before, after = by_name(before), by_name(after)
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                how = "only in OLD" if key not in after else "only in NEW" if key not in before else "differs"
                found.append(f"{kind} {key}: {how}")
                if kind == "graph" and how == "differs":
                    lines = difflib.unified_diff(before[key].splitlines(), after[key].splitlines(), lineterm="", n=0)
                    found += [f"    {line.strip()}" for line in lines if line.startswith(("-  ", "+  "))]
    return found


def by_name(functions: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in functions.items():
        found.setdefault(key.rpartition(" ")[0], []).append(value)
    return {key: sorted(values) for key, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    roots = options.old.resolve(), options.new.resolve()
    old, new = (in_process(root, options.data, options.work / str(i), arguments) for i, root in enumerate(roots))
    found = differences(old, new)
    print(*found, sep="\n")
    sizes = ", ".join(f"{len(new[kind])} x {kind}" for kind in new)
    kinds = [sum(line.startswith(f"{kind} ") for line in found) for kind in new]
    print(f"differences: {kinds}; compared: {sizes}")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        _, _, root, data, out, *arguments = sys.argv
        sys.path[0] = root
        Path(f"{out}.json").write_text(json.dumps(record(root, data, out, arguments)), encoding="utf-8")
    else:
        sys.exit(main())
