"""A run folder as the report reads it."""

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

RECORD = {"step", "tokens", "stage", "loss", "lr", "tokens_per_second"}  # keys of a training record
LAST = 5  # training records whose mean is the final training loss: one alone is noisy


@dataclass(frozen=True)
class Run:
    """training, validation: the records of metrics.jsonl by kind. results: of the newest one evaluated, or {}."""

    folder: Path
    config: Config
    training: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    results: dict[str, Any]
    checkpoint: Path | None  # the newest whose files are all there

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Raises UserError where the folder is no run, or has not logged anything yet."""
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
            [record for record in records if "valid_loss" in record],
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
        """The mean of the last records."""
        last = [record["loss"] for record in self.training[-LAST:]]
        return float(sum(last) / len(last))

    @property
    def tokens_per_second(self) -> float:
        """The median, which a pause or the first step's compilation does not move."""
        return float(median(record["tokens_per_second"] for record in self.training))

    @property
    def stage_starts(self) -> list[tuple[int, str]]:
        """(tokens, name) where a later stage begins, as far as the run has come."""
        starts, tokens = [], 0
        for before, stage in zip(self.config.train.stages, self.config.train.stages[1:], strict=False):
            tokens += before.tokens
            if tokens < self.tokens:
                starts.append((tokens, stage.name))
        return starts

    @property
    def bigram(self) -> float | None:
        """The Kneser–Ney bigram's loss in nats a token, where it was evaluated."""
        baseline = self.results.get("baseline")
        return float(baseline["nats_per_token"]) if baseline else None
