"""RULER's tasks: lm-eval's own samples and prompts, made from local texts; every one of them end to end."""

import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from eval.checkpoint.harness import PackedLM
from eval.checkpoint.ruler import TASKS
from eval.checkpoint.ruler.data import find_sources, parse_stand_ins, read_essays, read_questions
from eval.checkpoint.ruler.offline import (
    CompoundWords,
    cwe_utils,
    fwe_utils,
    niah_utils,
    offline,
    prepare_niah,
    qa_utils,
    split_sentences,
    vt_utils,
    words,
)
from eval.checkpoint.ruler.run import LM_EVALS, definition, prepare_ruler
from eval.checkpoint.ruler.samples import Counter, Texts, check, counter_of, generate
from eval.checkpoint.scoring import TaskResult
from eval.checkpoint.suite import find_tasks, run_lm_eval
from eval.checkpoint.text import TextTokenizer
from launch.evaluate import main as evaluate
from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from ssscale.errors import UserError
from ssscale.hf import register
from ssscale.hf.convert import WeightsOnly, export_checkpoint
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.options import last_of_each
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint
from tests.eval.ruler_data import VOCAB, squad_article, write_texts, write_tokenizer
from tests.pool import Pool

LENGTH = 1792  # about the least of a tokenizer this small
THEIRS: dict[str, Callable[..., Any]] = {name: getattr(niah_utils, name) for name in TASKS if name.startswith("niah")}
THEIRS |= {
    "ruler_vt": vt_utils.get_vt_dataset,
    "ruler_cwe": cwe_utils.get_cw_dataset,
    "ruler_fwe": fwe_utils.fwe_download,
}
THEIRS |= {"ruler_qa_squad": qa_utils.get_squad, "ruler_qa_hotpot": qa_utils.get_hotpotqa}


@pytest.fixture(scope="module")
def eval_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ruler_texts")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    file = tmp_path_factory.mktemp("ruler_tokenizer") / "tokenizer.json"
    write_tokenizer(file)
    return TextTokenizer(str(file), 0, 1)


@pytest.fixture(scope="module")
def texts(eval_data: Path) -> Texts:
    found = find_sources(["essays", "squad", "hotpotqa"], str(eval_data), {})
    assert all(source.stand_in_for is None for _, source in found.values())
    return Texts({name: file for name, (file, _) in found.items()})


@pytest.fixture(scope="module")
def ruler_run(tmp_path_factory, groups, english: TextTokenizer) -> Path:
    """A run with random weights, trained on 256 tokens by its configuration."""
    folder = tmp_path_factory.mktemp("ruler") / "run"
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_heads": 1}
    model = ModelConfig(**sizes, vocab_size=VOCAB, tie_embeddings=True, init_std=0.3)
    config = Config(name="ruler", model=model, data=DataConfig("none", 256), train=TrainConfig())
    decoder = Decoder(model, groups, 256)
    initialize_weights(decoder, model, groups, seed=5)
    file = json.loads(english.tokenizer.to_str())
    files = {"config.yaml": to_yaml(config), "tokenizer.json": json.dumps(file)}
    files["boundaries.json"] = json.dumps({"bos_id": 0, "eos_id": 1})
    save_checkpoint(folder / "checkpoints", WeightsOnly(decoder), groups, TrainState(step=1), files)
    return folder


@pytest.fixture(autouse=True)
def without_pip_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval adds what it finds of the environment to its results, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_lm_evals_functions(task, texts, english, eval_data, monkeypatch) -> None:
    """Theirs are given what they would download; both are measured by the tokens of a text alone."""
    counter = Counter(english.encode)
    for module in (niah_utils, cwe_utils, fwe_utils, vt_utils, qa_utils):
        monkeypatch.setattr(module, "get_tokenizer", lambda _: counter)
    essays = [json.loads(line) for line in (eval_data / "paul_graham_essays/train.jsonl").open()]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"text": [essay["text"] for essay in essays]})
    file = "squad/dev-v2.0.json" if task == "ruler_qa_squad" else "hotpotqa/hotpot_dev_distractor_v1.json"
    monkeypatch.setattr(qa_utils, "download_json", lambda _: json.loads((eval_data / file).read_text()))
    number = 6
    for cached in (prepare_niah.get_haystack, qa_utils.read_squad, qa_utils.read_hotpotqa):
        cached.cache_clear()
    with offline(lambda steps: islice(steps, number)):
        # 500 samples are more than there are questions; the first ones are the same.
        expected = THEIRS[task](tokenizer="ours", max_seq_lengths=[LENGTH])["test"].to_list()
    prepare_niah.get_haystack.cache_clear()
    assert len(expected) == number
    assert generate(task, LENGTH, number, counter, texts) == expected
    assert generate(task, LENGTH, 3, counter, texts) == expected[:3]


