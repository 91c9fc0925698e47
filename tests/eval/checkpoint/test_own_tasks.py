"""A user's own lm-eval YAML files over the user's own JSON lines, against lm-eval's `hf` backend on the export."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from eval.checkpoint import progress, suite
from eval.checkpoint.results import read_results
from launch.evaluate import main as evaluate
from launch.export import main as export
from launch.report import main as report
from ssscale.errors import UserError
from tests.eval.own_data import CAPITALS, GROUP, LAST, question, write_lines, write_own_tasks
from tests.eval.random_run import write_run
from tests.pool import Pool

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
    write_run(run, config, "stickbreaking", groups, tokenizer, valid.tokenizer_file)
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


def test_a_group_a_file_and_other_shots_have_results_of_their_own(run, own, capsys) -> None:
    evaluate([f"checkpoint={run}", f"include={own}", "tasks=my_group", "valid=false"])
    evaluate([f"checkpoint={run}", f"tasks={own / 'group.yaml'},{own / 'more/answers.yaml'}", "limit=3", "valid=false"])
    printed = capsys.readouterr().out
    assert "limit=3" in printed
    whole = read_results(run / "eval" / f"{STEP}.json")["tasks"]
    limited = read_results(run / "eval" / "limit=3" / f"{STEP}.json")
    assert set(whole) == {"my_capitals", "my_last_word", "my_group"}
    assert set(limited["tasks"]) == {*whole, "my_answers"}
    assert limited["settings"] == {"limit": 3, "length": None, "num_fewshot": None}
    for tasks, items, limit in ((whole, 7, None), (limited["tasks"], 3, 3)):
        for name, task in tasks.items():
            assert task["items"] == (2 * items if name == "my_group" else items)
            assert (task["limit"], task["num_fewshot"], task["length"]) == (limit, 0, 320)
        parts = [tasks[name]["metrics"]["acc,none"] for name in ("my_capitals", "my_last_word")]
        assert tasks["my_group"]["value"] == pytest.approx(sum(parts) / 2)


def test_the_report_shows_whole_results_alone(run, own, config, capsys) -> None:
    (run / "config.yaml").write_text((run / "checkpoints" / STEP / "config.yaml").read_text())
    record = {"step": 1, "tokens": 1024, "stage": "stable", "loss": 5.0, "lr": 0.01, "grad_norm": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(record | {"tokens_per_second": 1.0}) + "\n")
    asked = [f"checkpoint={run}", f"include={own}", "tasks=my_capitals", "valid=false"]
    evaluate(asked)
    evaluate([*asked, "limit=2"])
    evaluate([*asked, "num_fewshot=2"])
    capsys.readouterr()
    report([str(run), "sample=false"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("my_capitals")]
    assert row.endswith(", 7 items")


BROKEN = {
    "null_answer.yaml": LAST.replace("my_last_word", "null_answer").replace("questions", "lacking_answer"),
    "null_question.yaml": LAST.replace("my_last_word", "null_question").replace("questions", "lacking_question"),
    "empty.yaml": LAST.replace("my_last_word", "empty").replace(" {{choices[answer]}}", "{{'x' if answer else ''}}"),
    "empty_choice.yaml": CAPITALS.replace("my_capitals", "empty_choice").replace("questions", "empty_choice"),
    "one_rank.yaml": LAST.replace("my_last_word", "one_rank").replace('"{{question}}"', "!function code.on_one_rank"),
    "long.yaml": LAST.replace("my_last_word", "long").replace("{{choices[answer]}}", "{{'word ' * 400 * answer}}"),
    "code.yaml": LAST.replace("my_last_word", "code").replace('"{{question}}"', "!function code.text"),
    "scored.yaml": LAST.replace("my_last_word", "scored") + "process_results: !function code.score\n",
    "out_of_range.yaml": """\
