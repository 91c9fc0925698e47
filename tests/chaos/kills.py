"""kill -9 at any moment: of a run of one rank, and of one of two ranks, whose peer has to notice.

A killed run is started again with the same command, until it has been killed as often as asked. Then it is trained to its end
and compared with one that nothing happened to.
"""

import functools
import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.scene import HANG_S, World, check_identical, demand, losses
from tests.train.ranks import Ranks

KEYS = ["train.eval_every=0", "train.save_every=4", "train.keep=2", "data.num_workers=0"]
ENDLESS = ["train.stages.0.tokens=1024000000"]  # a million steps, of which `train.max_steps` are trained
LOST_PEER = 76
MOMENTS = {  # functions in whose n-th call the process is killed, with the largest n
    "collect": ("ssscale.train.save", "collect", 4),
    "write": ("ssscale.train.save", "write_file", 20),
    "fsync": ("os", "fsync", 25),
    "rename": ("os", "replace", 12),
    "remove": ("os", "unlink", 20),
    "delete a checkpoint": ("ssscale.train.save", "_remove", 3),
    "open for reading": ("ssscale.train.checkpoint_folder", "checksum", 6),
}


def die_in(moment: str, count: int, late: bool) -> None:
    """To plant: kill -9 at the count-th call of the moment's function, before or after it has done its work."""
    module_name, name, _ = MOMENTS[moment]
    module = importlib.import_module(module_name)
    original, calls = getattr(module, name), []

    def dying(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        last = len(calls) == count and os.environ["RANK"] == "0"
        if last and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = original(*arguments, **more)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(module, name, dying)


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl, read from its end."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = [line for line in file.read().split(b"\n") if line.startswith(b'{"step": ') and b'"loss"' in line]
    except FileNotFoundError:
        return 0
    return int(lines[-1].split(b":")[1].split(b",")[0]) if lines else 0


def wait_until_killed(ranks: Ranks, rng: random.Random, moment: str) -> None:
    """Until the planted end, a step, or an instant after the start has come."""
    instant = time.monotonic() + rng.uniform(0.0, 1.5)
    first = last_step(ranks.run_dir)
    target = first + rng.randrange(1, 12)
    end = time.monotonic() + HANG_S
    while all(process.is_alive() for process in ranks.processes):
        step = last_step(ranks.run_dir)
        if moment == "instant" and time.monotonic() > instant:
            return
        # A moment that does not come, like the deletion of a file that is not there, must not keep the run going.
        if step >= (target if moment == "step" else first + 40):
            return
        demand(time.monotonic() < end, f"it hangs:\n{ranks.output()[-3000:]}")
        time.sleep(0.004)


def kill_all(world: World, kills: int, seed: int, size: int = 1, keys: Sequence[str] = KEYS) -> dict[str, object]:
    """Of all `size` ranks at once. The run is WORLD/killed, WORLD/plain-SIZE the one that nothing happened to."""
    rng, run = random.Random(f"{seed}/{size}"), world.folder / "killed"
    given = [f"data.path={world.data}", *ENDLESS, *keys]
    met: Counter[str] = Counter()
    while met.total() < kills:
        moment = rng.choice([*MOMENTS, "step", "instant"])
        plant: Callable[[], None] | None = None
        if moment in MOMENTS:
            count = rng.randrange(1, MOMENTS[moment][2] + 1)
            plant = functools.partial(die_in, moment, count, rng.random() < 0.5)
        log = world.folder / "killed.log"
        log.unlink(missing_ok=True)
        ranks = Ranks([*given, "train.max_steps=1000000"], run, size=size, plant=plant, log=log)
        wait_until_killed(ranks, rng, moment)
        planted = not ranks.processes[0].is_alive()
        ranks.kill()
        code = ranks.processes[0].exitcode
        demand(code == -signal.SIGKILL, f"kill {met.total()}, {moment}: exit code {code}\n{ranks.output()[-3000:]}")
        demand("Traceback" not in ranks.output(), f"kill {met.total()}, {moment}:\n{ranks.output()[-3000:]}")
        met[moment if planted or moment not in MOMENTS else "step"] += 1
    return finish(world, given, run, size) | {"kills": met.total(), "moments": dict(met)}


def kill_one_of_two(world: World, kills: int, seed: int) -> dict[str, object]:
    """The other rank ends by itself, with the code that asks for another start."""
    rng, run = random.Random(f"{seed}/two"), world.folder / "killed-2"
    given = [f"data.path={world.data}", *ENDLESS, *KEYS]
    met: Counter[str] = Counter()
    while met.total() < kills:
        victim, moment = rng.randrange(2), rng.choice(["step", "instant"])
        log = world.folder / "killed-2.log"
        log.unlink(missing_ok=True)
        ranks = Ranks([*given, "train.max_steps=1000000"], run, size=2, log=log)
        wait_until_killed(ranks, rng, moment)
        ranks.processes[victim].kill()
        other = ranks.processes[1 - victim]
        other.join(HANG_S)
        codes = [process.exitcode for process in ranks.processes]
        ranks.kill()
        wanted = {victim: -signal.SIGKILL, 1 - victim: LOST_PEER}
        # Before the ranks have found each other nothing can be lost, and torch ends the other one.
        early = "step " not in ranks.output()
        demand(
            codes[victim] == -signal.SIGKILL and (early or codes[1 - victim] == LOST_PEER),
            f"kill {met.total()} of rank {victim}: exit codes {codes}, not {wanted}\n{ranks.output()[-3000:]}",
        )
        demand("Traceback" not in ranks.output(), f"kill {met.total()} of rank {victim}:\n{ranks.output()[-3000:]}")
        met[f"rank {victim}, {'start' if early else 'training'}"] += 1
    return finish(world, given, run, size=2) | {"kills": met.total(), "moments": dict(met)}


def finish(world: World, given: list[str], run: Path, size: int) -> dict[str, object]:
    steps = last_step(run) + 8
    plain = world.folder / f"plain-{size}"
    for folder in (run, plain):
        log = world.folder / "finish.log"
        Ranks([*given, f"train.max_steps={steps}"], folder, size=size, log=log).finish()
    check_identical(run, plain, since=0)
    demand(len(losses(run)) == steps, "steps are missing in metrics.jsonl")
    return {"steps": steps, "identical": True}