class Answers(LM):
    """Keeps what it is asked, and answers as it is told."""

    def __init__(self, answers: Callable[[int], str]) -> None:
        super().__init__()
        self.answers, self.seen = answers, []

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise AssertionError

    loglikelihood_rolling = loglikelihood

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.seen += [request.args for request in requests]
        return [self.answers(index) for index in range(len(requests))]


def ask(task: str, length: int, docs: list[dict], answers: Callable[[int], str]) -> tuple[list[Any], TaskResult]:
    lm = Answers(answers)
    lm.length = length
    (result,) = run_lm_eval(lm, [definition(task, length, docs)], TaskManager(include_defaults=False))
    return lm.seen, result


@pytest.mark.parametrize("length", [LENGTH, 4608])
@pytest.mark.parametrize("task", TASKS)
def test_prompt_and_answer_fill_the_length_and_no_more(task, length, texts, english) -> None:
    check([task], [length], english.encode, texts)
    docs = generate(task, length, 5, counter_of(task, english.encode), texts)
    assert len(docs) == 5
    if "qa" not in task:
        assert all(answer in doc["input"] for doc in docs for answer in doc["outputs"])
    requests, _ = ask(task, length, docs, lambda _: "")
    tokens = [1 + len(english.encode(prompt)) + options["max_gen_toks"] for prompt, options in requests]
    for (prompt, options), doc, count in zip(requests, docs, tokens, strict=True):
        assert prompt.startswith(doc["input"])
        assert prompt.endswith(doc["gen_prefix"])
        assert not options["until"]
        assert count <= doc["length"] <= length, (count, doc["length"])
    assert max(tokens) > 0.5 * length


def test_scores_are_the_answers_found(texts, english) -> None:
    docs = generate("niah_multivalue", LENGTH, 4, counter_of("niah_multivalue", english.encode), texts)
    shares = [4, 2, 1, 0]
    _, result = ask("niah_multivalue", LENGTH, docs, lambda i: "\n x, ".join(docs[i]["outputs"][: shares[i]]).upper())
    assert result.value == pytest.approx(7 / 16)
    assert (result.task, result.items) == (f"niah_multivalue@{LENGTH}", 4)
    docs = generate("ruler_qa_squad", LENGTH, 4, counter_of("ruler_qa_squad", english.encode), texts)
    assert all(len(set(doc["outputs"])) == 2 for doc in docs)
    _, result = ask("ruler_qa_squad", LENGTH, docs, lambda i: docs[i]["outputs"][1] if i else "nothing")
    assert result.value == pytest.approx(3 / 4)  # any of the answers will do
    assert result.metrics[f"{LM_EVALS},none"] == pytest.approx(
        3 / 4 * 1 / 3
    )  # of an answer's three spellings, as lm-eval has it


def test_all_13_run_end_to_end_and_two_processes_write_the_same_file(ruler_run, eval_data, capsys, pool2: Pool) -> None:
    arguments = [f"checkpoint={ruler_run}", f"eval_data={eval_data}", "limit=2"]
    file = ruler_run / "eval" / "limit=2" / "step-00000001.json"
    evaluate([*arguments, "suite=ruler", f"lengths={LENGTH}"])
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert set(results["tasks"]) == {f"{task}@{LENGTH}" for task in TASKS}
    assert all(task["items"] == 2 and 0 <= task["value"] <= 1 for task in results["tasks"].values())
    assert all(task["metrics"]["longest"] <= LENGTH for task in results["tasks"].values())
    assert results["ruler"]["average"].keys() == {str(LENGTH)}
    assert results["ruler"]["data"]["squad"]["stand_in_for"] is None
    for expected in ("average of 13", "1,792", "essays: paul_graham_essays/train.jsonl", "beyond the 256 tokens"):
        assert expected in printed
    some = [
        *arguments,
        "valid=false",
        "tasks=niah_single_2,ruler_vt,ruler_qa_hotpot",
        f"lengths={LENGTH},{LENGTH + 128}",
    ]
    file.unlink()
    evaluate(some)
    alone = file.read_text()
    file.unlink()
    pool2.run("tests.eval.jobs:evaluate_file", arguments=some)
    assert file.read_text() == alone
    assert len(json.loads(alone)["tasks"]) == 6


