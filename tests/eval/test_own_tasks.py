"""A user's own lm-eval YAML files over the user's own JSON lines, against lm-eval's `hf` backend on the export."""

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from eval.results import read_results
from launch.evaluate import main as evaluate
from launch.export import main as export
from ssscale.schema import Core
from tests.eval.own_data import write_own_tasks
from tests.eval.test_suite import write_run

STEP = "step-00000001"
TASKS = ["my_capitals", "my_last_word", "my_answers"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_own_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, config, groups, tokenizer, valid) -> Path:
    run = tmp_path_factory.mktemp("own_run") / "run"
    write_run(run, config, Core.stickbreaking, groups, tokenizer, valid.tokenizer_file)
    return run


@pytest.fixture
def run(checkpoint: Path) -> Path:
    shutil.rmtree(checkpoint / "eval", ignore_errors=True)
    return checkpoint


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("own_export") / "hf"
    export([f"checkpoint={checkpoint}", f"out={out}"])
    return out


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def hf_samples(exported: Path, own: Path, shots: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What lm-eval itself finds, by its own command's steps, from the folder of the YAML files."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(str(exported), trust_remote_code=True, batch_size=3, device="cpu", add_bos_token=True)
    found = {"samples": {}, "results": {}}
    for task in TASKS:
        # lm-eval reads data_files from the working directory
        monkeypatch.chdir(own / "more" if task == "my_answers" else own)
        manager = TaskManager(include_path=str(own), include_defaults=False)
        output = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, num_fewshot=shots, bootstrap_iters=0)
        for key, value in output.items():
            if key in found:
                found[key] |= value
    return found


@pytest.mark.parametrize("shots", [0, 5])
def test_own_tasks_give_the_log_likelihoods_of_lm_evals_hf_backend(run, own, exported, shots, monkeypatch) -> None:
    arguments = [f"include={own}", f"tasks={','.join(TASKS)}", f"num_fewshot={shots}", "samples=true", "valid=false"]
    evaluate([f"checkpoint={run}", *arguments])
    folder = run / "eval" / f"num_fewshot={shots}"
    results = read_results(folder / f"{STEP}.json")["tasks"]
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)
    expected = hf_samples(exported, own, shots, monkeypatch)
    assert set(results) == set(TASKS)
    compared = 0
    for task in TASKS:
        ours, theirs = lines(folder / f"{STEP}-samples" / f"{task}.jsonl"), expected["samples"][task]
        assert len(ours) == len(theirs) == 7
        assert results[task]["num_fewshot"] == shots
        assert results[task]["items"] == 7
        for a, b in zip(ours, theirs, strict=True):
            assert a["doc"] == b["doc"]
            for asked, arguments, (response,) in zip(a["requests"], b["arguments"], b["resps"], strict=True):
                if task == "my_answers":
                    assert (asked["prompt"], asked["settings"]) == (arguments[0], arguments[1])
                    assert asked["prompt"].count("Question:") == 1 + shots
                    assert asked["responses"] == [response]
                else:
                    assert (asked["context"], asked["continuation"]) == tuple(arguments)
                    assert asked["loglikelihood"] == pytest.approx(response[0], abs=1e-4)
                    assert asked["greedy"] == response[1]
                    compared += 1
            assert a["metrics"] == {name: b[name] for name in b["metrics"]}
        metric = f"{results[task]['metric']},none"
        assert results[task]["value"] == pytest.approx(expected["results"][task][metric])
    assert compared >= 7 * 4
