"""Processes forked from one that has everything imported: a start takes a second."""

import multiprocessing
import os
import threading
from multiprocessing import popen_forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["tests.train.preload"]
CONTEXT.set_forkserver_preload(PRELOAD)


class _Popen(popen_forkserver.Popen):
    """Reads its exit status once, whichever thread asks first.

    Every `Process.start` polls all processes of this program. Where another thread waits for one of them, both read its
    status from the same pipe; the second finds nothing there and Python reports exit code 255 (seen in 3.12: 3 of 1,500).
    """

    reading = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            return None
        with self.reading:
            return super().poll(flag)


class ForkedProcess(ForkServerProcess):
    """`multiprocessing.Process` of a program that starts and joins processes in several threads."""

    @staticmethod
    def _Popen(process_obj: "ForkedProcess") -> _Popen:  # type: ignore[override]  # noqa: N802
        return _Popen(process_obj)
