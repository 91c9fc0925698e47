"""The paper's suite over local files: lm-eval's own requests, lm-eval's own backend, one process and two."""

import json
import multiprocessing
import re
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import zstandard
from lm_eval.tasks import TaskManager

from eval.checkpoint.harness import PackedLM
from eval.checkpoint.paper import PAPER_2, PERPLEXITY, SUITE, TABLE_2, TABLE_3, TABLE_4, our_rows
from eval.checkpoint.results import add_results, read_results
from eval.checkpoint.suite import find_tasks
from eval.checkpoint.task_names import defined, lm_eval_tasks
from eval.checkpoint.tasks.local.files import FILES
from eval.checkpoint.text import TextTokenizer
from launch.evaluate import main as evaluate
from ssscale.errors import UserError
from ssscale.hf import register
from ssscale.hf.convert import export_checkpoint
from ssscale.model.decoder import Decoder
from tests.eval.local_data import ITEMS, write_local_data
from tests.eval.random_run import LENGTH, write_run
from tests.pool import Pool


@pytest.fixture(scope="module")
def eval_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("eval_data")
    write_local_data(folder)
    plain = folder / "piqa" / "validation.jsonl"  # one of them compressed
    (folder / "piqa" / "validation.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    plain.unlink()
    return str(folder)


@pytest.fixture(autouse=True)
def without_pip_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval adds what it finds of the environment to its results, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)


@pytest.fixture(scope="module")
def suite_run(tmp_path_factory, config, groups, tokenizer, valid) -> tuple[Path, Decoder]:
    folder = tmp_path_factory.mktemp("suite") / "run"
    return folder, write_run(folder, config, "stickbreaking", groups, tokenizer, valid.tokenizer_file)


def samples(lm: Any, names: list[str], eval_data: str, limit: int | None = None) -> dict[str, Any]:
    manager = find_tasks(names, {"eval_data": eval_data})
    return lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0, limit=limit)


class Requests(lm_eval.api.model.LM):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        self.seen += [request.args for request in requests]
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        self.seen += [request.args for request in requests]
        return [-1.0] * len(requests)

    def generate_until(self, requests: list[Any]) -> list[str]:
        self.seen += [request.args for request in requests]
        return ["1"] * len(requests)


# lm-eval's folder and task of each of ours. MMLU is compared by subject.
THEIRS = {name: (name, name) for name in ("hellaswag", "openbookqa", "piqa", "race", "sciq", "winogrande", "wikitext")}
THEIRS |= {"arc_easy": ("arc", "arc_easy"), "arc_challenge": ("arc", "arc_challenge"), "gsm8k": ("gsm8k", "gsm8k")}
THEIRS |= {"gsm8k_cot": ("gsm8k", "gsm8k_cot"), "lambada_openai": ("lambada", "lambada_openai")}


