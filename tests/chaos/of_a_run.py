"""Damage to a run's folder: its checkpoints, its records, its lock."""

import errno
import functools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from tests.chaos.damage import WAYS, Way, any_way, delete, file_of, snapshot
from tests.chaos.kinds import Kind, Outcome, add, kind, resume
from tests.chaos.scene import BEGUN, Scene
from tests.train.checkpoints import sign
from tests.train.commands import let_others_in

GOES_ON, REFUSES = Outcome.GOES_ON, Outcome.REFUSES
CHECKPOINT, RUN, METRICS, LOCK = "The newest checkpoint", "The run's folder", "metrics.jsonl", "run.lock"
AHEAD = (BEGUN - 2,)
PASSED_OVER = (
    "a message names the file; the run continues from the checkpoint before it, and renames this one to `….broken`"
)
FAULTS = {
    "a bit is flipped": "one bit of a file is flipped",
    "cut short": "a file is cut short",
    "empty": "a file is empty",
    "gone": "a file is missing",
    "random bytes": "a file holds random bytes",
    "a block of zeros": "a block of a file is set to zeros",
    "something is appended": "bytes are appended to a file",
    "a part is there twice": "a part of a file is repeated",
    "a folder of its name": "a folder has the place and the name of a file",
}


def harm_a_file(way: Way, scene: Scene) -> None:
    file = file_of(scene.newest, scene.rng)
    before = snapshot(scene.newest)
    way(file, scene.rng)
    scene.harmed = file.name
    if snapshot(scene.newest) != before:  # zeros over zeros change nothing
        # checksums.json has no checksum of its own: damage that leaves its meaning does no harm.
        scene.resumes = (*AHEAD, BEGUN) if file.name == "checksums.json" else AHEAD


for said, way in WAYS.items():
    name = f"checkpoint-{said.replace(' ', '-')}"
    harm = functools.partial(harm_a_file, way)
    add(Kind(name, CHECKPOINT, FAULTS[said], PASSED_OVER, GOES_ON, harm, resume))


@kind(CHECKPOINT, "several files are damaged in any way", GOES_ON, PASSED_OVER)
def several_files(scene: Scene) -> None:
    before = snapshot(scene.newest)
    files = sorted(scene.newest.iterdir())
    for file in scene.rng.sample(files, scene.rng.randrange(2, len(files))):
        scene.harmed += f"{file.name}: {any_way(file, scene.rng)}; "
    changed = {name for name, content in before.items() if snapshot(scene.newest).get(name) != content}
    scene.resumes = AHEAD if changed - {"checksums.json"} else (*AHEAD, BEGUN)


@kind(CHECKPOINT, "its folder is missing", GOES_ON, "the run continues from the checkpoint before it")
def newest_is_gone(scene: Scene) -> None:
    shutil.rmtree(scene.newest)
    scene.resumes = AHEAD


@kind(
    CHECKPOINT,
    "a crash has interrupted its writing or its deletion",
    GOES_ON,
    "the run removes the incomplete checkpoint",
)
def half_written(scene: Scene) -> None:
    partial = scene.checkpoints / f"step-{BEGUN + scene.rng.randrange(0, 3):08d}.partial"
    if scene.rng.random() < 0.5:
        os.replace(scene.newest, partial)
        scene.resumes = AHEAD
    else:
        shutil.copytree(scene.newest, partial)
    for file in list(partial.iterdir()):
        if scene.rng.random() < 0.3:
            any_way(file, scene.rng)


@kind(CHECKPOINT, "checksums.json names a file outside of the checkpoint", GOES_ON, PASSED_OVER)
def a_name_elsewhere(scene: Scene) -> None:
    file = scene.newest / "checksums.json"
    entries = json.loads(file.read_text())
    old = scene.rng.choice(sorted(entries))
    elsewhere = scene.rng.choice(["../../../outside/canary", str(scene.folder / "outside/canary"), "..", "a/b", ""])
    entries[elsewhere] = entries.pop(old) if scene.rng.random() < 0.5 else entries[old]
    file.write_text(json.dumps(entries))
    scene.resumes = AHEAD


