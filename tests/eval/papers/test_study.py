"""The studies in miniature: split, learning rates, jobs, results, figures and verdicts, by the code of the full size."""

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest

from data_prep.__main__ import main as data_prep
from eval.checkpoint.documents import read_documents
from eval.papers.study import __main__ as command
from eval.papers.study import runner, split
from ssscale.config import load_config
from ssscale.errors import UserError
from tests.eval.conftest import make_documents
from tests.eval.local_data import write_local_data

SEEN: list[list[str]] = []


class InProcess:
    """Runs a step's command at once in this process, where everything is imported already."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: IO[str]) -> None:
        SEEN.append(list(words))
        self.code = 0
        try:
            self.call(list(words))
        except SystemExit as end:
            self.code = int(end.code or 0)
        except UserError as error:
            print(error, file=log)
            self.code = 2

    def call(self, words: list[str]) -> None:
        if words[0] == "-m":
            module, arguments = words[1], words[2:]
            before, sys.argv = sys.argv, [module, *arguments]
            try:
                if module == "data_prep":
                    assert data_prep([*arguments, "--workers", "1"]) == 0
                else:
                    name = (
                        module
                        if module.startswith(("eval.papers.", "eval.benchmarks.")) and module != "eval.papers.mqrar"
                        else f"{module}.__main__"
                    )
                    import_module(name).main()
            finally:
                sys.argv = before
        else:
            import_module(words[0].removesuffix(".py").replace("/", ".")).main(words[1:])

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture(scope="module")
def files(data_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A split of made-up text, questions, articles and an empty place for results."""
    root = tmp_path_factory.mktemp("study")
    text = root / "text"
    text.mkdir()
    (text / "tokenizer.json").write_bytes(next(Path(data_folder).glob("**/tokenizer.json")).read_bytes())
    for kind, seed, number in (("train", 11, 40), ("valid", 12, 6)):
        for source in ("books", "code"):
            lines = [json.dumps({"text": document}) for document in make_documents(number, seed + len(source))]
            (text / f"{kind}.{source}.jsonl").write_text("\n".join(lines) + "\n")
    for file in text.glob("*.jsonl"):
        import zstandard

        file.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(file.read_bytes()))
        file.unlink()
    question = {"question": "What is broken?", "answers": [{"text": "A stick"}]}
    squad = {"data": [{"paragraphs": [{"context": "A stick is broken.", "qas": [question] * 128}]}]}
    (root / "squad.json").write_text(json.dumps(squad))
    pages = [json.dumps({"page": f" = {n} = \n {text}"}) for n, text in enumerate(make_documents(4, 5))]
    (root / "articles.jsonl").write_text("\n".join(pages) + "\n")
    return {"root": root, "text": text, "split": root / "split", "out": root / "raw", "work": root / "work"}


def call(monkeypatch: pytest.MonkeyPatch, module: object, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])
    try:
        module.main()  # type: ignore[attr-defined]
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def study(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], name: str, *words: object) -> int:
    monkeypatch.setattr("ssscale.parallel.groups.shutdown", lambda: None)  # the groups are all tests'
    monkeypatch.setattr(runner.Runner, "start", InProcess)
    monkeypatch.setattr(
        runner.Runner.__init__,
        "__defaults__",
        tuple(InProcess if default is runner.Program else default for default in runner.Runner.__init__.__defaults__),
    )
    places = ["--text", files["split"], "--out", files["out"], "--work", files["work"], "--size", "tiny"]
    places += ["--questions", files["root"] / "squad.json", "--wikitext", files["root"] / "articles.jsonl"]
    places += ["--eval-data", files["root"] / "eval"]
    return call(monkeypatch, command, name, *places, *words)


def divide(files, monkeypatch):
    """Divides the text, unless another test of the session has done so."""
    if not files["split"].is_dir():
        call(monkeypatch, split, files["text"], files["split"], "--windows", 3, "--length", 256)