def test_requests_are_those_of_lm_evals_own_definitions(eval_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from eval.checkpoint.tasks.local.load import read

    folder = Path(lm_eval.__file__).parent / "tasks"
    paths = [str(folder / name) for name in sorted({name for name, _ in THEIRS.values()})]
    manager = TaskManager(include_path=[*paths, str(folder / "mmlu" / "default")], include_defaults=False)
    known: dict[str, str] = {}

    def load_dataset(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        """What the hub would give: the same items under the names of the original's splits."""
        splits = {}
        for file, _ in FILES[known["task"]]:
            docs = read(eval_data, file)
            if "mmlu" in file:
                docs = [doc for doc in docs if doc["subject"] == name]
            split = Path(file).stem.removesuffix("_document_level")
            splits[split] = datasets.Dataset.from_list(docs)
        first = next(iter(splits.values()))
        return datasets.DatasetDict({"train": first, "dev": first, "validation": first} | splits)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    pairs = [(ours, theirs, None) for ours, (_, theirs) in THEIRS.items()]
    for shots, ours in ((0, "mmlu"), (5, "mmlu_5shot")):
        pairs += [(ours, "mmlu_abstract_algebra", shots)]
    for ours, theirs, shots in pairs:
        known["task"] = ours
        a, b = Requests(), Requests()
        samples(a, [ours], eval_data)
        splits = [] if ours != "gsm8k" else ["train"]
        lm_eval.simple_evaluate(b, tasks=[theirs], task_manager=manager, bootstrap_iters=0, num_fewshot=shots)
        assert a.seen, ours
        if shots is None:
            assert a.seen == b.seen, (ours, splits)
        else:  # ours has all subjects in one task
            assert len(b.seen) == 4 * ((ITEMS + 1) // 2)
            assert set(b.seen) <= set(a.seen)


PARITY = ["hellaswag", "piqa", "winogrande", "arc_easy", "mmlu_5shot", "lambada_openai", "wikitext", "gsm8k"]


@pytest.mark.parametrize("core", ["stickbreaking", "ssmax"])
def test_per_example_parity_with_lm_evals_hf_backend(
    core, config, groups, tokenizer, valid, eval_data, tmp_path
) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    decoder = write_run(tmp_path / "run", config, core, groups, tokenizer, valid.tokenizer_file)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, tmp_path / "hf", tokenizer.bos_id, tokenizer.eos_id)
    register()
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = PackedLM(decoder, tokenizer, LENGTH, batch_tokens=1500)
    names = PARITY if core == "stickbreaking" else PARITY[:3]
    found, expected = samples(ours, names, eval_data), {"samples": {}, "results": {}}
    for name in names:
        # Rolling log-likelihoods put BOS before what the tokenizer has begun with BOS already, unless it is told not to.
        theirs = HFLM(hf, tokenizer=text, batch_size=3, device="cpu", add_bos_token=name != "wikitext")
        for key, value in samples(theirs, [name], eval_data).items():
            if key in expected:
                expected[key] |= value
    assert found["samples"].keys() == expected["samples"].keys() == set(names)
    for name in names:
        for a, b in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert a["arguments"] == b["arguments"]
            for x, y in zip(a["resps"], b["resps"], strict=True):
                (x,), (y,) = x, y
                if name == "gsm8k":
                    assert x == y
                elif name == "wikitext":
                    assert x == pytest.approx(y, abs=1e-4 * len(a["doc"]["page"].split()))
                else:
                    assert x[0] == pytest.approx(y[0], abs=1e-4)
                    assert x[1] == y[1]
        for key in ("acc,none", "acc_norm,none", "exact_match,strict-match"):
            assert found["results"][name].get(key) == expected["results"][name].get(key)


def test_the_suite_runs_and_prints_the_papers_tables(suite_run, eval_data, capsys) -> None:
    run, _ = suite_run
    evaluate([f"checkpoint={run}", "suite=stickbreaking_paper", f"eval_data={eval_data}", "limit=2"])
    printed = capsys.readouterr().out
    results = json.loads((run / "eval" / "limit=2" / "step-00000001.json").read_text())
    assert set(results["tasks"]) == set(SUITE)
    shots = {name: task["num_fewshot"] for name, task in results["tasks"].items()}
    assert [shots[name] for name in ("piqa", "mmlu", "mmlu_5shot", "gsm8k", "gsm8k_cot")] == [0, 0, 5, 5, 8]
    table_2, table_3, table_4 = our_rows({name: task["metrics"] for name, task in results["tasks"].items()})
    for values in (table_2, table_3, table_4):
        assert f"{values[0]:.1f}" in printed
    assert None not in (*table_2, *table_3, *table_4)
    assert table_2[-2] == pytest.approx(sum(table_2[:8]) / 8)
    for expected in ("Table 2", "3B stick-breaking", "74.3", "Table 3", "50.8", "Table 4", "49.7"):
        assert expected in printed


def test_parts_make_the_file_of_the_whole(suite_run, eval_data) -> None:
    run, _ = suite_run
    file = run / "eval" / "limit=2" / "step-00000001.json"
    texts = []
    for parts in ([], ["part=1/2"], ["part=0/2"]):
        if parts != ["part=0/2"]:
            file.unlink(missing_ok=True)
        arguments = ["tasks=piqa,arc_easy,wikitext", f"eval_data={eval_data}", "valid=false", "limit=2", *parts]
        evaluate([f"checkpoint={run}", *arguments])
        texts.append(json.loads(file.read_text()))
    assert list(texts[1]["tasks"]) == ["arc_easy"]
    assert texts[2] == texts[0]
    assert len(texts[0]["tasks"]) == 3
    for wrong in ("2/2", "1", "-1/2", "0/0"):
        with pytest.raises(UserError, match="part must be I/N"):
            evaluate([f"checkpoint={run}", f"part={wrong}"])


def test_results_of_evaluations_at_once_are_all_kept(tmp_path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(add_one_by_one, [(str(tmp_path / "step-1.json"), worker) for worker in range(3)])
    assert len(read_results(tmp_path / "step-1.json")["tasks"]) == 60


def add_one_by_one(file: str, worker: int) -> None:
    task = {"metric": "acc", "value": 0.5, "stderr": None, "chance": None, "items": 2}
    for number in range(20):
        add_results(Path(file), {"tasks": {f"{worker}.{number}": task}})


def test_the_papers_averages_are_those_of_its_columns() -> None:
    for row in PAPER_2.values():
        assert sum(row[:8]) / 8 == pytest.approx(row[8], abs=0.06)


def test_two_processes_write_the_file_of_one(suite_run, eval_data, pool1: Pool, pool2: Pool) -> None:
    run, _ = suite_run
    names = "hellaswag,winogrande,mmlu,wikitext,lambada_openai,piqa"
    arguments = [f"tasks={names}", f"eval_data={eval_data}", "valid=false"]
    file = run / "eval" / "step-00000001.json"
    texts = []
    for pool in (pool1, pool2):
        file.unlink(missing_ok=True)
        pool.run("tests.eval.jobs:evaluate_file", arguments=[f"checkpoint={run}", *arguments])
        texts.append(file.read_text())
    assert texts[0] == texts[1]
    assert len(json.loads(texts[0])["tasks"]) == 6


def test_two_tensor_parallel_processes_agree_with_one(suite_run, eval_data, pool2: Pool) -> None:
    run, decoder = suite_run
    names = ["hellaswag", "mmlu", "wikitext"]
    answers = pool2.run("tests.eval.jobs:scores", checkpoint=str(run), names=names, eval_data=eval_data, tensor=2)
    lm = PackedLM(decoder, TextTokenizer.of_checkpoint(run / "checkpoints" / "step-00000001"), LENGTH)
    found = samples(lm, names, eval_data)
    for name in names:
        expected = [float(r[0][0] if name != "wikitext" else r[0]) for s in found["samples"][name] for r in s["resps"]]
        assert answers[0][name] == answers[1][name]
        assert answers[0][name] == pytest.approx(expected, rel=1e-5)


def test_tasks_are_scored_without_a_data_folder(suite_run, eval_data) -> None:
    """As those of an imported model, which was trained elsewhere. The message did not say how."""
    run, _ = suite_run
    piqa = [f"checkpoint={run}", "tasks=piqa", f"eval_data={eval_data}", "limit=2", "data=nowhere"]
    with pytest.raises(UserError, match="with data=FOLDER, or score any task but cloze with valid=false"):
        evaluate(piqa)
    evaluate([*piqa, "valid=false"])


def test_the_reference_gives_the_metrics_of_the_papers_tables() -> None:
    """It promised them for the command's own table, which has acc where there is acc_norm too."""
    page = (Path(__file__).parents[3] / "docs/reference/evaluation.md").read_text(encoding="utf-8")
    _, table = page.split("metric in the paper's tables |\n")
    given = {}
    for line in table.split("\n\n")[0].splitlines()[1:]:
        *_, metric = (cell.strip() for cell in line.strip("|").split("|"))
        given |= dict.fromkeys(re.findall(r"`(\w+)`", line.split("|")[1]), metric)
    assert given.keys() == FILES.keys()
    for task, metric, _ in (*TABLE_2, PERPLEXITY, *TABLE_3, *TABLE_4):
        assert given[task].split()[0].rstrip(",") == metric.partition(",")[0], task


def test_missing_data_is_named(suite_run, eval_data, tmp_path) -> None:
    run, _ = suite_run
    write_local_data(tmp_path, 2)
    (tmp_path / "race" / "test.jsonl").unlink()
    (tmp_path / "gsm8k" / "train.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"tasks=race,gsm8k,gsm8k_cot: data is missing: .*race/test\.jsonl \(a copy of EleutherAI"
    ):
        evaluate([f"checkpoint={run}", "suite=stickbreaking_paper", f"eval_data={tmp_path}"])
    for arguments, words in [
        (["suite=paper"], "suite must be stickbreaking_paper or ruler, not 'paper'"),
        (["limit=0"], "limit must be at least 1"),
        (["tasks=gsm8k", f"eval_data={eval_data}", "length=200", "valid=false"], "the task generates 256 tokens"),
    ]:
        with pytest.raises(UserError, match=words):
            evaluate([f"checkpoint={run}", *arguments])


@pytest.mark.slow
def test_every_name_of_lm_eval_is_found_without_importing_it() -> None:
    found = defined([lm_eval_tasks()])
    assert len(found) > 10_000
    assert [name for name in TaskManager().all_tasks if name not in found] == []
