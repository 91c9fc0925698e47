"""Signals that ask a run to stop: SIGUSR1 (Slurm's early warning), SIGTERM and SIGINT."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from ssscale.errors import Stop

SAME_SIGNAL_S = 1.0


class StopSignals:
    """While it is entered, a signal only sets `received`; the training loop saves and stops between two steps.

    A second SIGTERM or SIGINT leaves at once: checkpoints are committed by a rename, so nothing whole is lost. Within
    SAME_SIGNAL_S it counts as the first (launchers pass signals on that the process has got itself), and SIGUSR1 never
    is the second: a scheduler that warns with it sends SIGTERM some time later, while the save may still be running.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._pid = os.getpid()
        self._urgent_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # a launcher has had them wait for this
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received is not None and error is not None and not isinstance(error, Stop):
            # The run fails, so it cannot save: what was asked happens now, before anything else is said.
            signal.signal(self.received, signal.SIG_DFL)
            os.kill(os.getpid(), self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked loader worker: its parent ends it
        now = time.monotonic()
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGUSR1:
            return
        if self._urgent_at is None:
            self._urgent_at = now
        elif now - self._urgent_at > SAME_SIGNAL_S:
            os._exit(128 + number)
