"""Commands with plugins, and short runs of the tests' small model."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.train.commands import run_command
from tests.train.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ["model.hidden_size=64", "model.ffn_hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2"]
TRAIN = ["train.batch_size=8", "train.microbatch=2", "train.log_every=1", "train.eval_every=0", "train.save_every=2"]
VARIABLE = "SSSCALE_PLUGINS"


def plug(plugin: str) -> None:
    """In a forked process, which has imported much but has looked into no registry yet."""
    from ssscale.config.registry import MIXERS, OPTIMIZERS, POSITIONS, SCHEDULES

    assert not any(registry._complete for registry in (MIXERS, OPTIMIZERS, POSITIONS, SCHEDULES))
    os.environ[VARIABLE] = plugin


@dataclass(frozen=True)
class Command:
    """Commands with a plugin. A call is `python FILE ARGUMENTS`; what imports torch starts faster by `forked` and `train`."""

    plugin: Path

    def __call__(self, file: str, *arguments: str, code: int = 0) -> str:
        """The output. Fails where the exit code is another than expected."""
        environment = os.environ | {VARIABLE: str(self.plugin), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, file, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def forked(self, module: str, *arguments: str) -> None:
        """A module as a script, in a process forked from one that has everything imported."""
        with TemporaryDirectory() as folder:
            code, output = run_command(module, list(arguments), Path(folder) / "log", partial(plug, str(self.plugin)))
        assert code == 0, output

    def train(self, run: Path, ranks: int, *arguments: str) -> None:
        """launch/pretrain.py on so many ranks, forked."""
        Ranks(list(arguments), run, ranks, partial(plug, str(self.plugin)), small=False).finish()


def records(run: Path, name: str) -> list:
    """What metrics.jsonl has under a name, in order."""
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in every if name in record]


def pretrain(
    command: Command, corpus: Path, run: Path, *changes: str, ranks: int = 1, fresh: bool = False
) -> list[float]:
    """The losses of all steps. fresh: in a new interpreter instead of a forked process."""
    arguments = ["config=tiny_softmax", f"data.path={corpus}", *SHAPE, *TRAIN, *changes]
    if fresh:
        command("launch/pretrain.py", *arguments, f"run_dir={run}", f"processes={ranks}")
    else:
        command.train(run, ranks, *arguments)
    return records(run, "loss")
