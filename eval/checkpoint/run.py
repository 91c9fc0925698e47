"""Reads a run folder for reports and figures."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from eval.checkpoint.results import newest_results
from ssscale.config import read_yaml
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint, list_checkpoints
from ssscale.train.records import read_metrics

RECORD = {"step", "tokens", "stage", "loss", "lr", "tokens_per_second"}  # keys that every training record has
LAST = 5  # the final training loss is the mean of this many records, because one record is noisy


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    training, validation: the records of metrics.jsonl by kind.
    results: the results of the newest evaluated checkpoint, or {}.
    checkpoint: the newest complete checkpoint, or None.
    """

    folder: Path
    config: Config
    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    results: dict[str, Any]
    checkpoint: Path | None

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Read a run folder. Raises UserError if it is not a run, or has not logged a training loss yet."""
        saved = folder / "config.yaml"
        if not saved.is_file():
            raise UserError(f"{folder} is not a run folder: it has no config.yaml")
        records = read_metrics(folder / "metrics.jsonl")
        training = [record for record in records if record.keys() >= RECORD]
        if not training:
            raise UserError(f"{folder} has no training loss in its metrics.jsonl yet")
        has_any = list_checkpoints(folder / "checkpoints")
        return cls(
            folder,
            read_yaml(saved),
            training,
            [record for record in records if record.keys() >= {"tokens", "valid_loss"}],
            newest_results(folder),
            find_checkpoint(folder, "RUN", quiet=True) if has_any else None,
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def tokens(self) -> int:
        return int(self.training[-1]["tokens"])

    @property
    def training_loss(self) -> float:
        """The mean loss of the last training records, in nats per token."""
        last = [record["loss"] for record in self.training[-LAST:]]
        return float(sum(last) / len(last))

    @property
    def tokens_per_second(self) -> float:
        """The median over the records. A pause or the compilation in the first step does not change it."""
        return float(median(record["tokens_per_second"] for record in self.training))

    @property
    def stage_starts(self) -> list[tuple[int, str]]:
        """(tokens, name) of the start of each stage after the first, up to the current tokens of the run."""
        starts, tokens = [], 0
        for before, stage in zip(self.config.train.stages, self.config.train.stages[1:], strict=False):
            tokens += before.tokens
            if tokens < self.tokens:
                starts.append((tokens, stage.name))
        return starts

    @property
    def bigram(self) -> float | None:
        """The loss of the Kneser–Ney bigram in nats per token, or None if it was not evaluated."""
        baseline = self.results.get("baseline")
        return float(baseline["nats_per_token"]) if baseline else None
