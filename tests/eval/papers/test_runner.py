"""The runner of the studies: sharing GPUs, deadlines, pauses and failures, with small programs in place of trainings."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, ClassVar

import psutil
import pytest

from eval.checkpoint.gpus import Gpu, gpus_here
from eval.papers.study import runner
from eval.papers.study.jobs import Job, Place, Step
from eval.papers.study.runner import ROOT, Program, Runner
from eval.papers.study.schedule import Work, duration, minutes_of, plan, shared, slowdown, stays
from ssscale.errors import UserError

SAVES = (
    "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(75)); print('ready', flush=True); time.sleep(60)"
)


class Clocked:
    """A step that ends when the test says so. all: every one that was started."""

    all: ClassVar[list["Clocked"]] = []

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: IO[str]) -> None:
        self.command, self.gpu, self.code = list(command), environment.get("CUDA_VISIBLE_DEVICES"), None
        Clocked.all.append(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 75

    def kill(self) -> None:
        self.code = -9


@pytest.fixture
def place(tmp_path: Path) -> Place:
    Clocked.all = []
    return Place(tmp_path / "text", tmp_path / "work", tmp_path / "out")


def job(place: Place, name: str, *steps: Step, gib: float = 10.0) -> Job:
    return Job("ssmax", name, 0, steps, gib, place.out / "ssmax" / f"{name}-s0.json", lambda: {"value": name})


def step(place: Place, job: str, name: str, minutes: float, *command: str) -> Step:
    return Step(name, command or (job, name), minutes, place.work / job)


def programs(place: Place, code: str, minutes: float = 1.0, names: str = "ab") -> list[Job]:
    return [job(place, name, step(place, name, "train", minutes, "-c", code)) for name in names]


def test_jobs_share_gpus_by_memory(place):
    """Three on each GPU at most, and no more than its memory holds. A shared step runs once, and the others wait."""
    pack = step(place, "data", "pack", 0.5)
    jobs = [job(place, n, pack, step(place, n, "train", 5.0), gib=40.0) for n in "abcdefg"]
    found = Runner(place, jobs, [Gpu("0", 140.0), Gpu("1", 90.0)], start=Clocked)
    waiting = found._admit(list(jobs))
    assert [(r.job.name, r.gpu.name) for r in found.running] == [
        ("a", "0"),
        ("b", "1"),
        ("c", "0"),
        ("d", "1"),
        ("e", "0"),
    ]
    assert [x.name for x in waiting] == ["f", "g"]
    assert [x.command for x in Clocked.all] == [["data", "pack"]]
    Clocked.all[0].code = 0
    found._collect()
    found._admit(waiting)
    assert "".join(sorted(x.command[0] + str(x.gpu) for x in Clocked.all[1:])) == "a0b1c0d1e0"


def test_recorded_commands_do_not_depend_on_folders(tmp_path):
    """Files of questions and articles may share a folder, or lie in that of the texts."""
    lines = set()
    for text, questions, wikitext in (("text", "a", "b"), ("x/text", "c", "c"), ("y", "y", "y"), ("z", "z/q", "z/q/w")):
        files = [tmp_path / questions / "squad.json", tmp_path / wikitext / "articles.jsonl"]
        place = Place(tmp_path / text, tmp_path / "work", tmp_path / "out", (files[0],), files[1])
        lines.add(place.plain(["-m", "x", str(place.text / "split.json"), f"questions={files[0]}", str(files[1])]))
    assert lines == {"python -m x TEXT/split.json questions=QUESTIONS/squad.json WIKITEXT/articles.jsonl"}


def test_a_job_starts_when_a_result_makes_it_ready(place):
    """While others still run; first what tries learning rates, then seed after seed."""
    slow = job(place, "slow", step(place, "slow", "train", 5.0, "-c", "import time; time.sleep(20)"))
    first = job(place, "rate-fast", step(place, "fast", "train", 1.0, "-c", ""))
    after = [replace(x, seed=seed) for x, seed in zip(programs(place, "", names="bcd"), (2, 1, 0), strict=True)]
    after.append(job(place, "rate-next", step(place, "next", "train", 1.0, "-c", "")))
    ended: list[set[str]] = []

    def ready() -> list[Job]:
        ended.append({x.name for x in (slow, first, *after) if x.file.is_file()})
        found.stopped = len(ended[-1]) == 5
        return [slow, first, *after] if first.file.is_file() else [slow]

    found = Runner(place, [slow, first], [Gpu(None, 100.0)], per_gpu=2, ready=ready)
    assert found.run() == 75
    assert not slow.file.is_file()
    new = [now - before for before, now in zip([set(), *ended], ended, strict=False)]
    assert new == [{"rate-fast"}, {"rate-next"}, {"d"}, {"c"}, {"b"}]


def test_no_job_starts_that_would_end_too_late(place, capsys):
    jobs = [job(place, n, step(place, n, "train", m)) for n, m in (("a", 5.0), ("b", 5.0), ("c", 2.0), ("d", 9.0))]
    # Alone, 5 minutes fit into 9. Two together take 5 · 2 / 1.3 = 7.7, with 2 minutes more 2 · 3 / 1.3 + 3 · 2 / 1.3 = 9.2.
    found = Runner(place, jobs, [Gpu("0", 140.0)], deadline=9 * 60, start=Clocked)
    waiting = found._admit(list(jobs))
    assert [r.job.name for r in found.running] == ["a", "b"]
    assert "ssmax/c-s0: not started, 2.0 minutes would end too late" in capsys.readouterr().out
    found.running[0].done = found.running[1].done = 4.5  # nearly done
    found._admit(waiting)
    assert [r.job.name for r in found.running] == ["a", "b", "c"]
    assert slowdown(1) == 1
    slow = Runner(place, jobs[:1], [Gpu("0", 140.0)], deadline=9 * 60, slower=2, start=Clocked)
    assert slow.run() == 75
    assert Runner(place, jobs[:1], [Gpu("0", 140.0)], deadline=0, start=Clocked).run() == 75


def one_model(place: Place, name: str, train: float = 10.0, tests: tuple[float, ...] = (2.0, 3.0)) -> list[Job]:
    """Jobs that measure one model, which is trained alone on its GPU."""
    first = replace(step(place, name, "train", train), alone=True)
    kinds = [job(place, f"{name}{i}", first, step(place, name, f"test{i}", m)) for i, m in enumerate(tests)]
    return [replace(found, group=name) for found in kinds]


def test_a_step_that_needs_its_gpu_alone_gets_it(place):
    """Its time is a result. The jobs that share it wait, then run together; another training waits for them."""
    jobs = [*one_model(place, "a"), *one_model(place, "b")]
    found = Runner(place, jobs, [Gpu("0", 140.0)], start=Clocked, keep_models=True)
    waiting = found._admit(list(jobs))
    assert [r.job.name for r in found.running] == ["a0", "a1", "b0"]
    assert [x.command for x in Clocked.all] == [["a", "train"]]
    Clocked.all[0].code = 0
    found._collect()
    waiting = found._admit(waiting)
    assert [x.command for x in Clocked.all[1:]] == [["a", "test0"], ["a", "test1"]]
    assert [r.together for r in found.running if r.process] == [1, 2]
    Clocked.all[1].code = 0
    found._collect()
    found._admit(waiting)
    assert len(Clocked.all) == 3  # a1 still runs
    Clocked.all[2].code = 0
    found._collect()
    found._admit(waiting)
    assert [x.command for x in Clocked.all[3:]] == [["b", "train"]]
    assert json.loads((place.work / "a" / "train.done").read_text())["jobs"] == 1


def test_two_trainings_share_a_gpu(place):
    """The third begins when the first has ended, beside its tests, so that results come one by one."""
    names = "abc"
    jobs = [
        job(place, n, replace(step(place, n, "train", 5.0), trains=True), step(place, n, "test", 2.0)) for n in names
    ]
    found = Runner(place, jobs, [Gpu("0", 140.0)], start=Clocked)
    assert not found._admit(list(jobs))
    assert [x.command for x in Clocked.all] == [["a", "train"], ["b", "train"]]
    Clocked.all[1].code = 0
    found._collect()
    found._admit([])
    assert [x.command for x in Clocked.all[2:]] == [["b", "test"], ["c", "train"]]
    two = Runner(place, jobs[:1], [Gpu("0", 140.0), Gpu("1", 140.0)], start=Clocked)
    two._admit(jobs)
    assert [x.command for x in Clocked.all[4:]] == [["a", "train"], ["b", "test"], ["c", "train"]]


def test_a_training_does_not_wait_for_those_of_later_jobs(place):
    """They started while it packed its rows. Otherwise the first of a list could be trained last."""
    jobs = [job(place, n, replace(step(place, n, "train", 5.0), trains=True)) for n in "abcd"]
    jobs[0] = replace(jobs[0], steps=(step(place, "a", "pack", 0.5), *jobs[0].steps))
    found = Runner(place, jobs, [Gpu("0", 140.0)], per_gpu=4, start=Clocked)
    found._admit(list(jobs))
    assert [x.command for x in Clocked.all] == [["a", "pack"], ["b", "train"], ["c", "train"]]
    Clocked.all[0].code = 0
    found._collect()
    found._admit([])
    assert [x.command for x in Clocked.all[3:]] == [["a", "train"]]


def test_a_job_that_needs_its_gpu_to_the_end_waits_for_an_empty_one(place):
    """It takes no place beside others, which would run alone then, and none is taken beside it."""
    alone = [job(place, n, replace(step(place, n, "train", 5.0), alone=True)) for n in "ab"]
    others = [job(place, n, step(place, n, "train", 5.0)) for n in "cdef"]
    found = Runner(place, [others[0], *alone, *others[1:]], [Gpu("0", 140.0), Gpu("1", 140.0)], start=Clocked)
    waiting = found._admit(found.jobs)
    assert [(r.job.name, r.gpu.name) for r in found.running] == [("c", "0"), ("a", "1"), ("d", "0"), ("e", "0")]
    assert [x.name for x in waiting] == ["b", "f"]
    assert len(Clocked.all) == 4  # all of them run
    Clocked.all[1].code = 0
    found._collect()
    assert found._admit(waiting) == [others[3]]
    assert [(r.job.name, r.gpu.name) for r in found.running][-1] == ("b", "1")


def test_the_jobs_of_a_model_start_in_one_stay(place, capsys):
    """None starts if not all would end in time. Once the model is there, the others start whatever the time."""
    jobs = one_model(place, "a")  # 10 + 2 · 2 / 1.3 + 1 minutes
    assert minutes_of(jobs, 3) == pytest.approx(14.08, abs=0.01)
    found = Runner(place, jobs, [Gpu("0", 140.0)], deadline=14 * 60, start=Clocked)
    assert len(found._admit(list(jobs))) == 2
    assert "not started" in capsys.readouterr().out
    found = Runner(place, jobs, [Gpu("0", 140.0)], deadline=14.2 * 60, start=Clocked)
    assert not found._admit(list(jobs))
    (place.work / "a" / "train.done").write_text("{}")
    late = Runner(place, jobs, [Gpu("0", 140.0)], deadline=1.0, start=Clocked)
    assert not late._admit(list(jobs))


def test_a_result_that_cannot_be_written_fails_its_job_only(place, capsys):
    """The whole command ended, and left the other jobs' programs running."""
    jobs = programs(place, "pass")
    jobs[0] = replace(jobs[0], file=place.work / "a" / "train.done" / "a-s0.json")
    assert Runner(place, jobs, [Gpu(None, float("inf"))]).run() == 1
    output = capsys.readouterr().out
    assert "ssmax/a-s0: failed: [Errno" in output
    assert json.loads(jobs[1].file.read_text())["value"] == "b"


