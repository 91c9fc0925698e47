"""The proof of `train.deterministic`, on CPUs: a run that is killed and resumed ends with the bits of one that is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eval.benchmarks import deterministic
from eval.benchmarks.deterministic import LAYOUTS, Found, Runner, compared, digests, jobs_of, main
from ssscale.errors import UserError
from tests.train.jobs import SMALL

MODEL = [f"{key}={value}" for key, value in SMALL.items() if key.startswith("model.")]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("TP2", "TP2_copies", "DP2_copies")]


@pytest.mark.parametrize("layout", ["one", *SLOW])
def test_a_killed_run_ends_with_the_same_bits(
    layout: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = LAYOUTS[layout].ranks
    own = [f"data={corpus}", "configs=tiny_ssmax", f"layouts={layout}", f"processes={ranks}", f"folder={tmp_path}"]
    sizes = ["rows=4", "microbatch=2", "steps=40", "kill=20", f"at_once={3 - ranks}", "data.num_workers=0"]
    assert main([*own, *sizes, *MODEL]) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    (record,) = result["runs"]
    assert record["resumed_from"] == 15
    assert 20 <= record["killed_after"] < 40
    assert record["weights"][0] == record["weights"][1] != record["states"][0] == record["states"][1]
    table = capsys.readouterr().out
    assert f"| tiny_ssmax | {layout} | {record['killed_after']} | 15 | equal | equal | equal |" in table
    assert not list(tmp_path.glob("*/checkpoints"))


def test_one_bit_of_a_weight_or_state_changes_its_digest(tmp_path: Path) -> None:
    def of(**changes: Any) -> tuple[str, str]:
        pieces = {
            "weight/a/0": torch.ones(4),
            "exp_avg/a/0": torch.zeros(4),
            "rng/cpu": torch.zeros(2, dtype=torch.uint8),
        }
        save_file(
            pieces | {key.replace("__", "/"): value for key, value in changes.items()},
            tmp_path / "rank-00000.safetensors",
        )
        return digests(tmp_path)

    plain = of()
    assert of() == plain
    assert of(rng__cpu=torch.ones(2, dtype=torch.uint8)) == plain
    weights, states = of(weight__a__0=torch.ones(4).nextafter(torch.tensor(2.0)))
    assert (weights == plain[0], states == plain[1]) == (False, True)
    weights, states = of(exp_avg__a__0=torch.tensor([0.0, 0.0, 0.0, -0.0]))
    assert (weights == plain[0], states == plain[1]) == (True, False)


def test_runs_take_gpus_that_are_visible(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def run_all(runner: Runner, jobs: list[Any], at_once: int) -> dict[Any, Found]:
        taken.append(runner.gpus)
        return dict.fromkeys(jobs, Found("w", "s", (1.0,)))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(deterministic, "run_all", run_all)
    assert main([f"data={corpus}", "configs=tiny_ssmax", f"folder={tmp_path}"]) == 0
    assert taken == [["5", "3"]]


def test_no_run_is_given_a_key_twice() -> None:
    options = {"folder": "runs", "data": "data", "rows": 4, "microbatch": 2, "steps": 40}
    runner = Runner(options, ["train.keep=3", "train.seed=5"], [])
    job = jobs_of(["tiny_ssmax"], [LAYOUTS["TP2"]], 20)[0]
    pairs = [word.split("=", 1) for word in runner.command(job, 10)[2:]]
    assert len(dict(pairs)) == len(pairs)
    assert (dict(pairs)["train.keep"], dict(pairs)["parallel.tensor"]) == ("3", "2")


def test_what_differs_or_fails_is_not_called_equal() -> None:
    one = [LAYOUTS["one"]]
    killed, whole = jobs_of(["x"], one, 5)
    assert (killed.kill_after, whole.kill_after) == (5, 0)
    for other, equal in (
        (Found("w", "s", (1.0,)), [True, True, True]),
        (Found("v", "s", (1.0,)), [False, True, True]),
        (Found("w", "t", (2.0,)), [True, False, False]),
        (Found(error="failed"), [False, False, False]),
    ):
        (record,) = compared({whole: Found("w", "s", (1.0,)), killed: other}, ["x"], one)
        assert [record[f"{what}_equal"] for what in deterministic.COMPARED] == equal
    (record,) = compared({whole: Found(error="a"), killed: Found(error="b")}, ["x"], one)
    assert not any(record[f"{what}_equal"] for what in deterministic.COMPARED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "data=FOLDER is missing"),
        (["data=nowhere"], "data=nowhere is not a data folder"),
        (["data=x", "kill=50"], "kill=50 must be below steps=50"),
        (["data=x", "layouts=TP3"], "layouts=TP3: use one, TP2, DP2"),
        (["data=x", "layouts=TP2"], "layouts=TP2 needs two ranks: two GPUs, or processes=2 on a CPU"),
        (["data=x", "gpus=2"], "gpus=2: this machine has 0"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main(arguments)
