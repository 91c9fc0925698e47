"""The five files of docs/extend.md train, in one process and in two, and go on to the same bits."""

import re
from pathlib import Path

import pytest

from tests.mixers.conftest import ROOT, Command, commands
from tests.mixers.runs import pretrain, records

BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
WARMUP = "train.stages.0.schedule.warmup_tokens=2048"
RUNS = {
    "mean": ["model.mixers=[mean]", "model.position.method=nope"],
    "half_rope": ["model.mixers=[softmax_half]", "model.position.method=half_rope"],
    "lion": ["optimizer.name=lion", "optimizer.lion.betas=[0.9,0.98]"],
    "inverse_sqrt": ["train.stages.0.schedule.kind=inverse_sqrt", WARMUP],
    "query_size": ["model.mixers=[softmax_sized]"],
}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = tmp_path_factory.mktemp("plugins")
    blocks = BLOCK.findall((ROOT / "docs/extend.md").read_text(encoding="utf-8"))
    assert {name.removesuffix(".py") for name, _ in blocks} == set(RUNS)
    for name, text in blocks:
        (folder / name).write_text(text)
    return commands(folder)


@pytest.mark.parametrize("name", RUNS)
def test_each_file_trains_and_goes_on(name: str, command: Command, corpus: Path, tmp_path: Path) -> None:
    keys = [*RUNS[name], "train.max_steps=4"]
    losses = pretrain(command, corpus, tmp_path / "once", *keys)
    pretrain(command, corpus, tmp_path / "twice", *RUNS[name], "train.max_steps=2")
    assert pretrain(command, corpus, tmp_path / "twice", *keys) == losses
    two = pretrain(command, corpus, tmp_path / "two", *keys, "processes=2", "parallel.tensor=2")
    assert two == pytest.approx(losses, rel=1e-4)
    if name == "query_size":
        sizes = [records(tmp_path / run, "term/query_size") for run in ("once", "two")]
        assert sizes[0][0] > 0
        assert sizes[1] == pytest.approx(sizes[0], rel=1e-4)
    if name == "inverse_sqrt":
        rates = records(tmp_path / "once", "lr")
        tokens = records(tmp_path / "once", "tokens")[:4]
        peak = rates[tokens.index(2048)]
        assert rates[3] == pytest.approx(peak * (2048 / tokens[3]) ** 0.5)
