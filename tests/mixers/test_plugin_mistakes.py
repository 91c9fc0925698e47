"""Mistakes in a plugin: each is one sentence that names the file or the mixer."""

from pathlib import Path

import pytest

from tests.mixers.runs import SHAPE, Command

HEAD = """
from dataclasses import dataclass

from ssscale.config.registry import MIXERS, SCHEDULES
from ssscale.errors import UserError
from ssscale.model.mixers.softmax import Softmax
from ssscale.train.schedules.base import Schedule
"""
HALF = """
@MIXERS.register("own")
@dataclass(frozen=True)
class Own(Softmax):
    positions = ("rope",)
"""
SCHEDULE = """
@SCHEDULES.register("{name}")
class {name}(Schedule):
    def rate(self, config, at):
        return config.lr
"""
CHECK = """
    def check(self, config, key):
        if config.warmup_tokens:
            raise UserError(f"{key}.warmup_tokens has no effect")
"""


@pytest.mark.parametrize(
    ("text", "keys", "sentence"),
    [
        ("import nothing_of_this_name", [], "SSSCALE_PLUGINS: {file} line 1: ModuleNotFoundError: No module named"),
        ("def f(:", [], "SSSCALE_PLUGINS: {file}: SyntaxError: invalid syntax"),
        (HEAD + HALF + HALF, [], "error: model.mixers: 'own' is registered twice"),
        (
            HEAD + HALF.replace("@dataclass(frozen=True)\n", ""),
            [],
            "error: model.mixers: 'own' needs @dataclass(frozen=True), or its options have no effect",
        ),
        (
            HEAD + HALF,
            ["model.mixers=[own,softmax]", "model.position.method=nope"],
            "model.position.method=nope does not go with model.mixers=[own, softmax]: use rope",
        ),
    ],
)
def test_they_are_named(text: str, keys: list[str], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    said = Command(file)("launch/estimate.py", "config=tiny_softmax", *SHAPE, *keys, "gpus=1", code=2)
    assert sentence.format(file=file) in said
    assert len(said.splitlines()) == 1


def test_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(HEAD + SCHEDULE.format(name=name))
    command = Command(Path(f"{tmp_path}/first/own.py:{tmp_path}/second/own.py"))
    for name in ("first", "second"):
        command("launch/estimate.py", "config=tiny_softmax", f"train.stages.0.schedule.kind={name}", "gpus=1")


def test_a_schedule_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HEAD + SCHEDULE.format(name="own") + CHECK)
    keys = ["train.stages.0.schedule.kind=own", "train.stages.0.schedule.warmup_tokens=4096"]
    said = Command(tmp_path / "own.py")("launch/estimate.py", "config=tiny_softmax", *keys, "gpus=1", code=2)
    assert said == "error: train.stages.0.schedule.warmup_tokens has no effect\n"
