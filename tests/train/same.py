"""Two runs compared to the last bit: losses, weights and moments."""

import hashlib
from pathlib import Path

from ssscale.train.records import read_metrics


def weights_of(run: Path) -> dict[str, str]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.glob("*.safetensors"))}


def compare(plain: Path, killed: Path) -> None:
    """Losses of all steps and the final weights and moments, to the last bit; each step once."""
    a, b = ([r for r in read_metrics(run / "metrics.jsonl") if "loss" in r] for run in (plain, killed))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    assert [r["loss"] for r in a] == [r["loss"] for r in b]
    assert weights_of(plain) == weights_of(killed)
    valid = [
        [r["valid_loss"] for r in read_metrics(run / "metrics.jsonl") if "valid_loss" in r] for run in (plain, killed)
    ]
    assert valid[0][-1:] == valid[1][-1:]
