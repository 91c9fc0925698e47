"""Exceptions that are part of the interface. `launch/` prints their message and exits with their code."""

# 70 and 75 are EX_SOFTWARE and EX_TEMPFAIL ("try again") of sysexits.h. After 75 and 76, run the same command again. After
# 70, 77 and 78, change something first. After 79, check the machine.
FAILED = 70  # an unexpected error
SAVED = 75  # a signal asked the run to stop, and the last step is saved
STALLED = 76  # no progress for train.watchdog seconds; another rank, the GPU or a worker of the data loader is gone
DIVERGED = 77  # losses or gradients stay NaN or Inf
OUT_OF_MEMORY = 78
UNEQUAL = 79  # copies of a weight differ between ranks
INTERRUPTED = 130  # as shells show Ctrl-C
UNREAD = 141  # as shells show SIGPIPE: the program that reads the output, such as `head`, has ended


TOGETHER = (SAVED, DIVERGED, UNEQUAL)  # all ranks end with these codes at the same step


class UserError(Exception):
    """Invalid input. The message is one sentence that names the key, file or rank."""


class Stop(Exception):  # noqa: N818 - an ending, not a mistake
    """Ends a run before its last step. The message says why and what to do. `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