def test_only_what_is_missing_is_computed(ruler_run, eval_data, tmp_path, monkeypatch, capsys) -> None:
    """A stopped command continues. A result from other texts is not one of its results."""
    more = [f"checkpoint={ruler_run}", f"eval_data={eval_data}", "limit=1", "valid=false", f"out={tmp_path}/some.json"]
    arguments = [*more, "tasks=niah_single_2,ruler_vt,ruler_fwe", f"lengths={LENGTH}"]
    evaluate(arguments)
    file = tmp_path / "some.json"
    whole = json.loads(file.read_text())
    less = json.loads(file.read_text())
    del less["tasks"][f"ruler_vt@{LENGTH}"]
    less["tasks"][f"niah_single_2@{LENGTH}"]["metrics"]["data"]["sha256"] = "other"
    file.write_text(json.dumps(less))
    made: list[str] = []
    original = generate

    def noted(task: str, *rest: Any) -> Any:
        made.append(task)
        return original(task, *rest)

    monkeypatch.setattr("eval.checkpoint.ruler.run.generate", noted)
    evaluate([*arguments, "missing=true"])
    assert made == ["niah_single_2", "ruler_vt"]
    assert json.loads(file.read_text()) == whole
    assert "average of 3" in capsys.readouterr().out


def test_generated_texts_are_those_of_lm_evals_hf_backend(ruler_run, groups, texts, english, tmp_path) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(ruler_run / "checkpoints" / "step-00000001", tmp_path / "hf", 0, 1)
    register()
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = HFLM(hf, tokenizer=text, batch_size=2, device="cpu", add_bos_token=True, max_length=LENGTH)
    ours = PackedLM(load_for_inference(ruler_run, groups)[0], english, LENGTH)
    for task in ("niah_multivalue", "ruler_qa_squad"):
        docs = generate(task, LENGTH, 2, counter_of(task, english.encode), texts)
        found, expected = (
            [
                sample["resps"]
                for sample in lm_eval.simple_evaluate(
                    lm,
                    tasks=[definition(task, LENGTH, docs)],
                    task_manager=TaskManager(include_defaults=False),
                    bootstrap_iters=0,
                )["samples"][f"{task}@{LENGTH}"]
            ]
            for lm in (ours, theirs)
        )
        assert found == expected
        assert all(len(text) > 20 for ((text,),) in found)


def test_a_stand_in_is_said_and_written(ruler_run, eval_data, tmp_path, capsys) -> None:
    folder = tmp_path / "data"
    (folder / "squadshifts").mkdir(parents=True)
    squad = json.loads((eval_data / "squad/dev-v2.0.json").read_text())
    for paragraph in (paragraph for article in squad["data"] for paragraph in article["paragraphs"]):
        for question in paragraph["qas"]:
            del question["is_impossible"]  # SQuAD 1.1
    (folder / "squadshifts/new_wiki_v1.0.json").write_text(json.dumps(squad))
    (tmp_path / "novel.txt").write_text("\n\n".join(read_essays(eval_data / "paul_graham_essays/train.jsonl")))
    sources = find_sources(["essays", "squad"], str(folder), {"essays": tmp_path / "novel.txt"})
    shown = [source.sentence(name) for name, (_, source) in sources.items()]
    assert shown[0] == "essays: novel.txt STANDS IN for baber/paul_graham_essays, train"
    assert shown[1].startswith("squad: squadshifts/new_wiki_v1.0.json STANDS IN for dev-v2.0.json")
    arguments = [f"checkpoint={ruler_run}", f"eval_data={folder}", "limit=1", f"lengths={LENGTH}"]
    evaluate(
        [*arguments, "valid=false", "tasks=niah_single_2,ruler_qa_squad", f"stand_in=essays:{tmp_path / 'novel.txt'}"]
    )
    printed = capsys.readouterr().out
    assert all(sentence in printed for sentence in shown)
    results = json.loads((ruler_run / "eval" / "limit=1" / "step-00000001.json").read_text())
    assert results["ruler"]["data"] == {name: source.to_json() for name, (_, source) in sources.items()}
    data = results["tasks"][f"ruler_qa_squad@{LENGTH}"]["metrics"]["data"]
    assert data["stand_in_for"] == "dev-v2.0.json of rajpurkar.github.io/SQuAD-explorer"
    # A stand-in that is named comes before a copy, and SQuAD's form serves for HotpotQA.
    named = {"hotpotqa": folder / "squadshifts/new_wiki_v1.0.json"}
    ((file, source),) = find_sources(["hotpotqa"], str(eval_data), named).values()
    assert source.stand_in_for
    assert len(read_questions(file)[0]) == 240