def test_split_holds_out_by_document(files, monkeypatch, capsys, tmp_path):
    options = ["--windows", 3, "--length", 256, "--megabytes", 1]
    assert call(monkeypatch, split, files["text"], files["split"], *options) == 0
    found = json.loads((files["split"] / "split.json").read_text())
    assert found["test"]["books"]["windows"] >= 3
    texts = {name: set(read_documents(files["split"] / f"{name}.jsonl.zst")) for name in ("test.books", "train.books")}
    every = set(read_documents(files["text"] / "train.books.jsonl.zst"))
    assert texts["test.books"] | texts["train.books"] == every
    assert not texts["test.books"] & texts["train.books"]
    # Smaller training data leaves the test documents as they are.
    assert (
        call(monkeypatch, split, files["text"], tmp_path / "b", *options, "--take", "books=0.5", "--take", "code=0")
        == 0
    )
    again = json.loads((tmp_path / "b" / "split.json").read_text())
    assert again["test"] == found["test"]
    assert again["train"]["code"]["documents"] == 0
    assert 0 < again["train"]["books"]["documents"] < found["train"]["books"]["documents"]
    for bad, said in (
        (["--windows", 10**6], "give only"),
        (["--take", "web=1"], "--take web=1"),
        (["--megabytes", 0], "error: --megabytes=0: test, validation and --take need 0.1 MB more\n"),
    ):
        assert call(monkeypatch, split, files["text"], tmp_path / "c", *options, *bad) == 2
        assert said in capsys.readouterr().err


def test_ssmax(files, monkeypatch, capsys):
    """All jobs that stay in one run: nothing is tested without a rate, a result is not made again, e follows from a."""
    divide(files, monkeypatch)
    SEEN.clear()
    assert study(monkeypatch, files, "ssmax", "--jobs", "softmax") == 2
    assert "has no learning rate for softmax" in capsys.readouterr().err
    assert not SEEN
    assert study(monkeypatch, files, "ssmax", "--jobs", "rate-softmax*") == 0
    assert not any("test." in word for words in SEEN for word in words)
    assert study(monkeypatch, files, "ssmax", "--choose") == 0
    rates = json.loads((files["out"] / "ssmax" / "rates.json").read_text())
    assert min(rates["softmax"]["losses"], key=rates["softmax"]["losses"].get) == f"{rates['softmax']['rate']:g}"

    file = files["out"] / "ssmax" / "rates.json"
    file.write_text(json.dumps(rates | {"ssmax": rates["softmax"]}))

    SEEN.clear()
    jobs = ["--jobs", "softmax-s0,ssmax/ssmax-s0,ssmax_after"]
    assert study(monkeypatch, files, "ssmax", *jobs) == 0
    trained = [words for words in SEEN if words[0] == "launch/pretrain.py" and "train.max_steps=0" not in words]
    assert [next(w for w in words if w.startswith("config=")) for words in trained] == [
        "config=50m_softmax",
        "config=50m_ssmax",
    ]
    assert f"train.stages.0.schedule.lr={rates['softmax']['rate']:g}" in trained[0]
    out = files["out"] / "ssmax"
    results = {name: json.loads((out / f"{name}-s0.json").read_text()) for name in ("softmax", "ssmax", "ssmax_after")}
    assert len(results["softmax"]["training"]["loss"]) == 16
    assert "training" not in results["ssmax_after"]
    assert str(files["root"]) not in json.dumps(results)
    for result in results.values():
        assert [cell["samples"] for cell in result["needle"]["cells"]] == [2, 2]
        assert len(result["by_position"]["mean"]) == 64
    assert not any(files["work"].glob("ssmax/*/checkpoints"))
    SEEN.clear()
    assert study(monkeypatch, files, "ssmax", *jobs) == 0
    assert not SEEN
    results["ssmax"]["seed"] = 7
    (out / "ssmax-s0.json").write_text(json.dumps(results["ssmax"]))
    assert study(monkeypatch, files, "ssmax", *jobs) == 2
    assert "was made with other seed" in capsys.readouterr().err
    (out / "ssmax-s0.json").write_text(json.dumps(results["ssmax"] | {"seed": 0}))
    for job, result in results.items():  # a second seed
        (out / f"{job}-s1.json").write_text(json.dumps(result | {"seed": 1}))
    assert study(monkeypatch, files, "ssmax", "--report", files["root"] / "docs") == 0
    page = (files["root"] / "docs" / "ssmax.md").read_text()
    assert "2 seeds | " in page
    assert {file.stem for file in (files["root"] / "docs" / "ssmax").iterdir()} == {
        "losses",
        "same_rate",
        "by_position",
        "needles",
        "heads",
    }


