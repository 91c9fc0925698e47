"""Writes TensorBoard's event file in such a way that a full disk does not end the run."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ssscale.train.appender import Appender

_numbers = itertools.count()


class EventFile:
    """Writes scalars by step. It replaces TensorBoard's writer, whose thread ends with the first error of the disk."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """first_step: TensorBoard ignores what earlier files hold from this step on."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = Appender(folder / name)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        if values:
            self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())