def test_results_and_failures(place, capsys, monkeypatch):
    monkeypatch.setattr(runner, "device_name", lambda: "one GPU")
    good = job(place, "a", step(place, "a", "train", 1.0, "-c", "print(1)"))
    (place.work / "a" / "checkpoints").mkdir(parents=True)
    bad = job(place, "b", step(place, "b", "train", 1.0, "-c", "print('no memory'); raise SystemExit(3)"))
    first = Runner(place, [good, bad], [Gpu(None, 1e9)], "abc1234")
    assert first.run() == 1
    said = capsys.readouterr().out
    assert "ssmax/b-s0: train failed with code 3" in said
    assert "no memory" in said
    assert "ssmax/a-s0: its model a is deleted" in said
    found = json.loads(good.file.read_text())
    assert (found["value"], found["commit"], found["device"]) == ("a", "abc1234", "one GPU")
    assert found["commands"] == ["python -c 'print(1)'"]
    assert not bad.file.exists()
    assert Runner(place, [good], [Gpu(None, 1e9)], start=Clocked).run() == 0
    assert not Clocked.all
    other = job(place, "a", step(place, "a", "train", 1.0, "-c", "print(2)"))
    with pytest.raises(UserError, match="was made with other commands"):
        Runner(place, [other], [Gpu(None, 1e9)], start=Clocked).run()


