"""Which learning rates and jobs a command of eval.papers.study means. No job runs: their results are written at once."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eval.checkpoint.command import write
from eval.papers.study import __main__ as command
from eval.papers.study import runner
from eval.papers.study.jobs import Job
from eval.papers.study.sizes import SIZES
from eval.papers.study.studies import WHY


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Calls the command with files that no job reads."""
    places = {
        "--text": "text",
        "--out": "out",
        "--work": "work",
        "--questions": "squad.json",
        "--wikitext": "articles.jsonl",
    }
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "split.json").write_text(json.dumps({"sha256": "0"}))
    Tokenizer(WordLevel({"x": 0})).save(str(tmp_path / "text" / "tokenizer.json"))
    for name in ("text/test.books.jsonl.zst", "squad.json", "articles.jsonl"):
        (tmp_path / name).touch()

    def call(*words: str) -> int:
        folders = [word for option, name in places.items() for word in (option, str(tmp_path / name))]
        monkeypatch.setattr(sys, "argv", ["command", *words, *folders, "--size", "tiny"])
        try:
            command.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


def result(job: Job) -> dict[str, Any]:
    losses = {"1": 3.0, "2": 2.0, "3": 2.5, "4": 3.0} if job.rate is None else {f"{job.rate:g}": 1 - job.rate}
    return {"method": job.method, "losses": losses, "training": {"valid": [[1, 1.0]]}}


@pytest.fixture
def ran(monkeypatch):
    """What can start at once, and each time when all of it has ended. Losses fall as the rate rises."""
    found: list[list[str]] = []

    def run(some: runner.Runner) -> int:
        jobs = some.jobs
        while new := [job for job in jobs if not job.has_result(some.place)]:
            found.append([job.label for job in new])
            for job in new:
                write(job.file, result(job) | job.identity(some.place))
            jobs = some.ready()
        return 0

    monkeypatch.setattr(runner.Runner, "run", run)
    return found


def test_rates_are_tried_beyond_the_edge_in_one_call(ran, study, monkeypatch, capsys):
    """Two more are tried, one after the other, and then the last one is chosen."""
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], further=2))
    assert study("positions", "--rates", "--jobs", "nope") == 0
    first, second, third, last = ran
    assert first == [f"positions/rate-nope-{rate}-s0" for rate in ("0.0005", "0.001", "0.002")]
    assert (second, third) == (["positions/rate-nope-0.004-s0"], ["positions/rate-nope-0.008-s0"])
    assert last == ["positions/nope-s0"]
    assert capsys.readouterr().out == "nope: 0.008 (at the edge of those tried)\n"


def test_one_command_runs_several_studies(ran, study, capsys):
    """First learning rates, with those of `positions` for `why`, and what needs none; then the others, and further seeds."""
    assert study("ssmax,why,mqrar", "--rates") == 0
    first, jobs, further = ran
    curricula = [f"mqrar/curriculum_{core}_2-s0" for core in ("softmax", "stickbreaking")]
    assert first[-2:] == curricula
    rates = first[:-2]
    of = {
        name: [label for label in rates if label.startswith(f"{name}/rate-")]
        for name in ("ssmax", "positions", "mqrar")
    }
    assert {name: len(some) for name, some in of.items()} == {"ssmax": 15, "positions": 12, "mqrar": 2}
    assert sum(map(len, of.values())) == len(rates)
    assert further == [f"ssmax/{m}-s{seed}" for seed in (1, 2) for m in ("softmax", "ssmax", "ssmax_bias")]
    other = [f"ssmax/{m}@0.001-s0" for m in ("softmax", "ssmax", "ssmax_bias", "ssmax_fixed")]
    half = [f"why/{m}+width@0.001-s0" for m in WHY]
    assert sorted(label for label in jobs if "@" in label) == sorted(other + half)
    assert len(jobs) == len(set(jobs)) == 7 + 4 + 16 + 4 + 2
    assert "sb: 0.002 (at the edge of those tried)" in capsys.readouterr().out
    ran.clear()
    assert study("ssmax,why,mqrar", "--rates") == 0
    assert ran == []
    assert study("ssmax,nope") == 2
    assert "there is no study nope; use ssmax, positions, why, mqrar, cores" in capsys.readouterr().err


def test_a_tokenizer_beyond_the_models_lets_no_job_start(ran, study, tmp_path, capsys):
    """Every job failed at it, one after the other."""
    file = tmp_path / "text" / "tokenizer.json"
    entries = {str(number): number for number in range(401)}
    Tokenizer(WordLevel(entries)).save(str(file))
    assert study("mqrar", "--jobs", "rate-*") == 0  # has tokens of its own
    for name in ("ssmax", "positions", "why"):
        assert study(name, "--rates") == 2
        said = f"error: {file} has 401 entries, but the models of {name} have 400: give a smaller one\n"
        assert capsys.readouterr().err == said
    file.write_text("{}")
    assert study("ssmax", "--rates") == 2
    assert "tokenizer.json is not a tokenizer" in capsys.readouterr().err
    assert ran == [["mqrar/rate-softmax-s0", "mqrar/rate-stickbreaking-s0"]]