@kind(
    CHECKPOINT,
    "a file holds invalid values, and checksums.json fits them",
    REFUSES,
    "the message names the file and what is wrong in it",
)
def signed_by_a_stranger(scene: Scene) -> None:
    """The checksums agree, so that it is not broken: what it says is refused."""
    name, edit = scene.rng.choice(
        [
            ("state.json", {"step": scene.rng.choice(["x", [], None, -3])}),
            ("state.json", {"samples": scene.rng.choice(["x", None, {}])}),
            ("state.json", {"skipped": scene.rng.choice([3, [3], "x"])}),
            ("rank-00000.json", {"pieces": scene.rng.choice([3, None, [3], "x"])}),
            ("rank-00000.json", {"weights": scene.rng.choice([3, None, "x"])}),
        ]
    )
    content = json.loads((scene.newest / name).read_text())
    (scene.newest / name).write_text(json.dumps(content | edit))
    sign(scene.newest)
    scene.harmed, scene.names = f"{name}: {edit}", scene.newest.name


def impatient() -> None:
    os.environ["SSSCALE_READ_RETRY_S"] = "0"


def as_nobody() -> None:
    os.setegid(65534)
    os.seteuid(65534)
    impatient()


def give_to_nobody(scene: Scene) -> None:
    """The run belongs to a user without rights, as who the command runs, and may be reached."""
    for path in (scene.run, *scene.run.rglob("*"), scene.folder / "cwd"):
        os.chown(path, 65534, 65534)
    for path in (scene.own_data(), *scene.data.rglob("*")):
        os.chown(path, 65534, 65534)
    let_others_in(scene.folder)
    log = scene.folder / "log"
    log.touch(0o666)
    log.chmod(0o666)
    scene.plant = as_nobody


@kind(
    CHECKPOINT,
    "the user may not read a file or the folder (EACCES)",
    REFUSES,
    "the run tries again for 30 s; then a message names the file, and nothing is renamed",
)
def may_not_be_read(scene: Scene) -> None:
    give_to_nobody(scene)
    target = scene.rng.choice([scene.newest, *sorted(scene.newest.iterdir())])
    os.chown(target, 0, 0)
    target.chmod(0o700 if target.is_dir() else 0o600)
    scene.harmed, scene.names = target.name, os.strerror(errno.EACCES)


@kind(
    CHECKPOINT,
    "a file cannot be read for some seconds",
    GOES_ON,
    "a message says so; the run tries again and continues",
)
def may_be_read_again(scene: Scene) -> None:
    give_to_nobody(scene)
    scene.plant = as_nobody_patiently
    target = file_of(scene.newest, scene.rng)
    os.chown(target, 0, 0)
    target.chmod(0o600)

    def mend() -> None:
        time.sleep(scene.rng.uniform(1.0, 3.0))
        os.chown(target, 65534, 65534)

    threading.Thread(target=mend, daemon=True).start()


def as_nobody_patiently() -> None:
    as_nobody()
    os.environ["SSSCALE_READ_RETRY_S"] = "30"


ALL = "All checkpoints"


@kind(ALL, "each has a damaged file", REFUSES, "`… has no whole checkpoint left`; the message tells how to begin again")
def every_checkpoint(scene: Scene) -> None:
    for checkpoint in (scene.older, scene.newest):
        files = [file for file in sorted(checkpoint.iterdir()) if file.name != "checksums.json"]
        file = scene.rng.choice(files)
        said = scene.rng.choice(["gone", "cut short", "a bit is flipped"])
        WAYS[said](file, scene.rng)
        scene.harmed += f"{file}: {said}; "
    scene.names = "no whole checkpoint left"


@kind(
    ALL,
    "the folder `checkpoints` is missing, empty, a file, or a link to a disk that is not mounted",
    REFUSES,
    "the message says that the run has saved before, or where the link leads",
)
def not_there(scene: Scene) -> None:
    shutil.rmtree(scene.checkpoints)
    what = scene.rng.choice(["gone", "empty", "file", "link"])
    if what == "empty":
        scene.checkpoints.mkdir()
    elif what == "file":
        scene.checkpoints.touch()
    elif what == "link":
        scene.checkpoints.symlink_to("/nowhere/checkpoints")
    scene.plant, scene.harmed, scene.names = impatient, what, str(scene.run)


RECORDED = (
    "lines that cannot be read, and the losses of a step that has two, are moved to `metrics.damaged.jsonl`; a folder that "
    "has the file's name is renamed to `metrics.jsonl.aside-0`"
)


@kind(METRICS, "the file is damaged in any way", GOES_ON, RECORDED)
def metrics(scene: Scene) -> None:
    scene.harmed = any_way(scene.run / "metrics.jsonl", scene.rng)


