"""Our harness beside lm-eval's hf backend: the same values, and both timed."""

import json
from pathlib import Path

import pytest

from eval.benchmarks.against_hf import main as against_hf
from ssscale.errors import UserError
from tests.eval.local_data import write_local_data
from tests.eval.random_run import write_run


@pytest.fixture
def eval_data(tmp_path: Path) -> Path:
    write_local_data(tmp_path / "eval_data")
    return tmp_path / "eval_data"


@pytest.fixture
def run(tmp_path, config, groups, tokenizer, valid) -> Path:
    write_run(tmp_path / "run", config, "stickbreaking", groups, tokenizer, valid.tokenizer_file)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def without_pip_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval adds what it finds of the environment to its results, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)


def test_the_comparison_with_the_hf_backend(run, eval_data, tmp_path, capsys) -> None:
    out = tmp_path / "comparison.json"
    names = "piqa,mmlu,wikitext,gsm8k"
    settings = ["dtype=float32", "batch_sizes=2,auto", "limit=4", f"out={out}", f"eval_data={eval_data}"]
    against_hf([f"checkpoint={run}", f"tasks={names}", *settings])
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())["tasks"]
    assert list(results) == names.split(",")
    assert [results[name]["requests"] for name in names.split(",")] == [8, 16, 4, 2]
    for name, found in results.items():
        assert (found["difference"] or 0.0) < 1e-4
        assert found["same"] == 1
        assert found["metric"][1] == pytest.approx(found["metric"][2], rel=1e-5)
        assert found["ratio"] == pytest.approx(found["hf_seconds"] / found["our_seconds"])
        assert set(found["hf_rates"]) == {"2", "auto"}
        assert f"\n{name} " in printed
    assert "all tasks: ours" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tasks=piqa"], "checkpoint=RUN is missing"),
        (["checkpoint=x", "batch_sizes=8,big"], "batch_sizes must be comma-separated integers"),
        (["checkpoint=x", "batch_sizes=auto"], "batch_sizes must be comma-separated integers"),
        (["checkpoint=x", "dtype=int8"], "dtype must be bfloat16 or float32, not 'int8'"),
        (["checkpoint=x", "limit=0"], "must be at least 1"),
        (["checkpoint=x", "speed=1"], "unknown argument 'speed=1'"),
    ],
)
def test_the_comparison_says_what_it_does_not_take(arguments, words) -> None:
    with pytest.raises(UserError, match=words):
        against_hf(arguments)