def test_a_pause_saves_and_the_same_command_continues(place, capsys):
    jobs = programs(place, SAVES)
    began = time.monotonic()
    assert Runner(place, jobs, [Gpu(None, 1e9)], pause=1.5).run() == 75
    assert time.monotonic() - began < 30
    said = capsys.readouterr().out
    assert "ssmax/a-s0: train is stopped; the same command continues it" in said
    assert "ssmax/a-s0: train is saved" in said
    assert "left for another call: ssmax/a-s0 ssmax/b-s0" in said
    assert not any(place.out.rglob("*.json"))

    at = jobs[0].steps[0]
    assert json.loads(at.paused.read_text())["work"] == 0
    at.paused.write_text(json.dumps({"seconds": 3600.0, "work": 0.75}))
    assert jobs[0].minutes == pytest.approx(0.25 + 0.5)
    assert jobs[0].begun
    again = Runner(place, programs(place, SAVES), [Gpu(None, 1e9)], start=Clocked, pause=0.5)
    assert again.run() == 75
    assert len(Clocked.all) == 2
    # What has begun continues first, even if it seems too late for it.
    Clocked.all.clear()
    more = [job(place, "c", step(place, "c", "train", 1.0)), *programs(place, SAVES)]
    late = Runner(place, more, [Gpu(None, 1e9)], start=Clocked, deadline=1.0, pause=0.2)
    assert late.run() == 75
    assert len(Clocked.all) == 2
    assert json.loads(at.paused.read_text())["seconds"] > 3600


