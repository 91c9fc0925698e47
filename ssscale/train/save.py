"""Writes checkpoints: copies the state to host memory, and writes it in the background while training continues."""

import json
import logging
import math
import os
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.engine.base import Engine
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import global_shape, local_ranges, split_dim
from ssscale.train.checkpoint import FORMAT, TrainState
from ssscale.train.checkpoint_folder import MANIFEST, checkpoint_path, list_checkpoints, step_of
from ssscale.train.files import CHUNK, checksum, fsync_folder, write_file
from ssscale.train.reading import unread
from ssscale.train.whole import record_first_save, superseded

logger = logging.getLogger("ssscale")

DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    last: the newest ones. every: those at a multiple of this many steps; 0: none of these. best: whether the one with the
    lowest validation loss is kept.
    """

    last: int = 2
    every: int = 0
    best: bool = False

    def doomed(self, found: list[Path]) -> list[Path]:
        """Returns the checkpoints to delete, oldest first.

        found: the checkpoints of a run, oldest first. The last one has just been committed. A checkpoint that has lost its
        state.json or its checksums.json is not deleted, and does not count towards `last`.
        """
        losses = {path: loss for path in found if (loss := _valid_loss(path)) is not None}
        stay = set(list(losses)[-self.last :])
        if self.every:
            stay |= {path for path in losses if step_of(path) % self.every == 0}
        if self.best:
            stay |= {path for path in sorted(losses, key=lambda path: losses[path])[:1] if losses[path] < math.inf}
        return [path for path in losses if path not in stay]


def _valid_loss(path: Path) -> float | None:
    """Returns the validation loss of a checkpoint, infinity if it has none, or None if its files are missing or broken."""
    try:
        loss = json.loads((path / "state.json").read_bytes())["valid_loss"]
        if not (path / MANIFEST).is_file():
            return None
        return float(loss) if loss is not None and math.isfinite(loss) else math.inf
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Saved:
    """The cost of a committed save.

    blocked_s: seconds for which training was blocked. written_s, bytes: what this rank needed for writing its files.
    """

    step: int
    blocked_s: float
    written_s: float
    bytes: int

    def record(self) -> dict[str, float]:
        return {f"save_{key}" if key != "step" else "saved_step": value for key, value in asdict(self).items()}


class CheckpointWriter:
    """Writes checkpoints, one at a time. All ranks must call its methods together, except for `done` and `failed`.

    `start` blocks while the state is copied to page-locked memory. A thread then writes this rank's files and flushes them.
    Once `done` is true on all ranks, `finish` commits the folder with a rename. Uncommitted files are never read.
    """

    def __init__(self, folder: Path, groups: Groups, retention: Retention, run: Path | None = None) -> None:
        """folder: of the checkpoints.

        run: the folder of the run that trains, in which the first commit is recorded. None: nothing trains, so that
        `error` says why nothing was saved, and no log does.
        """
        self.folder, self.groups, self.retention, self.run = folder, groups, retention, run
        self.buffer, self.locked = torch.empty(0, dtype=torch.uint8), False
        self.thread: threading.Thread | None = None
        self.pinning: threading.Thread | None = None
        self.error: OSError | None = None
        self.written_s = self.blocked_s = 0.0
        self.state, self.size = TrainState(), 0  # of the newest snapshot
        if groups.is_main:
            for left in folder.glob("step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier()  # no rank writes before the main rank has cleaned up

    @property
    def final(self) -> Path:
        """Folder of the newest snapshot's checkpoint after it is committed."""
        return checkpoint_path(self.folder, self.state.step)

    @property
    def partial(self) -> Path:
        """Folder of the newest snapshot's checkpoint until it is committed."""
        return self.final.with_name(f"{self.final.name}.partial")

    @property
    def active(self) -> bool:
        return self.thread is not None

    @property
    def done(self) -> bool:
        """Whether this rank has written its files or has failed to."""
        return self.thread is not None and not self.thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.done and self.error is not None

    def prepare(self, engine: Engine) -> None:
        """Allocates page-locked memory for snapshots during the first steps, because that takes seconds for tens of GB."""
        if self.groups.device.type != "cuda":
            return
        self._pinned()
        weights = dict(engine.module.named_parameters())
        # weights and the optimizer's states in fp32, and the generators' states
        size = 2**16
        for fragment in engine.fragments():
            if fragment.owned and fragment.state == "weight":
                states = engine.kind.states_of(fragment.name, weights[fragment.name])
                size += 4 * (1 + len(states)) * fragment.tensor.numel()
        self.pinning = threading.Thread(target=self.reserve, args=(size,), name="pinning")
        self.pinning.start()

    def reserve(self, size: int) -> None:
        """Allocates a buffer for a snapshot of `size` bytes. It is page-locked if there is a GPU."""
        if len(self.buffer) >= size:
            return
        cuda = self.groups.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.groups.device)  # a new thread starts on device 0 and would allocate memory there
        if cuda and self.locked:
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        self.buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
        self.buffer = torch.empty(size, dtype=torch.uint8)
        if cuda:
            # pin_memory=True would round the size up to a power of two.
            status = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)
            self.locked = int(status) == 0
            if not self.locked:
                sizes = (self.groups.rank, size / 1e9, status)
                logger.warning("rank %d: %.1f GB cannot be page-locked (%s): saves block longer", *sizes)

    def _pinned(self) -> None:
        """Waits for the thread of `prepare`."""
        if self.pinning is not None:
            self.pinning.join()
            self.pinning = None

    def start(self, engine: Engine, state: TrainState, files: dict[str, str]) -> None:
        """Copies the state and starts to write it. files: additional text files by name, which the main rank writes."""
        assert self.thread is None, "finish() the one before"
        began = time.perf_counter()
        self.state, self.error = state, None
        header, index = self._snapshot(engine)
        small = dict(files)
        if self.groups.is_main:
            small["state.json"] = json.dumps(asdict(state) | {"format": FORMAT, "ranks": self.groups.world_size})
        else:
            small = {}
        self.blocked_s = time.perf_counter() - began
        self.thread = threading.Thread(target=self._write, args=(header, index, small), name="checkpoint")
        self.thread.start()

    def finish(self, whole: bool) -> Saved | None:
        """Commits the checkpoint, or discards it if `whole` is false, and deletes old checkpoints.

        whole: whether all ranks have written their files. Returns None if nothing was committed.
        """
        began = time.perf_counter()
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        if self.error is not None and self.run is not None:
            logger.error("rank %d could not write %s: %s", self.groups.rank, self.partial, self.error)
        if self.groups.is_main and whole:
            try:
                self._commit()
            except OSError as error:
                whole, self.error = False, error
                if self.run is not None:
                    logger.error("%s could not be committed: %s", self.partial, error)
        committed = torch.tensor([whole], dtype=torch.int32)
        dist.broadcast(committed, 0)  # all ranks must know whether the main rank could commit
        if self.groups.is_main and not committed:
            shutil.rmtree(self.partial, ignore_errors=True)
        if self.groups.is_main and not committed and self.run is not None:
            logger.error("step %d is not saved; earlier checkpoints are kept", self.state.step)
        if self.groups.is_main and committed:
            self._tidy()
        self.blocked_s += time.perf_counter() - began
        return Saved(self.state.step, self.blocked_s, self.written_s, self.size) if committed else None

    def wait(self) -> Saved | None:
        """Waits until all ranks have written, and finishes. Returns None if the checkpoint could not be written."""
        assert self.thread is not None
        began = time.perf_counter()
        self.thread.join()
        failed = torch.tensor(self.error is not None, dtype=torch.int32)
        dist.all_reduce(failed)
        self.blocked_s += time.perf_counter() - began
        saved = self.finish(not failed)
        dist.barrier()  # from here on every rank can read the checkpoint
        return saved

    def _snapshot(self, engine: Engine) -> tuple[bytes, dict[str, Any]]:
        """Copies the state into the buffer. Returns the header of the safetensors file and the index of its pieces."""
        pieces, index = collect(engine, self.groups)
        self.size = sum(tensor.nbytes for tensor in pieces.values())
        self._pinned()
        self.reserve(self.size)
        entries: dict[str, Any] = {}
        offset = 0
        for key, tensor in pieces.items():
            end = offset + tensor.nbytes
            self.buffer[offset:end].view(tensor.dtype).copy_(tensor.detach(), non_blocking=True)
            entries[key] = {"dtype": DTYPES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [offset, end]}
            offset = end
        if self.groups.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, index

    def _write(self, header: bytes, index: dict[str, Any], files: dict[str, str]) -> None:
        began = time.perf_counter()
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            stem = f"rank-{self.groups.rank:05d}"
            body = memoryview(self.buffer.numpy())[: self.size]
            chunks = [memoryview(header), *(body[a : a + CHUNK] for a in range(0, self.size, CHUNK))]
            index |= write_file(self.partial / f"{stem}.safetensors", chunks)
            for name, text in {**files, f"{stem}.json": json.dumps(index, indent=1)}.items():
                write_file(self.partial / name, [memoryview(text.encode())])
        except OSError as error:
            self.error = error
        self.written_s = time.perf_counter() - began

    def _commit(self) -> None:
        entries = {}
        for file in sorted(self.partial.iterdir()):
            if file.suffix != ".safetensors":
                entries[file.name] = {"bytes": file.stat().st_size, "xxh3": checksum(file)}
            if file.name.startswith("rank-") and file.suffix == ".json":
                index = json.loads(file.read_text())
                entries[file.stem + ".safetensors"] = {"bytes": index["bytes"], "xxh3": index["xxh3"]}
        assert len(entries) >= 2 * self.groups.world_size, sorted(entries)
        write_file(self.partial / MANIFEST, [memoryview(json.dumps(entries, indent=1).encode())])
        fsync_folder(self.partial)
        if self.final.exists():  # not from this run: broken ones were put aside at the start
            os.replace(self.final, self.final.with_name(f"{self.final.name}.old.partial"))
        os.replace(self.partial, self.final)
        fsync_folder(self.folder)

    def _tidy(self) -> None:
        """Records the first commit of the run and deletes old checkpoints. Errors are only logged."""
        try:
            if self.run is not None:
                record_first_save(self.run, self.state.step)
        except OSError as error:  # the next save tries again
            logger.error("%s: the first save could not be recorded: %s", self.run, error)
        try:
            doomed = [self.final.with_name(f"{self.final.name}.old.partial"), *superseded(self.folder, self.state.step)]
            found = [path for path in list_checkpoints(self.folder) if step_of(path) <= self.state.step]
            for path in self.retention.doomed(found):
                with unread(path) as free:
                    if free:
                        doomed.append(path.with_name(f"{path.name}.partial"))
                        os.replace(path, doomed[-1])  # renamed first, so that a partly deleted checkpoint is never read
                    else:
                        logger.info("%s is being read: it stays until the next save", path)
        except (OSError, UserError) as error:
            logger.error("checkpoints in %s could not be deleted: %s", self.folder, error)
        if any(path.exists() for path in doomed):
            threading.Thread(target=_remove, args=(doomed,), name="retention").start()


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def rng_states() -> dict[str, Tensor]:
    """Returns the states of torch's random number generators on this rank, uint8."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def collect(engine: Engine, groups: Groups) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the flat tensors that this rank writes, by key and on their device, and their index (rank-00000.json)."""
    weights = dict(engine.module.named_parameters())
    pieces: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    for fragment in engine.fragments():
        if not fragment.owned:
            continue
        weight = weights[fragment.name]
        key = f"{fragment.state}/{fragment.name}/{fragment.start}"
        pieces[key] = fragment.tensor.float()
        numel = fragment.tensor.numel()
        entries.append(
            {"key": key, "name": fragment.name, "state": fragment.state, "start": fragment.start, "numel": numel}
        )
        split = split_dim(weight)
        layout[fragment.name] = {
            "shape": global_shape(weight, groups.tensor_size, engine.local_shape(fragment.name)),
            "split_dim": split,
            "ranges": None if split is None else local_ranges(weight, groups.tensor_rank, groups.tensor_size),
        }
    pieces |= {f"rng/{device}": state for device, state in rng_states().items()}
    index = {"tensor_rank": groups.tensor_rank, "tensor_size": groups.tensor_size, "weights": layout, "pieces": entries}
    return pieces, index


def save_checkpoint(
    folder: Path, engine: Engine, groups: Groups, state: TrainState, files: dict[str, str] | None = None
) -> None:
    """Writes a checkpoint, commits it and waits until it is done. All ranks call it together.

    Raises UserError if a rank could not write, and leaves nothing of the checkpoint then.
    """
    writer = CheckpointWriter(folder, groups, Retention())
    writer.start(engine, state, files or {})
    if writer.wait() is None:
        reason = "another rank could not write" if writer.error is None else writer.error.strerror
        raise UserError(f"{writer.final} cannot be written: {reason}")
