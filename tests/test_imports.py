"""Importing us compiles nothing: Dynamo and Inductor, which take 2 seconds, are imported by what compiles."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `tests/imported.py` prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.imported"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_commands_import_neither_dynamo_nor_inductor(found: dict[str, Any]) -> None:
    assert found["imported"] == []


def test_dynamo_leaves_out_what_was_decorated_before_its_import(found: dict[str, Any]) -> None:
    """As with `torch.compiler.disable`, to the number of frames that Dynamo looks at."""
    assert found["ours"] == found["torch"]
    assert found["ours"]["right"]
    assert found["ours"]["refused as one graph"]
    assert not found["ours"]["compiling"]
    assert found["ours"]["graphs"] > 2  # on both sides of the break
    assert found["ours"]["breaks"] >= 2


def test_a_torch_without_the_private_names_decorates_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.eval_frame", ModuleType("eval_frame"))
    spec = importlib.util.spec_from_file_location("other_torch", ROOT / "kernels" / "graph_breaks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("torch.compiler.disable", lambda function: ("decorated", function))
    assert module.breaks_graph(len) == ("decorated", len)


def test_the_data_sets_of_streaming_can_still_be_imported(found: dict[str, Any]) -> None:
    assert found["streaming.text"]
