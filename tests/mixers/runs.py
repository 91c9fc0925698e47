"""Short runs of the tests' small model."""

import json
from pathlib import Path

from tests.mixers.conftest import Command

SHAPE = ["model.hidden_size=64", "model.ffn_hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2"]
TRAIN = ["train.batch_size=8", "train.microbatch=2", "train.log_every=1", "train.eval_every=0", "train.save_every=2"]


def records(run: Path, name: str) -> list:
    """What metrics.jsonl has under a name, in order."""
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in every if name in record]


def pretrain(command: Command, corpus: Path, run: Path, *changes: str) -> list[float]:
    """The losses of all steps."""
    command(
        "launch/pretrain.py", "config=tiny_softmax", f"data.path={corpus}", f"run_dir={run}", *SHAPE, *TRAIN, *changes
    )
    return records(run, "loss")
