"""The exit codes of forked processes, which the tests of faults rely on."""

import multiprocessing.forkserver
import time
from concurrent.futures import ThreadPoolExecutor

from tests.train.forked import ForkedProcess


def nothing() -> None:
    pass


def test_two_threads_that_ask_at_once_get_the_same_exit_code(monkeypatch):
    read = multiprocessing.forkserver.read_signed

    def slowly(sentinel: int) -> int:
        time.sleep(0.2)  # both threads have seen by now that the process has ended
        return read(sentinel)

    monkeypatch.setattr(multiprocessing.forkserver, "read_signed", slowly)
    process = ForkedProcess(target=nothing)
    process.start()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(process.join), pool.submit(process.join)]
        for answer in asked:
            answer.result()
    assert process.exitcode == 0