def test_positions_and_mqrar(files, monkeypatch, capsys):
    divide(files, monkeypatch)
    out = files["out"] / "positions"
    out.mkdir(parents=True)
    methods = ("sb", "sb_rem", "rope", "alibi", "fire", "nope", "window512", "window1024", "rope_8k")
    (out / "rates.json").write_text(json.dumps({method: {"rate": 1e-3, "losses": {}} for method in methods}))
    assert study(monkeypatch, files, "positions", "--jobs", "sb,rope") == 0
    rope = json.loads((out / "rope-s0.json").read_text())
    assert {*rope["books"]} == {
        "",
        "model.position.rope.scaling=dynamic_ntk model.position.rope.train_length=64",
        "model.position.window=64",
    }
    assert {*rope["articles"][""]["losses"]} == {"64", "128"}
    sb = json.loads((out / "sb-s0.json").read_text())
    assert sb["articles"][""]["targets"] == rope["articles"][""]["targets"]
    assert study(monkeypatch, files, "positions", "--report", files["root"] / "docs") == 0
    assert "sb gains by longer contexts" in (files["root"] / "docs" / "positions.md").read_text()
    assert study(monkeypatch, files, "why", "--jobs", "sb+books") == 0
    assert study(monkeypatch, files, "mqrar", "--jobs", "rate-*") == 0
    assert study(monkeypatch, files, "mqrar", "--choose") == 0
    rate = json.loads((files["out"] / "mqrar" / "rates.json").read_text())["softmax"]["rate"]
    assert rate in (1, 2, 3, 4)
    assert study(monkeypatch, files, "mqrar", "--jobs", "softmax_2,stickbreaking_2") == 0
    found = json.loads((files["out"] / "mqrar" / "softmax_2-s0.json").read_text())["mqrar"]
    assert len(found["lrs"]) == 1
    assert study(monkeypatch, files, "mqrar", "--report", files["root"] / "docs") == 0


@pytest.fixture
def eval_data(files) -> Path:
    """Two of the tables' tasks."""
    write_local_data(files["root"] / "all", 3)
    for name in ("piqa", "arc_easy"):
        shutil.copytree(files["root"] / "all" / name, files["root"] / "eval" / name, dirs_exist_ok=True)
    return files["root"] / "eval"


