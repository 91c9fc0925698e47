"""docs/step.md names the files that a step passes through, in order: it is run with every call of ours on record."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ssscale.config import load_config
from ssscale.parallel.groups import Groups
from ssscale.train import loop
from ssscale.train.pretrain import pretraining
from ssscale.train.run import Run
from tests.architecture import Sources

ROOT = Path(__file__).resolve().parents[2]
MOST = 20
BEFORE = ("loop", "run", "pretrain")  # of ssscale/train: they make the step
# Found by their names in the configuration: nothing imports them (ssscale/config/registry.py).
REGISTERED = ("ssscale/model/mixers/", "ssscale/train/schedules/")
# Frozen records that everything reads.
RECORDS = ("ssscale/config/", "ssscale/parallel/groups.py", "ssscale/model/width.py")


def table(number: int) -> list[str]:
    """The files of the page's table."""
    rows = (ROOT / "docs/step.md").read_text(encoding="utf-8").split("|---|---|")[number].partition("\n## ")[0]
    return [file for row in rows.splitlines() if row.startswith("| `") for file in cells(row)]


def cells(row: str) -> list[str]:
    return re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[1])


class Calls:
    """Files of ours whose functions were called, in the order of their first calls. Properties only read."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.ignored = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_qualname == "Run.mark":
            self.ignored += 1 if event == "call" else -1
        file = code.co_filename
        if event == "return" or self.ignored or not file.startswith(f"{ROOT}/") or "/.venv" in file or file == __file__:
            return
        path = Path(file).relative_to(ROOT).as_posix()
        path = "kernels/" if path.startswith("kernels/") else path
        if path not in self.files and not path.startswith(RECORDS) and not is_property(frame):
            self.files.append(path)


def is_property(frame: FrameType) -> bool:
    found: Any = frame.f_globals
    for name in frame.f_code.co_qualname.split("."):
        found = found.get(name) if isinstance(found, dict) else inspect.getattr_static(found, name, None)
    return isinstance(found, property)


@pytest.fixture
def called(
    corpus: Path, tmp_path: Path, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """The files of a step, and those between two steps; not of the first step, in which things are imported."""
    changes = ["train.max_steps=3", "data.num_workers=0", "train.eval_every=0", "train.observe_every=0"]
    run = pretraining(
        load_config(["config=tiny_sb", f"data.path={corpus}", f"run_dir={tmp_path}/run", *changes]), groups
    )
    inside, outside = Calls(), Calls()
    steps, train_step, advance = run.source.steps, loop.train_step, loop._advance

    def recorded_steps(*arguments: Any) -> Iterator[Any]:
        batches = iter(steps(*arguments))
        while True:
            before = sys.getprofile()  # that of the step, if it prepares the next one
            sys.setprofile(inside if run.state.step else None)
            batch = next(batches, None)
            sys.setprofile(before)
            if batch is None:
                return
            yield batch

    def recorded_step(*arguments: Any) -> Any:
        sys.setprofile(inside if run.state.step else None)
        try:
            return train_step(*arguments)
        finally:
            sys.setprofile(outside if run.state.step else None)

    def recorded_advance(run: Run, *arguments: Any) -> None:
        sys.setprofile(outside if run.state.step else None)
        try:
            advance(run, *arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(run.source, "steps", recorded_steps)
    monkeypatch.setattr(loop, "train_step", recorded_step)
    monkeypatch.setattr(loop, "_advance", recorded_advance)
    loop.train(run)
    return inside.files, outside.files


def test_the_page_names_the_files_of_a_step(called: tuple[list[str], list[str]]) -> None:
    listed, (inside, _) = table(1), called
    before = [*(f"launch/{name}.py" for name in ("pretrain", "training")), *map("ssscale/train/{}.py".format, BEFORE)]
    assert listed[: len(before)] == before
    assert len(listed) <= MOST
    assert set(listed) == {*before, *inside}, (set(listed) - {*before, *inside}, set(inside) - set(listed))


def test_the_page_names_what_is_between_two_steps(called: tuple[list[str], list[str]]) -> None:
    listed, (inside, outside) = table(2), called
    new = set(outside) - set(inside) - set(table(1)) - {"tests/train/test_step_page.py"}
    writing = {file for file in new if file.endswith(("metrics.py", "appender.py", "event_file.py", "save.py"))}
    assert new - writing <= set(listed), new - writing - set(listed)
    assert all((ROOT / file).is_file() for file in listed)


def test_each_file_is_reached_by_imports_from_the_one_before_it() -> None:
    """Or from another one above it."""
    sources = Sources()
    by_path = {file.path: file for file in sources.files}
    above: set[str] = set()
    for path in table(1):
        if above and not path.startswith(REGISTERED):
            assert path in above, f"nothing above {path} imports it"
        files = [
            file for name, file in by_path.items() if name == path or (path.endswith("/") and name.startswith(path))
        ]
        targets = [sources.target(*found) for file in files for found in file.imports]
        above |= {"kernels/" if t.top == "kernels" else t.path for t in targets if t is not None}
