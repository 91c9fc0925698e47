"""Checkpoints are copied to host memory and written in the background while training goes on."""

import json
import logging
import os
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ssscale.engine.base import Engine
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import global_shape, local_ranges, split_dim
from ssscale.train.checkpoint import CHUNK, FORMAT, TrainState, checksum
from ssscale.train.checkpoint_folder import list_checkpoints

logger = logging.getLogger("ssscale")

DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Retention:
    """Checkpoints that stay: the newest `last`, every one at a multiple of `every` steps, the one of lowest valid loss."""

    last: int = 2
    every: int = 0
    best: bool = False

    def doomed(self, found: list[Path]) -> list[Path]:
        """Of a run's checkpoints, oldest first, those that go."""
        stay = set(found[-self.last :])
        states = {path: json.loads((path / "state.json").read_text()) for path in found}
        if self.every:
            stay |= {path for path in found if states[path]["step"] % self.every == 0}
        losses = {path: state["valid_loss"] for path, state in states.items() if state["valid_loss"] is not None}
        if self.best and losses:
            stay.add(min(losses, key=lambda path: losses[path]))
        return [path for path in found if path not in stay]


@dataclass(frozen=True)
class Saved:
    """What a committed save cost: seconds that training stood still, seconds and bytes of this rank's writing."""

    step: int
    blocked_s: float
    written_s: float
    bytes: int

    def record(self) -> dict[str, float]:
        return {f"save_{key}" if key != "step" else "saved_step": value for key, value in asdict(self).items()}


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks call its methods alike, except `done` and `failed`.

    `start` blocks while the state is copied to page-locked memory, a thread then writes and flushes this rank's files;
    once `done` holds on every rank, `finish` commits the folder by a rename. What is not committed is never read.
    """

    def __init__(self, folder: Path, groups: Groups, retention: Retention) -> None:
        self.folder, self.groups, self.retention = folder, groups, retention
        self.buffer, self.locked = torch.empty(0, dtype=torch.uint8), False
        self.thread: threading.Thread | None = None
        self.pinning: threading.Thread | None = None
        self.error: OSError | None = None
        self.written_s = self.blocked_s = 0.0
        if groups.is_main:
            for left in folder.glob("*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier()  # nobody writes before that

    @property
    def active(self) -> bool:
        return self.thread is not None

    @property
    def done(self) -> bool:
        """Whether this rank's files are written, or will not be."""
        return self.thread is not None and not self.thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.done and self.error is not None

    def prepare(self, engine: Engine) -> None:
        """Lock pages for the snapshots beside the first steps, as it takes seconds for tens of GB."""
        if self.groups.device.type != "cuda":
            return
        self._pinned()
        owned = (fragment for fragment in engine.fragments() if fragment.owned and fragment.state == "weight")
        # weights and two moments in fp32, and the generators' states
        size = 12 * sum(fragment.tensor.numel() for fragment in owned) + 2**16
        self.pinning = threading.Thread(target=self.reserve, args=(size,), name="pinning")
        self.pinning.start()

    def reserve(self, size: int) -> None:
        """Make room for a snapshot of `size` bytes, page-locked where there is a GPU."""
        if len(self.buffer) >= size:
            return
        cuda = self.groups.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.groups.device)  # a new thread begins at device 0, and would take memory there
        if cuda and self.locked:
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        self.buffer = torch.empty(size, dtype=torch.uint8)
        if cuda:
            # Not pin_memory=True, which rounds up to a power of two.
            status = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)
            self.locked = int(status) == 0
            if not self.locked:
                sizes = (self.groups.rank, size / 1e9, status)
                logger.warning("rank %d: %.1f GB cannot be page-locked (%s): saves block longer", *sizes)

    def _pinned(self) -> None:
        """Wait for `prepare`."""
        if self.pinning is not None:
            self.pinning.join()
            self.pinning = None

    def start(self, engine: Engine, state: TrainState, files: dict[str, str]) -> None:
        """Copy the state and begin to write it. files: further text files by name."""
        assert self.thread is None, "finish() the one before"
        began = time.perf_counter()
        self.state, self.error = state, None
        self.partial = self.folder / f"step-{state.step:08d}.partial"
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
        """Commit what all ranks have written, or give it up where one failed."""
        began = time.perf_counter()
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        if self.error is not None:
            logger.error("rank %d could not write %s: %s", self.groups.rank, self.partial, self.error)
        if self.groups.is_main and whole:
            try:
                self._commit()
            except OSError as error:
                logger.error("%s could not be committed: %s", self.partial, error)
        if self.groups.is_main and not whole:
            shutil.rmtree(self.partial, ignore_errors=True)
            logger.error("step %d is not saved: the checkpoints before it stay, training goes on", self.state.step)
        self.blocked_s += time.perf_counter() - began
        return Saved(self.state.step, self.blocked_s, self.written_s, self.size) if whole else None

    def wait(self) -> Saved | None:
        """Finish at once, all ranks together. None where it could not be written."""
        assert self.thread is not None
        began = time.perf_counter()
        self.thread.join()
        failed = torch.tensor(self.error is not None, dtype=torch.int32)
        dist.all_reduce(failed)
        self.blocked_s += time.perf_counter() - began
        saved = self.finish(not failed)
        dist.barrier()  # every rank may read it now
        return saved

    def _snapshot(self, engine: Engine) -> tuple[bytes, dict[str, Any]]:
        """Fill the buffer. Returns the header of the safetensors file and what its pieces are."""
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
        write_file(self.partial / "checksums.json", [memoryview(json.dumps(entries, indent=1).encode())])
        fsync_folder(self.partial)
        final = self.partial.with_suffix("")
        doomed = []
        if final.exists():  # a broken one that was passed over
            doomed.append(final.with_name(final.name + ".old.partial"))
            os.replace(final, doomed[0])
        os.replace(self.partial, final)
        fsync_folder(self.folder)
        doomed = [
            path.with_name(path.name + ".partial") for path in self.retention.doomed(list_checkpoints(self.folder))
        ]
        for path in doomed:
            os.replace(path.with_suffix(""), path)  # no half-deleted folder is ever taken for a whole checkpoint
        if doomed:
            threading.Thread(target=_remove, args=(doomed,), name="retention").start()


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, chunks: list[memoryview]) -> dict[str, Any]:
    """Write and flush a file; its size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_states() -> dict[str, Tensor]:
    """torch's random number generators of this rank, as bytes."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def collect(engine: Engine, groups: Groups) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's pieces, flat, where they are, and what each of them is."""
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
    """Write a checkpoint and wait for it."""
    writer = CheckpointWriter(folder, groups, Retention())
    writer.start(engine, state, files or {})
    writer.wait()