@kind(METRICS, "the file has lines that are not records", GOES_ON, RECORDED)
def strange_lines(scene: Scene) -> None:
    file = scene.run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    strange = [b"7", b"null", b"[]", b"{}", b'{"step": "x"}', b'{"step": 1e999}', b"\xff\xfe", b"{" * 5000, bytes(4096)]
    for _ in range(scene.rng.randrange(1, 5)):
        lines.insert(scene.rng.randrange(len(lines)), scene.rng.choice(strange))
    file.write_bytes(b"\n".join(lines))


@kind(RUN, "config.yaml is damaged in any way", GOES_ON, "the run uses the copy in the newest checkpoint")
def run_config(scene: Scene) -> None:
    scene.harmed = any_way(scene.run / "config.yaml", scene.rng)


@kind(RUN, "first_save.json or the TensorBoard file is damaged in any way", GOES_ON, "nothing")
def beside_the_checkpoints(scene: Scene) -> None:
    files = [scene.run / "first_save.json", *scene.run.glob("tensorboard/*")]
    file = scene.rng.choice(files)
    scene.harmed = f"{file.name}: {any_way(file, scene.rng)}"


@kind(RUN, "events.jsonl holds random bytes", GOES_ON, "nothing")
def events(scene: Scene) -> None:
    (scene.run / "events.jsonl").write_bytes(scene.rng.randbytes(scene.rng.randrange(1, 2000)))


@kind(
    RUN,
    "rollback.json is damaged",
    REFUSES,
    "the message names the file, which lists the rows that the run skips after NaN",
)
def rollback(scene: Scene) -> None:
    contents = [b"", b"[]", b"3", b'{"step": 6}', b'{"step": 6, "skipped": 3}', scene.rng.randbytes(50), b"{" * 9000]
    (scene.run / "rollback.json").write_bytes(scene.rng.choice(contents))
    scene.names = "rollback.json"


@kind(RUN, "the folder holds foreign files and folders", GOES_ON, "nothing; they stay")
def foreign_files(scene: Scene) -> None:
    for _ in range(scene.rng.randrange(1, 6)):
        place = scene.rng.choice([scene.run, scene.checkpoints, scene.newest])
        name = scene.rng.choice(
            ["notes.txt", "step-x", "step-00000009x", "step-6", ".nfs0001", "step-00000099.tmp", "état"]
        )
        delete(place / name)
        if scene.rng.random() < 0.5:
            (place / name).mkdir()
        else:
            (place / name).write_bytes(scene.rng.randbytes(10))


def owner_of(pid: int, **changes: object) -> dict[str, object]:
    from ssscale.train.lock import RunLock

    return RunLock(Path("/nowhere"), None).owner | {"pid": pid} | changes


def soon_silent() -> None:
    import ssscale.train.lock as module

    module.SILENT_S = 1.0


@kind(LOCK, "the file is damaged", GOES_ON, "the run takes the lock over once nothing has touched it for 15 s")
def broken_lock(scene: Scene) -> None:
    contents = [b"", b"[]", b"3", b"{}", b'{"pid": "x"}', scene.rng.randbytes(40), b"[" * 9000]
    (scene.run / "run.lock").write_bytes(scene.rng.choice(contents))
    scene.plant = soon_silent


@kind(LOCK, "its process has ended, on this or another machine", GOES_ON, "the run takes the lock over")
def stale_lock(scene: Scene) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    owner = owner_of(dead.pid, started=scene.rng.randrange(10**6))
    if scene.rng.random() < 0.5:
        owner |= {"machine": "far/pid:[1]", "host": "far"}
    (scene.run / "run.lock").write_text(json.dumps(owner))
    scene.plant = soon_silent


@kind(
    LOCK,
    "a live run holds it, also after the clock was set",
    REFUSES,
    "the message names the process and the host of that run",
)
def live_lock(scene: Scene) -> None:
    """The process of this test is alive; touching the lock's file is what a step of the clock looks like."""
    from ssscale.train.lock import _started

    (scene.run / "run.lock").write_text(json.dumps(owner_of(os.getpid(), started=_started(os.getpid()))))
    when = time.time() + scene.rng.uniform(-1e9, 1e9)
    os.utime(scene.run / "run.lock", (when, when))
    scene.names = f"in use by process {os.getpid()} on {socket.gethostname()}"


@kind(RUN, "the times of all files are in the future or the past", GOES_ON, "nothing")
def times_of_files(scene: Scene) -> None:
    for path in (scene.run, *scene.run.rglob("*")):
        when = time.time() + scene.rng.uniform(-1e9, 1e9)
        os.utime(path, (when, when), follow_symlinks=False)
