"""Appends to files during training, even if the disk is full for some time."""

import logging
import os
from pathlib import Path

logger = logging.getLogger("ssscale")


class Appender:
    """Appends bytes to a file. Bytes that cannot be written stay in memory, in order, until they can.

    A log that cannot be written never ends training. This is reported once, and again when everything is written.
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
            self._release()  # the file may have to be opened again when the file system is back
            return
        if self._failing:
            logger.warning("%s can be written again; nothing is lost", self.path)
        self._failing = False

    def close(self) -> None:
        """Writes what is left and closes the file. Logs how many bytes are lost if it cannot be written."""
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
                self._failing = True  # a network file system may report an error only now
            self._descriptor = None