def test_cores(files, eval_data, monkeypatch, capsys):
    """One command tries learning rates, chooses, trains and measures. Two jobs measure a model, which is then deleted."""
    divide(files, monkeypatch)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)
    out = files["out"] / "cores"
    out.mkdir(parents=True)
    (out / "rates.json").write_text(json.dumps({"softmax": {"rate": 1e-3, "losses": {}}}))
    SEEN.clear()
    assert study(monkeypatch, files, "cores", "--rates", "--jobs", "softmax*,sb*") == 0
    tried = [word for words in SEEN for word in words if word.startswith("run_dir=") and "rate-" in word]
    assert len(tried) == 3
    assert all("rate-sb-" in word for word in tried)
    trained = [words for words in SEEN if words[0] == "launch/pretrain.py"][3:]
    rate = json.loads((out / "rates.json").read_text())["sb"]["rate"]
    same = [{word for word in words if word.startswith(("data.", "train.seed", "train.batch"))} for words in trained]
    assert same[0] == same[1]
    assert f"train.stages.0.schedule.lr={rate:g}" in trained[1]
    found = {file.stem: json.loads(file.read_text()) for file in out.glob("*-s0.json")}
    assert set(found) == {"softmax-s0", "softmax+ruler-s0", "sb-s0", "sb+ruler-s0"}
    assert {job: [*result["positions"]] for job, result in found.items() if "positions" in result} == {
        "softmax-s0": ["plain", "base"],
        "sb-s0": ["plain"],
    }
    for core in ("softmax", "sb"):
        tokens, seconds, _ = zip(*found[f"{core}-s0"]["to_loss"], strict=True)
        assert tokens == (1536, 3072, 4608, 6144)
        assert sorted(seconds) == list(seconds)
        assert {*found[f"{core}-s0"]["tables"]} == {"piqa", "arc_easy"}
        assert {*found[f"{core}+ruler-s0"]["ruler"]} == {"niah_multikey_2@1280"}
    assert {*found["sb-s0"]["skipping"]} == {"64"}
    assert "skipping" not in found["softmax-s0"]
    ruler = next(words for words in SEEN if "tasks=niah_multikey_2" in words and "softmax" in words[1])
    assert "model.position.rope.scaling=dynamic_ntk" in ruler
    assert not any(files["work"].glob("cores/*/checkpoints"))
    assert study(monkeypatch, files, "cores", "--report", files["root"] / "docs") == 0
    page = (files["root"] / "docs" / "cores.md").read_text()
    for expected in (
        "| stick-breaking |",
        "seconds to a validation loss",
        "piqa | acc_norm | 0.500 |",
        "[",
        "at chance",
    ):
        assert expected in page
    drawn = {file.stem for file in (files["root"] / "docs" / "cores").iterdir()}
    assert drawn == {"losses", "to_loss", "positions", "needles", "ruler"}
    assert study(monkeypatch, files, "cores", "--tokens", "100") == 2
    assert (
        study(monkeypatch, files, "cores", "--questions", eval_data / "piqa" / "validation.jsonl", "--eval-data", "/x")
        == 2
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slower", "nan"], "error: --slower must be greater than 0, not nan"),
        (["--plan", "0"], "error: --plan must be greater than 0, not 0"),
        (["--per-gpu", "0"], "error: --per-gpu must be at least 1, not 0"),
        (["--deadline", "nan"], "error: --deadline must be at least 0, not nan"),
        (["--out", "/dev/null/x"], "error: /dev/null/x/mqrar: Not a directory"),
        (["--work", "/dev/null/x"], "error: /dev/null/x: Not a directory"),
        (["--choose", "--report"], "error: argument --report: not allowed with argument --choose; --help lists all"),
        (["--pusae", "5"], "error: unrecognized arguments: --pusae 5; --help lists all arguments"),
    ],
)
def test_mistakes_are_one_sentence_before_a_job_starts(words, said, tmp_path, monkeypatch, capsys):
    """NaN and zeros let no job start, and a folder that cannot be written was found when the first job had ended."""
    monkeypatch.setattr(command, "Runner", None)
    folders = ["--work", tmp_path / "work", "--out", tmp_path / "out"]
    assert call(monkeypatch, command, "mqrar", "--size", "tiny", *folders, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_questions_of_ruler_do_not_train(files, eval_data, monkeypatch, capsys):
    divide(files, monkeypatch)
    (eval_data / "squad").mkdir(exist_ok=True)
    squad = eval_data / "squad" / "dev-v2.0.json"
    squad.write_bytes((files["root"] / "squad.json").read_bytes())
    assert study(monkeypatch, files, "cores", "--questions", squad) == 2
    assert "RULER's samples are made from" in capsys.readouterr().err
    squad.unlink()


def test_commands_of_the_full_size_are_ours(files, monkeypatch, capsys):
    """Every training is a valid configuration. All methods of a study read the same rows, and warm up as tried rates do."""
    divide(files, monkeypatch)
    (files["root"] / "eval" / "piqa").mkdir(parents=True, exist_ok=True)
    (files["root"] / "eval" / "piqa" / "validation.jsonl").touch()
    for name, warmup in {"ssmax": 13_107_200, "positions": 6_553_600, "why": None, "cores": 13_107_200}.items():
        assert study(monkeypatch, files, name, "--size", "full", "--print", "--jobs", "*", "--seeds", "0,1") == 0
        tokens, trained = set(), 0
        for line in capsys.readouterr().out.splitlines():
            words = shlex.split(line)
            if words[0] == "#" or words[1] != "launch/pretrain.py":
                continue
            assert len({word.partition("=")[0] for word in words[2:]}) == len(words[2:])
            config = load_config([word.replace("=nan", "=1e-3") for word in words[2:]])
            trained += 1
            assert config.tokens_per_step == 131_072
            assert sum(stage.tokens for stage in config.train.stages) % 131_072 == 0
            if "rate-" in config.folder or config.folder.endswith(("/softmax-s0", "/sb-s0")):
                assert config.train.stages[0].schedule.warmup_tokens == (warmup or 6_553_600)
            if name == "ssmax" and "rate-" not in config.folder and config.train.max_steps is None:
                tokens.add(sum(stage.tokens for stage in config.train.stages))
        assert trained >= (20 if name == "cores" else 30)
        if name == "ssmax":
            assert tokens == {209_715_200}
