"""Work that several processes share: the same results as one process, and nothing is computed twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from eval.papers import context_losses, long_context, needle, parts, retrieval
from eval.papers.context_losses import article_losses, read_articles
from eval.papers.parts import Parts, Share, processes_of, share_out
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from tests.eval.conftest import make_documents


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text * 2}) + "\n" for text in make_documents(8, 7)))
    return file


def call(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()


CASES = {
    "long_context": (long_context, ["--lengths", "32,64", "--windows", "30"]),
    "articles": (long_context, ["--lengths", "32,64", "--articles"]),
    "needle": (needle, ["--lengths", "150", "--depths", "20,50,80", "--samples", "2"]),
    "needle_scores": (needle, ["--scores", "--lengths", "150", "--trials", "20"]),
}


@pytest.mark.parametrize("kind", CASES)
def test_shares_make_the_whole(kind, run, texts, monkeypatch, groups):
    module, options = CASES[kind]
    file = run / "eval" / f"{kind}-step-00000010.json"
    monkeypatch.setattr(context_losses, "PART", 5)
    call(monkeypatch, module, run, "--texts", texts, *options)
    alone = json.loads(file.read_text())
    file.unlink()
    assert not file.with_suffix(".parts").exists()
    for share in ("0/2", "1/2"):
        call(monkeypatch, module, run, "--texts", texts, *options, "--share", share)
        assert not file.exists()

    def never(*inputs: object, **options: object) -> None:
        raise AssertionError("computed twice")

    monkeypatch.setattr(retrieval if module is needle else context_losses, "load_model", never)
    call(monkeypatch, module, run, "--texts", texts, *options)
    shared = json.loads(file.read_text())
    if "lengths" in alone:
        for length, found in alone["lengths"].items():
            assert shared["lengths"][length].pop("mean") == pytest.approx(found.pop("mean"), abs=1e-12)
    assert shared == alone


def test_articles_are_read_as_lm_eval_does(tmp_path, tokenizer, model):
    """Every token after BOS is a target at every length, predicted from its piece alone."""
    file = tmp_path / "pages.jsonl"
    pages = [" = A = \n one @-@ two , three .", " = B = \n " + make_documents(3, 2)[1]]
    file.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    documents = read_articles(file, tokenizer)
    assert tokenizer.decode(documents[0][1:].tolist()) == " = A =\none-two, three ."
    assert documents[0][0] == tokenizer.bos_id
    for length in (7, 4096):
        found = article_losses(model, documents, length)
        for document, total in zip(documents, found, strict=True):
            exact = 0.0
            for first in range(0, len(document) - 1, length):
                piece = torch.from_numpy(document[first : first + length + 1])
                logits = model(piece[:-1], PackedLayout.from_lengths([len(piece) - 1])).double()
                exact -= float(logits.log_softmax(-1).gather(1, piece[1:, None]).sum())
            assert total == pytest.approx(exact, rel=1e-5)
    assert np.isfinite(found).all()


def test_parts_of_other_settings_are_not_taken(tmp_path):
    before = Parts(tmp_path / "a.json", {"samples": 2})
    before.put("x", [1])
    assert Parts(tmp_path / "a.json", {"samples": 2}).get("x") == [1]
    assert Parts(tmp_path / "a.json", {"samples": 3}).get("x") is None
    (tmp_path / "a.parts" / "x.json").write_text("{")
    assert before.get("x") is None
    before.clear()
    assert not (tmp_path / "a.parts").exists()


def test_shares():
    names = list("abcde")
    assert sorted([*Share(0, 2).of(names), *Share(1, 2).of(names)]) == names
    assert Share.parse("1/4") == Share(1, 4)
    for text in ("4/4", "a/2", "1"):
        with pytest.raises(UserError, match="--share"):
            Share.parse(text)


SLEEPER = r"""
import os, sys, time
from eval.papers.parts import Share
from ssscale.interrupt import report
Share.parse(sys.argv[-1])
report()
os.write(1, b"ready\n")
time.sleep(60)
"""


def test_shares_end_with_the_command(tmp_path: Path) -> None:
    """Also if it is killed. Of Ctrl-C, only the command says a word."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-c", "from eval.papers.parts import share_out; share_out('sleeper', [], 2)"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[3]}"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as both:
        assert both.stdout is not None
        assert [both.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        shares = psutil.Process(both.pid).children()
        both.kill()
    _, left = psutil.wait_procs(shares, timeout=20)
    for process in left:
        process.kill()
    assert len(shares) == 2
    assert not left


def test_processes_are_bounded(run, texts, monkeypatch, groups):
    """By the GPUs or cores of the machine, and by the parts: more processes would get none."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert [processes_of(given, 3) for given in (None, 1, 2, 4)] == [1, 1, 2, 3]
    for given in (0, -1, 5, 99):
        with pytest.raises(UserError, match=f"--processes(=| must be at least 1, not ){given}\\b"):
            processes_of(given, 100)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert [processes_of(given, most) for given, most in ((None, 3), (None, 99), (8, 99))] == [3, 8, 8]
    started = []
    for kind, parts_ in {"long_context": 3, "articles": 9, "needle": 3, "needle_scores": 3}.items():
        module, options = CASES[kind]
        monkeypatch.setattr(module, "share_out", lambda *arguments: started.append(arguments[2]))
        call(monkeypatch, module, run, "--texts", texts, *options)
        assert started.pop() == min(parts_, 8)


def test_share_out_starts_every_share_on_its_gpu(tmp_path, monkeypatch):
    program = tmp_path / "sharing.py"
    program.write_text(
        "import os, sys\nindex = sys.argv[-1][0]\n"
        f"open({str(tmp_path)!r} + '/' + index, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "sys.exit(3 if 'fail' in sys.argv and index == '1' else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    share_out("sharing", [], 3)
    assert [(tmp_path / name).read_text() for name in "012"] == ["4", "6", "4"]
    with pytest.raises(UserError, match="1 of 3 processes failed, with code 3"):
        share_out("sharing", ["fail"], 3)
    assert parts.SAVED == 75
