"""The six files of docs/extend.md train, on one rank and two; a run that stopped goes on to what one that did not has."""

import re
from pathlib import Path

import pytest

from tests.mixers.conftest import ROOT
from tests.mixers.runs import Command, pretrain, records

BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
WARMUP = "train.stages.0.schedule.warmup_tokens=2048"
RUNS = {
    "mean": ["model.mixers=[mean]", "model.position.method=nope"],
    "half_rope": ["model.mixers=[softmax_half]", "model.position.method=half_rope"],
    "lion, inverse_sqrt and query_size": [
        "optimizer.name=lion",
        "optimizer.lion.betas=[0.9,0.98]",
        "train.stages.0.schedule.kind=inverse_sqrt",
        WARMUP,
        "model.mixers=[softmax_sized]",
    ],
}
FILES = {"mean", "half_rope", "lion", "inverse_sqrt", "query_size", "piece_length"}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = tmp_path_factory.mktemp("plugins")
    blocks = BLOCK.findall((ROOT / "docs/extend.md").read_text(encoding="utf-8"))
    assert {name.removesuffix(".py") for name, _ in blocks} == FILES
    for name, text in blocks:
        (folder / name).write_text(text)
    return Command(folder)


@pytest.mark.parametrize("name", RUNS)
def test_they_train_on_one_rank_and_two(name: str, command: Command, corpus: Path, tmp_path: Path) -> None:
    """One rank in two goes, two tensor-parallel ones in one."""
    for steps in (2, 4):
        losses = pretrain(command, corpus, tmp_path / "one", *RUNS[name], f"train.max_steps={steps}")
    changes = [*RUNS[name], "train.max_steps=4", "parallel.tensor=2"]
    two = pretrain(command, corpus, tmp_path / "two", *changes, ranks=2)
    assert two == pytest.approx(losses, rel=1e-4)
    lengths = [records(tmp_path / run, "piece_length") for run in ("one", "two")]
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) == 2
    assert all(1 < length <= 256 for length in lengths[0])
    if name.endswith("query_size"):
        sizes = [records(tmp_path / run, "term/query_size") for run in ("one", "two")]
        assert sizes[0][0] > 0
        assert sizes[1] == pytest.approx(sizes[0], rel=1e-4)
        rates = records(tmp_path / "two", "lr")[:4]
        tokens = sorted(set(records(tmp_path / "two", "tokens")))[:4]  # the hook's records have them too
        peak = rates[tokens.index(2048)]
        assert rates[3] == pytest.approx(peak * (2048 / tokens[3]) ** 0.5)
