"""Handles the signals that ask a run to stop: SIGUSR1 (Slurm's early warning), SIGTERM, SIGINT and SIGHUP (the terminal
was closed)."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from ssscale.errors import Stop

SAME_SIGNAL_S = 1.0


class StopSignals:
    """A context manager in which a signal only sets `received`. The training loop then saves and stops between two steps.

    A second SIGTERM or SIGINT ends the process at once. No whole checkpoint is lost, because checkpoints are committed with
    a rename. Signals within SAME_SIGNAL_S seconds count as one, because launchers forward signals that the process has
    received itself. SIGUSR1 does not count: a scheduler that warns with it sends SIGTERM later, possibly during the save.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pid = os.getpid()
        self._urgent_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        numbers = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has started the run
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the launcher has blocked them until now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received is not None and error is not None and not isinstance(error, Stop):
            # The run has failed and cannot save, so the signal takes its default effect now, before any message.
            signal.signal(self.received, signal.SIG_DFL)
            os.kill(os.getpid(), self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # this is a forked loader worker, which its parent ends
        now = time.monotonic()
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGUSR1:
            return
        if self._urgent_at is None:
            self._urgent_at = now
        elif now - self._urgent_at > SAME_SIGNAL_S:
            os._exit(128 + number)
