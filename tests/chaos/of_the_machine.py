"""What a machine does to a run that trains: full and read-only disks, clocks that are set, signals, a second start."""

import ctypes
import functools
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.damage import delete
from tests.chaos.kinds import Kind, Outcome, demand_code, kind
from tests.chaos.scene import (
    HANG_S,
    LONG,
    LONG_KEYS,
    Scene,
    check_identical,
    check_output,
    demand,
)
from tests.train import disks
from tests.train.ranks import Ranks

GOES_ON = Outcome.GOES_ON
DISK, CLOCK, PROCESSES = "The disk, while it trains", "The clock", "Processes"
MS_RDONLY, MS_REMOUNT = 1, 32


def begin(scene: Scene, run: Path) -> None:
    """The scene's run becomes a new one of LONG steps."""
    delete(scene.run)
    scene.run = run


def long_run(scene: Scene, during: Callable[[Ranks], None] = lambda ranks: None) -> tuple[int | None, str]:
    ranks = scene.train(*LONG_KEYS)
    try:
        during(ranks)
        code = ranks.wait(HANG_S)[0]
    finally:
        ranks.kill()
    scene.output = ranks.output()
    return code, scene.output


def check_long(scene: Scene, code: int | None, since: int = 0) -> None:
    check_output(code, scene.output)
    demand(code == 0, f"exit code {code}:\n{scene.output}")
    check_identical(scene.run, scene.world.folder / "long", since)


def wait_for_step(scene: Scene, ranks: Ranks, least: int = 0) -> None:
    """Waits for a random step from `least` on. 0 is at once, when the process may not even have begun its start."""
    step = scene.rng.randrange(least, LONG - 10)
    end = time.monotonic() + HANG_S
    while disks.shown_step(ranks) < step and ranks.processes[0].is_alive():
        demand(time.monotonic() < end, f"it hangs:\n{ranks.output()}")
        time.sleep(0.005)
    scene.harmed = f"at step {step}"


def train_on_a_disk(kind: Kind, scene: Scene) -> None:
    """A file system of its own, which is filled at a random step and gets room again later, or after the end."""
    with ExitStack() as stack:
        disk = stack.enter_context(disks.small_disk(scene.folder / "disk", "4m"))
        begin(scene, disk / "run")
        freed = scene.rng.random() < 0.5

        def during(ranks: Ranks) -> None:
            wait_for_step(scene, ranks)
            filler = disks.fill(disk)
            scene.harmed += " full" + (" for a while" if freed else " to the end")
            if freed:
                time.sleep(scene.rng.uniform(0.0, 0.5))
                filler.unlink()

        code, output = long_run(scene, during)
        check_output(code, output)
        demand_code(kind, code, output)
        if code == 2:
            demand("could not be saved" in output.splitlines()[-1], output)
            (disk / "filler").unlink(missing_ok=True)
            code, output = long_run(scene)
        check_long(scene, code)


@kind(
    DISK,
    "the disk is full for a while or until the end, from any step on",
    Outcome.GOES_ON_OR_CONTINUES,
    "training continues, and the records wait in memory; the run ends with code 2 if the last step cannot be saved, and the "
    "same command continues it once there is room",
    train_on_a_disk,
)
def full_disk(scene: Scene) -> None:
    disks.needs_mounts()


def become_read_only(folder: Path, started: float, seconds: float) -> None:
    """To plant: from some moment on this process finds `folder` on a read-only file system, for some seconds."""
    disks.own_mounts()

    def later() -> None:
        time.sleep(started)
        libc = ctypes.CDLL(None)
        name = bytes(folder)
        libc.mount(name, name, None, disks.MS_BIND, None)
        libc.mount(name, name, None, disks.MS_BIND | MS_REMOUNT | MS_RDONLY, None)
        time.sleep(seconds)
        libc.umount2(name, disks.MNT_DETACH)

    threading.Thread(target=later, daemon=True).start()


def train_on_a_read_only_disk(kind: Kind, scene: Scene) -> None:
    run = scene.folder / "long"
    run.mkdir()
    begin(scene, run)
    scene.plant = functools.partial(
        become_read_only, run, scene.rng.uniform(0.0, 2.0), scene.rng.choice([0.3, 1.0, 100.0])
    )
    code, output = long_run(scene)
    check_output(code, output)
    demand_code(kind, code, output)
    if code == 2:
        said = output.splitlines()[-1]
        demand("could not be saved" in said or "Read-only file system" in said, output)
        scene.plant = None
        code, output = long_run(scene)
    check_long(scene, code)


