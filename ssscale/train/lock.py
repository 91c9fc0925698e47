"""A lock that lets only one run at a time write to a run folder."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ssscale.errors import UserError

HEARTBEAT_S = 5.0
SILENT_S = 3 * HEARTBEAT_S


def _machine() -> str:
    """Returns the host, its boot id and the process-id namespace, within which a process id is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(pid: int) -> float | None:
    """Returns the start time of a living process in clock ticks since boot, which setting the clock does not change.

    None if there is no such process or it is a zombie. Without /proc, the result is psutil's time in seconds since 1970.
    """
    if not Path("/proc/self/stat").is_file():
        try:
            return psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            return None
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = text.rpartition(b")")[2].split()  # split after the name, which can contain any character
    return None if values[0] in (b"Z", b"X") else int(values[19])  # fields 3 and 22 of proc(5)


class RunLock:
    """The file `run.lock` in a run folder: JSON that names its owner. A thread touches it every HEARTBEAT_S seconds.

    A stale lock is taken over. If the owner ran on this machine since its last boot, the lock is stale when the process is
    gone. If it belongs to an earlier start of the same Slurm job, it is stale. (Steps of one start may run on several nodes
    at a time.) In all other cases, also if the file is broken, it is stale when it has not been touched for SILENT_S seconds,
    so that no clocks of machines are compared.
    """

    def __init__(self, folder: Path, slurm_job: str | None) -> None:
        self.path = folder / "run.lock"
        self.owner = {
            "machine": _machine(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "slurm_job": slurm_job,
            "slurm_restarts": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }
        self._released = threading.Event()

    def acquire(self) -> None:
        """Takes the lock.

        Raises UserError, naming host and process, if another run holds it, and OSError if it cannot be written.
        """
        while not self._create():
            content = self._content()
            if content is None:
                continue
            other = self._parse(content)
            if self._is_alive(other):
                raise self._in_use(other)
            self._remove(content)
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def check_here(self) -> None:
        """Raises UserError if another process of this machine holds the lock. Writes nothing and does not wait.

        Raises OSError if the lock cannot be read.
        """
        content = self._content()
        other = None if content is None else self._parse(content)
        if other is not None and other["machine"] == self.owner["machine"] and self._is_alive(other):
            raise self._in_use(other)

    def _in_use(self, other: dict[str, Any] | None) -> UserError:
        by = f"process {other['pid']} on {other['host']}" if other else f"a process that {self.path.name} does not name"
        return UserError(
            f"{self.path.parent} is in use by {by}: wait for it or stop it, or give run_dir=FOLDER for another run"
        )

    def release(self) -> None:
        self._released.set()
        with suppress(OSError):  # a lock that stays is stale once this process is gone
            content = self._content()
            if content is not None and self._parse(content) == self.owner:
                self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Creates the lock unless there is one. A hard link makes it appear with its whole content at once."""
        ours = self.path.with_name(f"run.lock.{self.owner['host']}.{self.owner['pid']}")
        try:
            ours.write_text(json.dumps(self.owner))
            os.link(ours, self.path)
        except FileExistsError:
            return False
        finally:
            ours.unlink(missing_ok=True)
        return True

    def _content(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def _parse(self, content: bytes) -> dict[str, Any] | None:
        """Returns the owner in a lock file; None if the file is broken."""
        try:
            owner = json.loads(content)
        except (ValueError, RecursionError):
            return None
        whole = isinstance(owner, dict) and owner.keys() >= self.owner.keys() and type(owner["pid"]) is int
        return owner if whole else None

    def _is_alive(self, other: dict[str, Any] | None) -> bool:
        if other is not None and other["machine"] == self.owner["machine"]:
            started = _started(other["pid"])
            return started is not None and started == other["started"]
        if other is not None and self._is_of_another_start(other):
            return False  # Slurm restarts a job only after its earlier start has ended
        before = self._touched()
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end:
            time.sleep(0.5)
            if self._touched() != before:
                return True
        return False

    def _is_of_another_start(self, other: dict[str, Any]) -> bool:
        """Whether another start of this Slurm job has left the lock."""
        job, restarts = self.owner["slurm_job"], self.owner["slurm_restarts"]
        return job is not None and bool(other["slurm_job"] == job and other["slurm_restarts"] != restarts)

    def _touched(self) -> float:
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _remove(self, content: bytes) -> None:
        """Removes a stale lock. If another start has replaced it meanwhile, that lock is put back."""
        aside = self.path.with_name(f"run.lock.stale.{self.owner['host']}.{self.owner['pid']}")
        try:
            os.replace(self.path, aside)
        except FileNotFoundError:
            return
        if aside.read_bytes() != content:
            os.link(aside, self.path)
        aside.unlink()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                os.utime(self.path)
            except OSError:
                continue  # the file system may recover


def check_unused(folder: Path) -> None:
    """Raises UserError if a process of this machine runs in a run folder.

    Imports no torch. A run on another machine is found by `RunLock.acquire`, which takes seconds, and so is a lock that
    cannot be read.
    """
    with suppress(OSError):
        RunLock(folder, None).check_here()
