"""Conversions that are killed go on from where they stood, to the same bytes."""

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain, count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_prep.__main__ import main
from data_prep.key_set import KeySet
from ssscale.data.streaming_patches import import_streaming
from tests.data_prep.conftest import make_texts, source_flags, write_jsonl
from tests.data_prep.folders import contents

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Processes are forked, because to import all this anew takes longer than the whole conversion."""
    import_streaming()
    import streaming  # noqa: F401

    import data_prep.prepare  # noqa: F401


def run(arguments: list[str], die_at: int = 0) -> tuple[int, int]:
    """In a process of its own, which kills itself with -9 at its call `die_at`. Gives its exit code and its calls."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_counted, args=(arguments, die_at, theirs))
    process.start()
    theirs.close()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, ours.recv() if process.exitcode != -signal.SIGKILL else die_at


def _counted(arguments: list[str], die_at: int, pipe: Connection) -> None:
    """Calls and returns, Python's and C's: all that reaches the disk lies between two of them.

    They are the same on a fast and on a busy machine, which seconds are not.
    """
    calls = 0

    def step(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)
    code = main(arguments)
    sys.setprofile(None)
    pipe.send(calls)
    sys.exit(code)


def kill_and_go_on(command: list[str], folder: Path, times: int, seed: int = 0) -> None:
    """Kill the conversion at `times` random moments, go on each time, and compare."""
    code, calls = run([*command, "--out", str(folder / "whole")])
    assert code == 0
    whole = contents(folder / "whole")
    rng = random.Random(seed)
    out, killed, at_work = folder / "killed", 0, 0
    while killed < times:
        if out.exists():  # ended, or was killed behind its last step: begin anew
            assert run([*command, "--out", str(out)])[0] == 0
            assert contents(out) == whole
            shutil.rmtree(out)
        code, _ = run([*command, "--out", str(out), "--save-every", "0"], rng.randint(1, calls))
        assert code in (0, -signal.SIGKILL)
        assert not out.exists() or (out / "manifest.json").is_file()
        killed += code != 0
        at_work += any((folder / "killed.partial").rglob("shard.*"))
    assert at_work >= times // 4  # the others began or ended
    assert run([*command, "--out", str(out)])[0] == 0
    assert contents(out) == whole


@pytest.fixture
def command(corpus: dict[str, list[str]], tokenizer: str) -> list[str]:
    options = ["--tokenizer", tokenizer, "--length", "64", "--workers", "1", "--shard-bytes", "9000", "--deduplicate"]
    return ["pack", *source_flags(corpus), *options]


@pytest.mark.parametrize("packing", ["best-fit", "concat"])
def test_killed_conversions_go_on(command: list[str], tmp_path: Path, packing: str, monkeypatch) -> None:
    import data_prep.sources

    monkeypatch.setattr(data_prep.sources.Input.read, "__defaults__", (None, 2000))  # many batches
    kill_and_go_on([*command, "--packing", packing], tmp_path, 5)


