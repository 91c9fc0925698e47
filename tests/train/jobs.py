"""Jobs for the worker pool: runs of the trainer itself."""

import json
from collections import defaultdict

from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.data.batch import collate
from ssscale.errors import UserError
from ssscale.train.trainer import Trainer
from tests.distributed.jobs import regroup


def _config(data: str, run: str, **changes: object) -> Config:
    arguments = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return load_config(["config=tiny_sb", f"data.path={data}", f"run_dir={run}", "data.num_workers=0", *arguments])


def train(data: str, run: str, **changes: object) -> str:
    """Train to the end; an error that a user would see is returned."""
    try:
        Trainer(_config(data, run, **changes), regroup(1)).run()
    except UserError as error:
        return str(error)
    return ""


def first_losses_by_source(data: str, run: str, **changes: object) -> dict[str, float]:
    """Nats a token by source over the rows of the first step, from the initial weights, row by row."""
    trainer = Trainer(_config(data, run, **changes), regroup(1))
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for k in range(trainer.config.train.batch_size):
        sample = trainer.order[k]
        batch = collate([trainer.data.row(sample.source, sample.row)], [sample.source])
        losses = trainer.engine.module(batch.tokens, batch.layout, batch.labels)
        name = trainer.data.names[sample.source]
        totals[name][0] += losses.double().sum().item()
        totals[name][1] += batch.num_targets
    return {name: loss / targets for name, (loss, targets) in totals.items()}
