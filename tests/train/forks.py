"""launch/pretrain.py processes=N where the command is forked, and its ranks are forked from it: a start takes a second."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from typing import Any, NoReturn

from launch import workers


class Forked:
    """What launch/workers.py needs of subprocess.Popen; the child is a fork that looks like a new process to the script."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(command, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        for number in workers.SIGNALS:  # as exec leaves them; what is blocked stays so
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ |= environment
        subprocess.Popen = POPEN  # type: ignore[misc]
        multiprocessing.set_start_method("fork", force=True)
        import torch

        torch.set_num_threads(1)
        assert command[0] == sys.executable
        sys.argv = command[1:]
        runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


POPEN: Any = subprocess.Popen


def fork_ranks() -> None:
    """To plant in a forked command."""
    subprocess.Popen = Forked  # type: ignore[assignment, misc]