def test_originals_are_downloaded_where_the_user_lets_it(tmp_path, monkeypatch) -> None:
    squad = {"data": [squad_article(["word " * 50], random.Random(1))]}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"text": ["one essay", "another"]})
    monkeypatch.setattr(qa_utils, "download_json", lambda url: squad if url.endswith("dev-v2.0.json") else None)
    found = find_sources(["essays", "squad"], str(tmp_path), {})
    assert read_essays(found["essays"][0]) == ["one", "essay", "another"]
    assert len(read_questions(found["squad"][0])[0]) == 1
    assert all(source.stand_in_for is None for _, source in found.values())
    with (
        mock.patch.object(qa_utils, "download_json", side_effect=OSError("no route")),
        pytest.raises(UserError, match=r"hotpotqa\.github\.io cannot be downloaded to .*: no route"),
    ):
        find_sources(["hotpotqa"], str(tmp_path), {})


def test_words_are_lm_evals_without_its_list() -> None:
    adjectives = ["blue", "bluest", "blue-eyed", "blue-e", "old", "red", "old-fashioned", "red", "x-rated"]
    nouns = ["sky", "eyed", "apple", "e-book", "eyed-sky2", "zoo", "sky"]
    lazy = CompoundWords(adjectives, nouns)
    expected = sorted(f"{adjective}-{noun}" for adjective in set(adjectives) for noun in set(nouns))
    assert [lazy[index] for index in range(len(lazy))] == expected
    assert len(words()) == 6_171_620  # of wonderwords 3.0.1, as lm-eval counts them
    with pytest.raises(IndexError):
        words()[len(words())]


def test_sentences() -> None:
    text = 'He came. "Who?" she asked. Mr. J. Smith (of St. Ives) had 3.5 pounds! 7 were lost... etc. and so on'
    parts = [
        "He came.",
        '"Who?" she asked.',
        "Mr. J. Smith (of St. Ives) had 3.5 pounds!",
        "7 were lost... etc. and so on",
    ]
    assert split_sentences(text) == parts
    assert split_sentences("") == []
    assert split_sentences("One only") == ["One only"]


def test_looked_up_words_have_the_tokenizers_ids(english) -> None:
    for text in ("", "  a\n\n b", "Ünïcode ½ 漢字 don't", "<s>BOS</s>", "x" * 500, "\u0000\u2028 it's"):
        assert english.encode(text) == english.tokenizer.encode(text, add_special_tokens=False).ids
        assert english.decode(english.encode(text)) == text


def test_bad_input_is_named(ruler_run, eval_data, tmp_path, texts, english) -> None:
    empty = tmp_path / "none"
    broken = tmp_path / "broken.json"
    broken.write_text('{"data": [{"paragraphs": [{}]}]}')
    few = tmp_path / "few.txt"
    few.write_text("a few words " * 50)
    cases = [
        (["lengths=4k"], r"lengths must be comma-separated integers, not '4k'"),
        (["lengths=0,4096"], "lengths must be from 1"),
        (
            ["lengths=256,512"],
            r"too short with this tokenizer for 256: niah_single_1 \([\d,]+\), .*; 512: .*ruler_vt \([\d,]+\)",
        ),
        (["lengths=4096", "length=2048"], r"lengths=4096: the model is given 2,048 tokens at most \(length=2048\)"),
        (
            ["lengths=4096", f"eval_data={empty}"],
            "hotpot_dev_distractor_v1.json of hotpotqa.github.io.*stand_in=hotpotqa:FILE",
        ),
        (["stand_in=essay:x"], "it must be NAME:FILE, with NAME one of essays, squad, hotpotqa"),
        (["stand_in=essays:nowhere.txt"], "there is no such file"),
        (["lengths=4096", f"stand_in=squad:{broken}"], "neither in SQuAD's nor in HotpotQA's format: KeyError"),
        (["lengths=4096", f"stand_in=essays:{few}"], "lengths=4096: .*few.txt has less text than that"),
        (["tasks=cloze", "lengths=4096"], "lengths and stand_in are for RULER's tasks"),
    ]
    for arguments, words_ in cases:
        with pytest.raises(UserError, match=words_):
            evaluate(last_of_each([f"checkpoint={ruler_run}", "suite=ruler", f"eval_data={eval_data}", *arguments]))
    with pytest.raises(UserError, match=r"tasks=ruler_vt: RULER's tasks run with launch/evaluate\.py suite=ruler"):
        find_tasks(["piqa", "ruler_vt"], {"eval_data": str(eval_data)})
    assert parse_stand_ins(f"essays:{few},squad:{broken}") == {"essays": few, "squad": broken}
    plan = prepare_ruler(["niah_multikey_2", "ruler_fwe"], [LENGTH], None, str(empty), {}, english)
    assert (plan.tasks, plan.samples, plan.sources) == (["niah_multikey_2", "ruler_fwe"], 500, {})