task: out_of_range
dataset_path: json
dataset_kwargs: {data_files: {test: data/questions.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: "{{answer * 4}}"
""",
    "writes.yaml": """\
task: writes
dataset_path: json
dataset_kwargs: {data_files: {test: data/questions.jsonl}}
test_split: test
doc_to_text: question
doc_to_target: answer
generation_kwargs: {until: ["."], max_gen_toks: 320}
""",
    "first.yaml": LAST.replace("my_last_word", "first").replace("{{question}}", "{{quesion}}"),
}
REASONS = {
    "null_answer": "document 2: ",
    "null_question": "document 4: a field that a template prints is missing or null",
    "empty": "document 0: the continuation '' of",
    "empty_choice": "document 3: doc_to_choice gives a choice that is missing or empty",
    "long": "document 1: the continuation ' word word",
    "code": "document 2: KeyError: 'title'",
    "scored": "document 5: ZeroDivisionError: division by zero",
    "out_of_range": "document 1: its answer 4 is not one of the 3 choices",
    "writes": "document 0: the task generates 320 tokens, but the model takes 320 in total",
    "first": "document 0: a template needs a field that the document lacks: 'quesion' is undefined",
}
CODE = """\
import torch.distributed as dist


def on_one_rank(doc):
    if dist.get_world_size() == 2 and dist.get_rank() == 1 and doc["question"] == "third":
        raise OSError("this machine's disk")
    return doc["question"]


def text(doc):
    return doc["title" if doc["question"].startswith("third") else "question"]


def score(doc, results):
    return {"acc": 1 / doc["choices"].index("sixth") if "sixth" in doc["choices"] else 0.0}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """Tasks each of which has one document that cannot be scored."""
    folder, rng = tmp_path_factory.mktemp("broken"), random.Random(5)
    write_own_tasks(folder)
    docs = [question(rng) | {"answer": 0} for _ in range(7)]
    docs = [doc | {"choices": doc["choices"][:3]} for doc in docs]
    docs[1]["answer"] = 1
    docs[2]["question"] = "third"
    docs[5]["choices"][0] = "sixth"
    write_lines(folder / "data" / "questions.jsonl", docs)
    for name, index, field in (("lacking_answer", 2, "answer"), ("lacking_question", 4, "question")):
        kept = [
            {key: value for key, value in doc.items() if key != field} if n == index else doc
            for n, doc in enumerate(docs)
        ]
        write_lines(folder / "data" / f"{name}.jsonl", [doc | {"choices": ["a", "b", "c"]} for doc in kept])
    empty = [doc | {"choices": ["", *doc["choices"][1:]]} if n == 3 else doc for n, doc in enumerate(docs)]
    write_lines(folder / "data" / "empty_choice.jsonl", empty)
    for name, text in BROKEN.items():
        (folder / name).write_text(text)
    (folder / "code.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("name", REASONS)
def test_a_document_that_cannot_be_scored_is_named(run, broken, name) -> None:
    with pytest.raises(UserError) as error:
        evaluate([f"checkpoint={run}", f"include={broken}", f"tasks={name}", "valid=false"])
    assert str(error.value).startswith(f"1 of 1 tasks failed: {name}: {REASONS[name]}")
    assert "\n" not in str(error.value)
    assert not (run / "eval" / f"{STEP}.json").exists()


def test_the_other_tasks_go_on_and_are_saved(run, broken, own, capsys) -> None:
    shutil.copyfile(own / "data" / "questions.jsonl", broken / "data" / "good.jsonl")
    (broken / "good.yaml").write_text(LAST.replace("my_last_word", "good").replace("questions", "good"))
    (broken / "bad_group.yaml").write_text(GROUP.replace("my_group", "bad_group").replace("my_last_word", "scored"))
    names = "code,good,bad_group,first"
    with pytest.raises(UserError) as error:
        evaluate([f"checkpoint={run}", f"include={broken}", f"tasks={names}", "samples=true", "valid=false"])
    text = str(error.value)
    assert text.startswith("4 of 6 tasks failed: ")
    for expected in (
        "code: document 2",
        "scored: document 5",
        "bad_group: its task scored failed",
        "first: document 0",
        f"{STEP}.json",
    ):
        assert expected in text
    assert set(read_results(run / "eval" / f"{STEP}.json")["tasks"]) == {"good", "my_capitals"}
    assert {file.stem for file in (run / "eval" / f"{STEP}-samples").iterdir()} == {"good", "my_capitals"}
    assert "code failed: document 2: KeyError: 'title'" in capsys.readouterr().out


def test_two_processes_fail_and_write_as_one(run, broken, own, pool1: Pool, pool2: Pool) -> None:
    found = []
    for pool in (pool1, pool2):
        shutil.rmtree(run / "eval", ignore_errors=True)
        arguments = [f"checkpoint={run}", f"include={own}", "tasks=my_group,my_answers", "samples=true", "valid=false"]
        pool.run("tests.eval.jobs:evaluate_file", arguments=[*arguments, "num_fewshot=2"])
        arguments = [f"checkpoint={run}", f"include={broken}", "tasks=code,my_capitals", "valid=false"]
        said, *others = pool.run("tests.eval.jobs:evaluate_failing", arguments=arguments)
        assert said.startswith("1 of 2 tasks failed: code: document 2: KeyError: 'title'")
        assert others in ([], [None])
        files = sorted(file for file in (run / "eval").rglob("*") if file.is_file() and file.name != ".lock")
        found.append({str(file.relative_to(run)): file.read_text() for file in files})
    assert found[0] == found[1]
    assert len(found[0]) == 2 + 3
    # What only one rank meets is all ranks' failure: the others would wait for it in their passes.
    arguments = [f"checkpoint={run}", f"include={broken}", "tasks=one_rank,my_capitals", "valid=false"]
    said, _ = pool2.run("tests.eval.jobs:evaluate_failing", arguments=arguments)
    assert said.startswith("1 of 2 tasks failed: one_rank: document 2: OSError: this machine's disk")


def test_out_names_another_place_and_mixes_nothing_up(run, own, tmp_path) -> None:
    asked = [f"checkpoint={run}", f"include={own}", "tasks=my_capitals", "valid=false", "samples=true"]
    evaluate([*asked, f"out={tmp_path / 'all'}", "limit=2"])
    assert (tmp_path / "all" / "limit=2" / f"{STEP}.json").is_file()
    file = tmp_path / "mine.json"
    evaluate([*asked, f"out={file}"])
    assert len(lines(tmp_path / "mine-samples" / "my_capitals.jsonl")) == 7
    assert not (run / "eval").exists()
    before = file.read_text()
    with pytest.raises(UserError, match=r"mine\.json holds results with limit=None, not limit=2; name another file"):
        evaluate([*asked, f"out={file}", "limit=2"])
    other = tmp_path / "other"
    shutil.copytree(run, other)
    with pytest.raises(UserError, match=r"mine\.json holds results of .*run/checkpoints"):
        evaluate([f"checkpoint={other}", *asked[1:], f"out={file}"])
    assert file.read_text() == before


def test_mistakes(run, own, tmp_path, monkeypatch) -> None:
    ours = suite.TaskManager  # lm-eval takes many seconds to list its thousands of tasks
    monkeypatch.setattr(suite, "TaskManager", lambda **given: ours(**given | {"include_defaults": False}))
    shutil.copytree(own, tmp_path / "two")
    shutil.copyfile(own / "capitals.yaml", tmp_path / "two" / "copy.yaml")
    (tmp_path / "two" / "bad.yaml").write_text("task: [bad\n")
    (tmp_path / "two" / "no_task.yaml").write_text("output_type: multiple_choice\n")
    (tmp_path / "two" / "away.yaml").write_text(LAST.replace("my_last_word", "away").replace("data/", "gone/"))
    (tmp_path / "two" / "no_shots.yaml").write_text(
        LAST.replace("my_last_word", "no_shots").replace("fewshot_split: shots\n", "")
    )
    for name, old, new in (("split", "test_split: ", "test_split: x"), ("metric", "metric: acc", "metric: accc")):
        changed = (own / "capitals.yaml").read_text().replace("task: my_capitals", f"task: bad_{name}")
        assert old in changed
        (tmp_path / "two" / f"bad_{name}.yaml").write_text(changed.replace(old, new, 1))
    two = f"include={tmp_path / 'two'}"
    for arguments, words in [
        (["include=nowhere", "tasks=x"], "include=nowhere: there is no such folder"),
        ([f"include={own / 'last.yaml'}", "tasks=x"], r"there is no such folder \(use tasks= for a YAML file\)"),
        ([f"include={own}", "tasks=my_capital"], "did you mean my_capitals"),
        (["tasks=nowhere.yaml"], "tasks=nowhere.yaml: there is no such file"),
        ([two, "tasks=bad"], r"no such task.*two/bad\.yaml cannot be read"),
        ([f"tasks={tmp_path / 'two/bad.yaml'}"], r"two/bad\.yaml cannot be read"),
        ([f"tasks={tmp_path / 'two/no_task.yaml'}"], "defines no task: it has neither task: nor group:"),
        ([two, "tasks=my_capitals"], r"capitals\.yaml and .*copy\.yaml both define it"),
        ([two, "tasks=away"], r"away\.yaml: its data gone/questions\.jsonl is neither in .*two nor in"),
        ([two, "tasks=bad_split"], r"bad_split\.yaml: test_split is 'x.*', but data_files has "),
        ([two, "tasks=bad_metric"], r"bad_metric\.yaml: lm-eval has no metric 'accc'; did you mean acc"),
        ([two, "tasks=no_shots", "num_fewshot=1"], "no documents for examples other than the scored ones"),
        ([two, "tasks=my_last_word", "num_fewshot=7"], "num_fewshot=7: the task has only 6 documents for examples"),
        ([two, "tasks=my_group,my_last_word"], "both define it|my_group and my_last_word both contain the task"),
        ([two, "tasks=my_last_word", "num_fewshot=-1"], "num_fewshot must be at least 0"),
        ([two, "tasks=my_last_word", "samples=yes"], "samples must be true or false"),
    ]:
        with pytest.raises(UserError, match=words):
            evaluate([f"checkpoint={run}", "valid=false", *arguments])


def test_progress_is_a_line_in_a_log(monkeypatch, capsys) -> None:
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.track(range(40), "piqa, log-likelihoods", 40, sizes=[3] * 40, unit="requests")) == list(
        range(40)
    )
    said = capsys.readouterr()
    assert said.out == ""
    first, *rest = said.err.splitlines()
    assert first == "piqa, log-likelihoods: 6 of 120 requests (5%) in 0:14, about 4:26 left"
    assert 5 <= len(rest) <= 10
    assert list(progress.track(iter("ab"), "x", 2, show=False)) == ["a", "b"]
    assert progress.clock(3725) == "1:02:05"


def test_the_documentations_example_runs(run, tmp_path, monkeypatch) -> None:
    section = (Path(__file__).parents[3] / "docs/guide/own_tasks.md").read_text()
    files = re.findall(r"`(mytasks/[\w.]+)`[^`]*:\n\n```\w+\n(.*?)```", section, re.DOTALL)
    assert len(files) == 5
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (command,) = re.findall(r"^python launch/evaluate.py checkpoint=runs/tiny_sb (.*)$", section, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    evaluate([f"checkpoint={run}", "valid=false", *command.split()])
    folder = run / "eval" / "num_fewshot=2"
    assert set(read_results(folder / f"{STEP}.json")["tasks"]) == {"capitals", "capitals_written"}
    for name, request in (
        ("capitals", {"context", "continuation", "loglikelihood", "greedy"}),
        ("capitals_written", {"prompt", "settings", "responses"}),
    ):
        found = lines(folder / f"{STEP}-samples" / f"{name}.jsonl")
        assert len(found) == 3
        assert set(found[0]) == {"task", "doc_id", "filter", "doc", "requests", "filtered", "target", "metrics"}
        assert set(found[0]["requests"][0]) == request
        assert found[0]["target"] == "Paris"
    monkeypatch.chdir("/")
    evaluate([f"checkpoint={run}", "valid=false", f"tasks={tmp_path / 'mytasks' / 'capitals.yaml'}", "num_fewshot=0"])
    assert set(read_results(run / "eval" / "num_fewshot=0" / f"{STEP}.json")["tasks"]) == {"capitals"}