def test_what_does_not_end_is_killed_and_said(place, capsys, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.5)
    jobs = programs(place, "import time; time.sleep(60)", names="a")
    # A program inherits which signals are blocked, so that this one ignores SIGTERM from its start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert Runner(place, jobs, [Gpu(None, 1e9)], pause=0.5).run() == 75
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "ssmax/a-s0: train does not end within 0 s: killed" in capsys.readouterr().out.replace("1 s", "0 s")


def test_a_signal_reaches_the_programs(place):
    """They are in groups of their own, and end before the runner does."""
    code = f"""
from pathlib import Path
from tests.eval.papers.test_runner import programs, Place, Runner, Gpu
import sys
place = Place(Path({str(place.text)!r}), Path({str(place.work)!r}), Path({str(place.out)!r}))
sys.exit(Runner(place, programs(place, {SAVES!r}), [Gpu(None, 1e9)]).run())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    logs = place.work / "logs"
    until = time.monotonic() + 120
    while time.monotonic() < until and sum(f.read_text() == "ready\n" for f in logs.glob("*.log")) < 2:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert out.count("train is saved") == 2


def test_plan(place):
    jobs = [job(place, n, step(place, n, "train", m)) for n, m in (("a", 13.0), ("b", 13.0), ("c", 14.0))]
    assert [[x.name for x in some] for some in stays(jobs, 20.0, 3)] == [["a", "b"], ["c"]]
    assert [[x.name for x in some] for some in stays(jobs, 20.0, 1)] == [["a"], ["b"], ["c"]]
    assert "| 1 | 20 | ssmax/a-s0 (train 13.0); ssmax/b-s0 (train 13.0) |" in plan(jobs, 20.0, 3)
    assert "| 3 | 14 **longer than a stay** | ssmax/c-s0" in plan(jobs, 13.5, 1)
    later = [
        *jobs[:1],
        job(place, "d", step(place, "d", "train", 19.0)),
        job(place, "e", step(place, "e", "train", 1.0)),
    ]
    assert [[x.name for x in some] for some in stays(later, 20.0, 3)] == [
        ["a", "e"],
        ["d"],
    ]  # room that is left is used


def test_minutes_of_sharing():
    """Two jobs are 1.3 times as fast as one after the other, for as long as both run; a fourth waits for its turn."""
    assert shared([3.0], 3) == 3
    assert shared([2.0, 2.0], 3) == pytest.approx(4 / 1.3)
    assert shared([2.0, 3.0], 3) == pytest.approx(4 / 1.3 + 1)
    assert shared([2.0, 3.0], 1) == 5
    assert shared([1.0, 1.0, 1.0, 1.0], 2) == pytest.approx(4 / 1.3)
    assert shared([], 3) == 0
    # A job that waits for a step which another has begun waits for what is left of it.
    begun, same, own = Work(Path("a"), 2.0, True), Work(Path("a"), 5.0, True), Work(Path("b"), 1.0, False)
    assert duration([[same, own], [begun]], 3) == duration([[begun], [same, own]], 3) == 3.0


def test_programs_get_their_gpu(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = Program(
            ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"], {"CUDA_VISIBLE_DEVICES": "5"}, log
        )
        while process.poll() is None:
            time.sleep(0.05)
    assert (tmp_path / "log").read_text() == "5\n"


def test_only_visible_gpus_are_taken(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, 81559\\n1, 81559\\n2, 81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert [gpu.name for gpu in gpus_here(None)] == ["1", "2"]
    assert [gpu.name for gpu in gpus_here("0")] == ["0"]
    with pytest.raises(UserError, match="no GPU 3"):
        gpus_here("3")


def test_a_program_ends_with_a_runner_that_is_killed(tmp_path):
    code = (
        "import sys, time; from eval.papers.study.runner import Program; log = open(sys.argv[1], 'w')\n"
        "process = Program(['-c', sys.argv[2]], {}, log); print(process.process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log"), SAVES]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        program = psutil.Process(int(killed.stdout.readline()))
        while "ready" not in (tmp_path / "log").read_text():
            time.sleep(0.01)
        killed.kill()
    program.wait(20)