@kind(
    DISK,
    "the disk is read-only for a while or until the end, from any moment on",
    Outcome.GOES_ON_OR_CONTINUES,
    "as with a full disk; if the disk is read-only when the run starts, the run ends with code 2 and a message",
    train_on_a_read_only_disk,
)
def read_only_disk(scene: Scene) -> None:
    disks.needs_mounts()


def jump(seed: int) -> None:
    """To plant: the clock jumps by years, back and forth."""
    rng, now = random.Random(seed), time.time
    offset = [0.0]

    def jumping() -> float:
        if rng.random() < 0.05:
            offset[0] = rng.uniform(-1.5e9, 1e9)
        return now() + offset[0]

    time.time = jumping


def train_long(kind: Kind, scene: Scene) -> None:
    begin(scene, scene.folder / "long")
    code, _ = long_run(scene)
    check_long(scene, code)


@kind(CLOCK, "the clock is set back and forth by years while the run trains", GOES_ON, "nothing", train_long)
def clock_jumps(scene: Scene) -> None:
    scene.plant = functools.partial(jump, scene.rng.getrandbits(32))


def stop_and_go_on(kind: Kind, scene: Scene) -> None:
    """A signal at any moment after the first step; then the same command. Before the start's first lines, a signal has
    its default effect: tests/train/test_stop.py has those of the start.
    """
    begin(scene, scene.folder / "long")
    number = scene.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])

    def during(ranks: Ranks) -> None:
        wait_for_step(scene, ranks, least=1)
        scene.harmed += f" {number.name}"
        time.sleep(scene.rng.uniform(0, 0.05))
        if ranks.processes[0].is_alive():
            ranks.send(number)

    code, output = long_run(scene, during)
    check_output(code, output)
    demand_code(kind, code, output)
    if code == 75:
        demand("the same command continues" in output, f"the end says nothing:\n{output}")
        code, output = long_run(scene)
    check_long(scene, code)


@kind(
    PROCESSES,
    "the run gets SIGTERM, SIGUSR1 or SIGINT at any step",
    Outcome.SAVES_AND_CONTINUES,
    "the run saves the step and ends; the same command continues it",
    stop_and_go_on,
)
def signals(scene: Scene) -> None:
    pass


def pause(kind: Kind, scene: Scene) -> None:
    begin(scene, scene.folder / "long")

    def during(ranks: Ranks) -> None:
        for _ in range(scene.rng.randrange(1, 4)):
            time.sleep(scene.rng.uniform(0, 0.5))
            if ranks.processes[0].is_alive():
                ranks.send(signal.SIGSTOP)
                time.sleep(scene.rng.uniform(0, 0.5))
                ranks.send(signal.SIGCONT)

    code, _ = long_run(scene, during)
    check_long(scene, code)


@kind(PROCESSES, "the run is paused and continued (SIGSTOP, SIGCONT)", GOES_ON, "nothing", pause)
def paused(scene: Scene) -> None:
    pass


def start_twice(kind: Kind, scene: Scene) -> None:
    """The same command twice, at any distance: one trains, the other is refused or, after the end, finds all done."""
    begin(scene, scene.folder / "long")
    first = scene.train(*LONG_KEYS)
    time.sleep(scene.rng.choice([0.0, scene.rng.uniform(0, 2.0)]))
    given = [*LONG_KEYS, f"data.path={scene.data}"]
    second = Ranks(given, scene.run, size=1, log=scene.folder / "second")
    codes = (first.wait(HANG_S)[0], second.wait(HANG_S)[0])
    for code, ranks in zip(codes, (first, second), strict=True):
        check_output(code, ranks.output())
        if code == 2:
            demand("is in use by process" in ranks.output().splitlines()[-1], ranks.output())
    demand(
        0 in codes and set(codes) <= set(kind.outcome.first),
        f"exit codes {codes}:\n{first.output()}\n{second.output()}",
    )
    scene.output = first.output()
    check_long(scene, 0)


@kind(
    PROCESSES,
    "the same command is started twice",
    Outcome.ONE_OF_TWO,
    "one run trains; the other one names the process and the host of the first, and ends",
    start_twice,
)
def second_start(scene: Scene) -> None:
    pass
