"""Files that a run adds to while it trains, and a disk that is full."""

import logging
import os
from pathlib import Path

logger = logging.getLogger("ssscale")


class Appender:
    """Appends bytes to a file. What the system does not take stays in memory, in order, until it does.

    Training never ends because its log cannot be written: it is said once, and once more when all of it is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._failing = False

    def write(self, data: bytes) -> None:
        self._waiting += data
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                logger.error("%s cannot be written: %s; kept in memory until it can", self.path, error.strerror)
            self._failing = True
            self._release()  # a file system that comes back may want the file opened again
            return
        if self._failing:
            logger.warning("%s is written again, nothing of it is lost", self.path)
        self._failing = False

    def close(self) -> None:
        """Write what is left; say what cannot be written."""
        self.write(b"")
        if self._waiting:
            logger.error("%s lacks its last %d bytes: they could not be written", self.path, len(self._waiting))
            self._waiting.clear()
        self._release()

    def _flush(self) -> None:
        if self._waiting and self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        while self._waiting:
            assert self._descriptor is not None
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def _release(self) -> None:
        if self._descriptor is not None:
            try:
                os.close(self._descriptor)
            except OSError:
                self._failing = True  # a network file system may refuse only now
            self._descriptor = None
