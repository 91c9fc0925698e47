"""Jobs for the worker pool: runs of the trainer itself."""

import json
from collections import defaultdict

from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.data.batch import collate
from ssscale.errors import UserError
from ssscale.train.loop import train as train_run
from ssscale.train.pretrain import PackedRows, pretraining
from tests.distributed.jobs import regroup

# Four steps of a small model, as `changes` of the jobs below.
SMALL = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.ffn_hidden_size": 32,
    "model.num_heads": 2,
    "train.batch_size": 32,
    "train.microbatch": 8,
    "train.log_every": 1,
    "train.eval_every": 2,
    "train.eval_rows": 24,
    "train.save_every": 2,
    "train.max_steps": 4,
}


def _config(data: str, run: str, **changes: object) -> Config:
    arguments = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return load_config(["config=tiny_sb", f"data.path={data}", f"run_dir={run}", "data.num_workers=0", *arguments])


def train(data: str, run: str, **changes: object) -> str:
    """Train to the end; an error that a user would see is returned."""
    try:
        train_run(pretraining(_config(data, run, **changes), regroup(1)))
    except UserError as error:
        return str(error)
    return ""


def continue_run(given: str, data: str, run: str, **changes: object) -> str:
    """Train another run file than tiny_sb for a few small steps; an error that a user would see is returned."""
    small = {key: value for key, value in SMALL.items() if key.startswith("train.")} | {"train.eval_every": 0}
    more = {"data.path": data, "run_dir": run, "data.length": 256, "data.num_workers": 0, "train.save_every": 3}
    more |= {"train.stages.0.tokens": 65536, "train.stages.0.schedule.lr": 0.01}
    arguments = [f"{key}={json.dumps(value)}" for key, value in (small | more | changes).items()]
    try:
        train_run(pretraining(load_config([given, *arguments]), regroup(1)))
    except UserError as error:
        return str(error)
    return ""


def first_losses_by_source(data: str, run: str, **changes: object) -> dict[str, float]:
    """Nats a token by source over the rows of the first step, from the initial weights, row by row."""
    opened = pretraining(_config(data, run, **changes), regroup(1))
    source = opened.source
    assert isinstance(source, PackedRows)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for k in range(opened.config.train.batch_size):
        sample = source.order[k]
        batch = collate([source.data.row(sample.source, sample.row)], [sample.source])
        losses = opened.engine.module(batch.tokens, batch.layout, batch.labels)
        name = source.names[sample.source]
        totals[name][0] += losses.double().sum().item()
        totals[name][1] += batch.num_targets
    return {name: loss / targets for name, (loss, targets) in totals.items()}
