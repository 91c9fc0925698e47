"""The exceptions that are part of the interface: `launch/` prints their sentence and exits with their code."""

# 75 is sysexits.h's EX_TEMPFAIL: try again. Of these, 75 and 76 call for the same command once more, 70, 77 and 78 for a
# change, 79 for a look at the machine.
FAILED = 70  # EX_SOFTWARE: what nobody foresaw
SAVED = 75  # a signal asked to stop; the step is saved
STALLED = 76  # a step took too long, or another rank is gone
DIVERGED = 77  # losses or gradients stay NaN or Inf
OUT_OF_MEMORY = 78
UNEQUAL = 79  # ranks that must hold the same weights do not


TOGETHER = (SAVED, DIVERGED, UNEQUAL)  # with which all ranks end at the same step


class UserError(Exception):
    """Bad input. The message is one sentence that names the key, file or rank."""


class Stop(Exception):  # noqa: N818 - an ending, not a mistake
    """A run that ends before its last step. The message says why and what to do; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
