"""Measuring everything again: the order of jobs on GPUs, what is kept, and that every command exists."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tarfile
import time

import psutil
import pytest

from eval.evidence.__main__ import chosen
from eval.evidence.jobs import ROOT, Job, at_once, jobs, readme_block
from eval.evidence.lanes import Lanes
from eval.evidence.schedule import simulate
from ssscale.config import load_config
from ssscale.errors import SAVED, UserError

NOTE = (
    'echo "${CUDA_VISIBLE_DEVICES-none} $(date +%s.%N)" >"$HERE/began.txt"; sleep 0.4; date +%s.%N >"$HERE/ended.txt"'
)


GPT2 = 50257  # entries of the tokenizer of TEXT


def job(name, gpus=1, gib=None, after=(), commands=(NOTE,), minutes=0.01, busy=False, needs_cores=False):
    return Job(name, "a page", tuple(commands), minutes, gpus, gib, tuple(after), busy, needs_cores)


def run(tmp_path, some, gpus=("4", "6"), seconds=float("inf")):
    lanes = Lanes(list(some), dict.fromkeys(gpus, 100.0), tmp_path, tmp_path / "out", seconds)
    return lanes.run(), {name: found["code"] for name, found in lanes.ended.items()}


def times(tmp_path, name):
    gpus, began = (tmp_path / "out" / name / "began.txt").read_text().split()
    return gpus, float(began), float((tmp_path / "out" / name / "ended.txt").read_text())


def test_jobs_alone_never_share_and_small_ones_do(tmp_path):
    # The small ones end after both have begun, however slowly they start. If they never share, they fail.
    wait = 'for i in $(seq 300); do [ $(ls "$HERE"/../small*/began.txt | wc -l) = 2 ] && break; sleep 0.1; done; [ $i != 300 ]'
    both = NOTE.replace("sleep 0.4;", f"{wait} &&")
    small = [job(name, gib=40.0, commands=(both,)) for name in ("small", "smaller")]
    some = [job("a"), job("b"), job("c"), *small]
    assert run(tmp_path, some) == (0, dict.fromkeys("abc", 0) | {"small": 0, "smaller": 0})
    found = {x.name: times(tmp_path, x.name) for x in some}
    assert {found["a"][0], found["b"][0]} == {"4", "6"}
    for one, other in [("a", "c"), ("b", "c"), ("a", "small"), ("b", "small"), ("c", "small")]:
        (gpu, began, ended), (other_gpu, other_began, other_ended) = found[one], found[other]
        assert gpu != other_gpu or ended <= other_began or other_ended <= began, (one, other)
    assert found["small"][0] == found["smaller"][0]


def test_a_job_of_two_gpus_waits_for_both_and_others_wait_behind_it(tmp_path):
    code, _ = run(tmp_path, [job("a"), job("both", gpus=2), job("c")])
    (_, _, a_ended), (gpus, began, ended), (_, c_began, _) = (times(tmp_path, name) for name in ("a", "both", "c"))
    assert code == 0
    assert gpus == "4,6"
    assert a_ended <= began
    assert ended <= c_began


def test_a_failure_is_reported_and_only_what_needs_it_is_left(tmp_path, capsys):
    some = [job("a", commands=["false", NOTE]), job("b", after=["a"]), job("c")]
    assert run(tmp_path, some) == (1, {"a": 1, "c": 0})
    printed = capsys.readouterr().out
    assert "a ended with code 1" in printed
    assert "left: b" in printed
    # The same command repeats what failed or is left.
    some[0] = job("a")
    _, before, _ = times(tmp_path, "c")
    assert run(tmp_path, some) == (0, {"a": 0, "b": 0, "c": 0})
    assert times(tmp_path, "c")[1] == before


def test_time_that_is_up(tmp_path):
    some = [job("long", minutes=10.0), job("endless", commands=["sleep 60"]), job("b", gpus=0)]
    assert run(tmp_path, some, seconds=5.0) == (SAVED, {"b": 0})


def test_the_plan_is_what_the_lanes_do():
    some = [
        job("data", gpus=0, minutes=1.0),
        job("long", minutes=10.0, after=["data"]),
        job("a", minutes=3.0),
        job("small", gib=40.0, minutes=2.0),
        job("smaller", gib=40.0, minutes=4.0),
        job("both", gpus=2, minutes=1.0),
        job("late", minutes=30.0),
    ]
    found, left = simulate(some, {"4": 100.0, "6": 100.0}, 60 * 20.0)
    times = {place.job.name: (begin / 60, end / 60, place.gpus) for begin, end, place in found}
    assert times == {
        "data": (0, 1, ()),
        "a": (0, 3, ("4",)),
        "small": (0, 2, ("6",)),  # first, since `long` waits for its data
        "smaller": (0, 4, ("6",)),
        "long": (3, 13, ("4",)),
        "both": (13, 14, ("4", "6")),
    }
    assert left == ["late"]


def test_busy_jobs_do_not_run_beside_those_that_need_the_host():
    some = [
        job("data", gpus=0, minutes=1.0, busy=True),
        job("time", minutes=3.0),
        job("two", gpus=2, minutes=5.0, after=["data"]),
        job("tests", gib=40.0, minutes=2.0),
        job("fuzz", gib=40.0, minutes=2.0, busy=True),
    ]
    found, left = simulate(some, dict.fromkeys("0123", 100.0), 60 * 20.0)
    times = {place.job.name: (begin / 60, end / 60, place.gpus) for begin, end, place in found}
    assert not left
    assert times == {
        "data": (0, 1, ()),
        "tests": (0, 2, ("0",)),
        "time": (1, 4, ("1",)),
        "two": (1, 6, ("2", "3")),
        "fuzz": (6, 8, ("0",)),
    }


def test_a_busy_job_that_needs_the_cores_waits_for_both_kinds_and_both_for_it():
    some = [
        job("fuzz", gib=40.0, minutes=2.0, busy=True),
        job("sockets", minutes=1.0, busy=True, needs_cores=True),
        job("time", minutes=3.0),
        job("kernels", minutes=1.0, busy=True),
    ]
    found, _ = simulate(some, dict.fromkeys("0123", 100.0), 60 * 20.0)
    assert [(place.job.name, begin / 60) for begin, _, place in found] == [
        ("fuzz", 0), ("sockets", 2), ("time", 3), ("kernels", 6),
    ]  # fmt: skip


def test_small_files_are_packed_and_models_are_not(tmp_path):
    keep = (
        'mkdir -p "$HERE/checkpoints" && echo 1 | tee "$HERE/metrics.jsonl" "$HERE/checkpoints/x.json" "$WORK/y.json"'
    )
    assert run(tmp_path, [job("a", commands=[keep])])[0] == 0
    with tarfile.open(tmp_path / "out" / "evidence.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a/job.log", "a/metrics.jsonl", "state.json"]
    assert json.loads((tmp_path / "out" / "state.json").read_text())["a"]["code"] == 0


@pytest.mark.parametrize(("first", "second", "code"), [("true", "true", 0), ("false", "true", 1), ("true", "false", 1)])
def test_two_commands_at_once_fail_if_one_of_them_does(tmp_path, first, second, code):
    both = at_once(f"(sleep 0.5; echo one; {first})", f'{second} | tee "$HERE/second.txt"')
    assert run(tmp_path, [job("a", commands=[both])])[0] == code
    output = (tmp_path / "out" / "a" / "job.log").read_text()
    assert ("one" in output) == (first == "true")


def test_readmes_commands_are_run_to_the_letter():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in readme_block():
        assert line.replace("time ", "") in text
    assert [re.search(r"data_prep|pretrain|long_context|figures", line)[0] for line in readme_block()] == [
        "data_prep", "pretrain", "long_context", "figures",
    ]  # fmt: skip


def keys_of(line):
    """Yields the keys of each run that a command starts."""
    if not re.match(r"(timeout \d+ |[A-Z_]+=\S+ )*python launch/(pretrain|benchmark|benchmark_parallel)\.py", line):
        return
    words = [word for word in shlex.split(line.split("|")[0])[2:] if "=" in word]
    keys = [word for word in words if word.split("=")[0].partition(".")[0] in ("model", "train", "optimizer", "data")]
    keys = [key for key in keys if not key.startswith("data=")]
    for name in next(word for word in words if re.match("configs?=", word)).partition("=")[2].split(","):
        config, *own = name.split("+")
        yield [f"config={config}", *keys, *own]


@pytest.mark.parametrize("one", jobs().values(), ids=jobs())
def test_every_command_exists(one):
    script = "\n".join(one.commands)
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    for module in re.findall(r"python -m ([\w.]+)", script):
        assert importlib.util.find_spec(module), module
    for file in re.findall(r"(?:python|bash) ((?:launch|eval)/\S+)", script):
        assert (ROOT / file).is_file(), file
    for config in re.findall(r"config=(\w+)", script.replace("config=$c", "")):
        assert (ROOT / "configs" / f"{config}.yaml").is_file(), config
    for line in one.commands:
        for keys in keys_of(line):
            assert load_config(keys).model.vocab_size >= GPT2, "TEXT has ids that the model has no rows for"
    page = re.search(r"docs/\S+\.md|README\.md", one.page)
    assert page is None or (ROOT / page[0]).is_file()


def test_choosing_jobs_takes_what_they_need():
    assert [x.name for x in chosen(["1b_sb"])] == ["rows4096", "1b_sb"]
    assert [x.name for x in chosen(["muon", "fp8", "muon"])] == ["rows4096", "rows1024", "muon", "fp8"]
    assert sorted(x.name for x in chosen([])) == sorted(jobs())
    with pytest.raises(UserError, match="there is no job 2b"):
        chosen(["2b"])


def test_mistakes_are_one_sentence():
    for arguments, sentence in [
        ([], "--text is needed"),
        (["--text", "nowhere"], "no file tokenizer.json"),
        (["--plan", "0"], "--plan=0 must be at least 1"),
    ]:
        found = subprocess.run(
            [sys.executable, "-m", "eval.evidence", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert found.returncode == 2
        assert sentence in found.stderr
        assert len(found.stderr.splitlines()) == 1


def test_the_commands_of_a_job_end_with_a_caller_that_is_killed(tmp_path):
    """Also one in a pipeline, and one that another command has started."""
    commands = (
        'sleep 61 & echo $! >"$HERE/first.txt"',
        "bash -c 'sleep 62 & echo $! >\"$HERE/second.txt\"; wait' | cat",
    )
    code = (
        "import sys; from pathlib import Path; from eval.evidence.jobs import Job; from eval.evidence.lanes import Lanes\n"
        "out, *commands = sys.argv[1:]; Lanes([Job('a', 'page', tuple(commands), 1.0, 0)], {}, Path(out), Path(out)).run()"
    )
    files = [tmp_path / "a" / name for name in ("first.txt", "second.txt")]
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, *commands], cwd=ROOT) as killed:
        while not all(file.is_file() and file.read_text() for file in files):
            assert killed.poll() is None
            time.sleep(0.01)
        running = [psutil.Process(int(file.read_text())) for file in files]
        killed.kill()
    _, left = psutil.wait_procs(running, 20)
    assert not left