class Planted:
    """Whoever unpickles this has run the code of a stranger."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


def edited(content: bytes, **changes: object) -> bytes:
    with np.load(io.BytesIO(content)) as opened:
        arrays = {name: opened[name] for name in opened.files}
    values = json.loads(arrays["values"].tobytes()) | changes
    arrays["values"] = np.frombuffer(json.dumps(values).encode(), np.uint8)
    written = io.BytesIO()
    np.savez(written, **arrays)
    return written.getvalue()


def test_a_state_is_read_and_never_run(command: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    """Whatever lies in .state: the conversion goes on from it, or one sentence names it."""
    import data_prep.sources

    monkeypatch.setattr(data_prep.sources.Input.read, "__defaults__", (None, 2000))
    out = ["--out", str(tmp_path / "out"), "--save-every", "0"]
    calls = run([*command, "--out", str(tmp_path / "whole"), "--save-every", "0"])[1]
    state, at = tmp_path / "out.partial/.state", calls // 2
    while run([*command, *out], at)[0] == 0 or not state.is_file():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        at += calls // 50
    good = state.read_bytes()
    values = json.loads(np.load(state)["values"].tobytes())
    objects = io.BytesIO()
    np.savez(objects, values=np.array([Planted(tmp_path / "planted")], object))
    shard = {"raw_data": {"basename": "../../../out"}, "zip_data": None}
    bad = {
        "a pickle": pickle.dumps(Planted(tmp_path / "planted")),
        "a pickle in an npz": objects.getvalue(),
        "nothing": b"",
        "cut short": good[: len(good) // 2],
        "a flipped byte": good[:200] + bytes([good[200] ^ 1]) + good[201:],
        "no npz": b"PK" + bytes(300),
        "another version": edited(good, version=1),
        "a position of text": edited(good, position=["a", 0]),
        "no position": edited(good, position=3),
        "fewer than no documents": edited(good, documents=-1),
        "names elsewhere": edited(good, shards={"train": [shard]}),
        "finished with lists": edited(good, finished={"web": {"train": []}}),
        "no random numbers": edited(good, held={"train": values["held"]["train"] | {"random": [3, [1], None]}}),
    }
    for kind, content in bad.items():
        state.write_bytes(content)
        assert main([*command, *out]) == 2, kind
        error = capsys.readouterr().err
        assert error.count("\n") == 1, (kind, error)
        assert "out.partial" in error, (kind, error)
        assert "broken" in error, (kind, error)
        assert not (tmp_path / "planted").exists(), kind
    state.write_bytes(good)
    assert main([*command, *out]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_nothing_of_ours_unpickles() -> None:
    forbidden = ("pickle", "torch.load(", "torch.save(", "allow_pickle=True", "shelve", "joblib", "_object(")
    root = Path(__file__).resolve().parents[2]
    for folder in ("data_prep", "eval", "kernels", "launch", "slurm", "ssscale"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text().replace('_dump_snapshot(str(folder / f"memory-{self.at}.pickle"))', "")
            code = [line for line in text.splitlines() if any(word in line for word in forbidden)]
            code = [line for line in code if not line.lstrip().startswith(("#", '"""'))]
            assert code in ([], [line for line in code if "allow_pickle=False" in line]), (file, code)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments(tokenizer: str, tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl.gz", make_texts(12_000, number))
    options = ["--tokenizer", tokenizer, "--length", "1024", "--workers", "2", "--shard-bytes", "200000"]
    command = ["pack", "--source", f"a={tmp_path}/0.jsonl.gz", "--source", f"b={tmp_path}/[12].jsonl.gz", *options]
    kill_and_go_on(command, tmp_path, 20)


def test_a_run_goes_on_rather_than_over(tokenizer: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """What the first run has packed is not tokenized again; --skip-broken may be added, other settings may not."""
    import data_prep.prepare

    texts = [f"text number {number} " * 20 for number in range(60)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:50], "broken\n", *lines[50:]]))
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    command += ["--length", "32", "--workers", "1", "--save-every", "0"]
    monkeypatch.setattr("data_prep.sources.Input.read.__defaults__", (None, 3000))
    assert main(command) == 2
    assert "a.jsonl line 51 is not a JSON record" in capsys.readouterr().err
    assert main([*command, "--length", "64"]) == 2
    assert "out.partial holds an unfinished conversion whose settings differ" in capsys.readouterr().err
    seen = []
    whole = data_prep.prepare.encode_all
    monkeypatch.setattr(
        "data_prep.prepare.encode_all",
        lambda batches, *rest: whole((seen.append(b.first) or b for b in batches), *rest),
    )
    assert main([*command, "--skip-broken"]) == 0
    assert seen[0] > 40
    monkeypatch.undo()
    assert main([*command, "--skip-broken", "--out", str(tmp_path / "other")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--vocab-size", "300"], "unfinished conversion whose settings differ"),
        (["--bos", "a"], "unfinished conversion whose settings differ"),
        (["--eos", "a"], "unfinished conversion whose settings differ"),
        ([], "t.json holds now: put the earlier one back, or remove {partial}\n"),
    ],
)
def test_a_run_never_goes_on_with_another_tokenizer(
    change: list[str], said: str, tokenizer: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """A tokenizer that was replaced at the same path encoded the rest, and `verify` found nothing."""
    write_jsonl(tmp_path / "a.jsonl", [f"text number {number} " * 20 for number in range(60)])
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text + "broken\n")
    file, partial = tmp_path / "t.json", tmp_path / "out.partial"
    shutil.copyfile(tokenizer, file)
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", str(file)]
    command += ["--length", "32", "--workers", "1", "--save-every", "0"]
    monkeypatch.setattr("data_prep.sources.Input.read.__defaults__", (None, 3000))
    assert main(command) == 2
    assert (partial / ".state").is_file()
    before = contents(partial)
    if not change:
        file.unlink()
        train = ["train-tokenizer", "--source", f"a={tmp_path}/a.jsonl", "--vocab-size", "280", "--skip-broken"]
        assert main([*train, "--out", str(file)]) == 0
    capsys.readouterr()
    assert main([*command, "--skip-broken", *change]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said.format(partial=partial) in error
    assert contents(partial) == before
    shutil.copyfile(tokenizer, file)
    assert main([*command, "--skip-broken"]) == 0


def test_a_full_disk_leaves_nothing_that_looks_whole(command: list[str], tmp_path: Path) -> None:
    """The kernel refuses to write: here files of more than 4 KiB, as a full disk would."""
    out = tmp_path / "out"
    assert run([*command, "--out", str(tmp_path / "whole")])[0] == 0
    process = get_context("fork").Process(target=_with_little_room, args=([*command, "--out", str(out)], tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 2
    error = (tmp_path / "error").read_text()
    assert error.startswith("error: File too large")
    assert error.count("\n") == 1
    assert not out.exists()
    assert run([*command, "--out", str(out)])[0] == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_tokenizer_that_finds_no_room_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some good text " * 30}) + "\n")
    command = ["train-tokenizer", "--source", f"a={tmp_path}/a.jsonl", "--vocab-size", "258"]
    process = get_context("fork").Process(
        target=_with_little_room, args=([*command, "--out", f"{tmp_path}/t.json"], tmp_path)
    )
    process.start()
    process.join()
    assert process.exitcode == 2
    assert (tmp_path / "error").read_text() == f"error: File too large: {tmp_path}/t.json\n"
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interr")]
)
def test_a_signal_ends_with_one_sentence_and_the_same_command_continues(
    number: signal.Signals, code: int, word: str, tokenizer: str, tmp_path: Path
) -> None:
    """After SIGTERM, Python complained of semaphores that were left."""
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "some good text " * 30}) + "\n") * 10_000)
    arguments = ["-m", "data_prep", "pack", "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    arguments += ["--length", "1024", "--save-every", "0", "--workers", "2", "--out", f"{tmp_path}/out"]
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.partial" / ".state").is_file():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error.startswith(word)
    assert error.endswith("ed: the same command continues\n")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    again = subprocess.run(
        [sys.executable, *arguments, "--save-every", "9"], cwd=ROOT, capture_output=True, timeout=120
    )
    assert again.returncode == 0


def _with_little_room(arguments: list[str], folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with open(folder / "error", "w") as file, contextlib.redirect_stderr(file):
        code = main(arguments)
    sys.exit(code)


def test_memory_does_not_grow_with_the_input(tokenizer: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "incomprehensibilities " * 250}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * (32_000_000 // len(line)))
    config = {"sources": {"a": f"{tmp_path}/a.jsonl"}, "tokenizer": tokenizer, "length": 2048, "buffer_tokens": 1 << 18}
    (tmp_path / "c.yaml").write_text(json.dumps(config | {"shard_bytes": 1 << 20}))
    command = ["pack", "--config", f"{tmp_path}/c.yaml", "--out", str(tmp_path / "out"), "--workers", "1"]
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_growth, args=(command, theirs))
    process.start()
    code, grown = ours.recv()
    process.join()
    assert code == 0
    assert grown < 30_000_000  # the text is 32 MB, its tokens are 52 MB


def _growth(arguments: list[str], pipe: Connection) -> None:
    """By how many bytes the peak of this process exceeds what it began with."""
    before = psutil.Process().memory_info().rss
    code = main(arguments)
    pipe.send((code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))


def test_key_set_equals_a_set() -> None:
    rng = np.random.default_rng(0)
    ours, plain = KeySet(), set()
    for size in (0, 1, 1000, 60_000, 200_000):
        keys = rng.integers(0, 100_000, size, dtype=np.uint64)
        new = ours.add(keys)
        expected = []
        for key in keys.tolist():
            expected.append(max(key, 1) not in plain)
            plain.add(max(key, 1))
        assert new.tolist() == expected


def test_workers_end_with_a_killed_run(tokenizer: str, tmp_path: Path, monkeypatch) -> None:
    import data_prep.sources

    read = data_prep.sources.Input.read
    monkeypatch.setattr(
        data_prep.sources.Input, "read", lambda *rest: chain.from_iterable(read(*rest) for _ in count())
    )
    write_jsonl(tmp_path / "a.jsonl", make_texts(1000, 1))
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    command += ["--length", "64", "--workers", "2", "--packing", "concat", "--shard-bytes", "9000"]
    process = get_context("fork").Process(target=main, args=(command,))
    process.start()

    def has_shard() -> bool:  # os.walk bears folders that are renamed meanwhile
        return any(name.startswith("shard.") for _, _, names in os.walk(tmp_path / "out.partial") for name in names)

    while not has_shard():  # its workers have given some tokens
        assert process.is_alive()
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
