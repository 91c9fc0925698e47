"""Reads batches from packed shards: a data set (`PackedData`), the training loader and the validation batches."""

import os
import re
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from ssscale.data import manifest as manifests
from ssscale.data.batch import Batch, Row, collate
from ssscale.data.order import Mix, Order
from ssscale.data.shards import INDEX, Place, RowStore
from ssscale.errors import STALLED, Stop, UserError
from ssscale.launcher import end_with
from ssscale.names import leads_out

T = TypeVar("T")

# What torch's RuntimeErrors say of such a worker.
KILLED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")


class WorkerKilled(Stop):
    """A worker of the loader was killed or has left."""


def killed_worker(error: Exception) -> str | None:
    """Returns the sentence for a worker of the loader that was killed or has left; None for any other error.

    torch's handler of SIGCHLD raises a RuntimeError wherever the process is at that moment.
    """
    if isinstance(error, WorkerKilled):
        return str(error)
    if not isinstance(error, RuntimeError) or not KILLED.search(str(error)):
        return None
    first = str(error).splitlines()[0][:200].rstrip(". ")
    return (
        f"a worker of the data loader was killed ({first}): look for `Out of memory` in `dmesg` of this host, and lower "
        "data.num_workers or data.prefetch if its memory is full"
    )


class PackedData:
    """One split of a data folder. Rows are indexed within their source. Sources without rows are left out."""

    def __init__(self, place: Place, manifest: dict[str, Any], split: str, stores: dict[str, RowStore]):
        self.place = place
        self.manifest = manifest
        self.split = split
        self.stores = stores
        self.names = tuple(stores)
        self.sources = {name: len(store) for name, store in stores.items()}
        self.fingerprint = manifests.fingerprint(manifest)
        self.length = int(manifest["length"])

    @classmethod
    def open(
        cls,
        path: str,
        split: str = "train",
        *,
        cache: str | None = None,
        cache_gb: float | None = None,
        vocab_size: int | None = None,
        length: int | None = None,
        fingerprint: str | None = None,
        hint: str | None = None,
    ) -> "PackedData":
        """Opens a data folder and checks it, without reading a shard.

        cache: local folder for remote or decompressed shards. cache_gb: its limit in 10^9 bytes; None keeps all shards.
        vocab_size: of the model. length: tokens per row of the run. fingerprint: of the data that a checkpoint was trained
        on. None skips these checks. hint: tells in the error how to make the folder.
        Raises UserError if the folder is missing, unfinished or broken, if its tokenizer has more entries than vocab_size,
        if the row length or the fingerprint differs, if a shard is missing, or if the cache is too small.
        """
        place = Place(path, cache, None if cache_gb is None else int(cache_gb * 1e9))
        place.fetch(manifests.NAME)
        manifest = manifests.open_checked(path, place.local, vocab_size, length, hint)
        if fingerprint is not None and fingerprint != manifests.fingerprint(manifest):
            raise UserError(
                f"{path} is not the data that the checkpoint was trained on: its fingerprint has changed"
                " (data.accept_changed=true accepts it)"
            )
        counts = manifest["splits"].get(split, {})
        stores = {
            source: RowStore(
                place,
                f"{split}/{source}",
                manifest["files"][f"{split}/{source}/{INDEX}"]["sha256"],
                manifest["length"],
                manifest["tokenizer"]["vocab_size"],
            )
            for source in manifests.sources(manifest, path, split, hint)
        }
        for source, store in stores.items():
            if len(store) != counts[source]["rows"]:
                raise UserError(
                    f"{store.folder}: {len(store)} rows in {INDEX}, {counts[source]['rows']} in the manifest"
                )
            missing = store.missing()
            if missing:
                raise UserError(f"shard {missing} is missing or of the wrong size")
        place.check_limit(sum(store.working_set for store in stores.values()))
        return cls(place, manifest, split, stores)

    def row(self, source: int | str, number: int) -> Row:
        """Returns row `number` of a source, which is given by name or by index in `names`."""
        return self.stores[self.names[source] if isinstance(source, int) else source][number]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yields (source, row) for all rows, in the order in which they were packed."""
        for name, store in self.stores.items():
            for number in range(len(store)):
                yield name, store[number]

    @property
    def vocab_size(self) -> int:
        """Number of entries of the tokenizer: its largest id + 1. The model may have more."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_file(self) -> str:
        """Path of the tokenizer.json that the rows were made with. Raises UserError if it is missing or was changed."""
        entry = self.manifest["tokenizer"]
        file = self.place.fetch(entry["file"])
        if leads_out(file, self.place.local):  # the file is copied into every checkpoint
            raise UserError(f"{file} is a link that leads out of the data folder: put the file in its place")
        if not file.is_file() or sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
            raise UserError(f"{file} is missing or corrupt: its sha256 is not the one in the manifest")
        return str(file)

    @property
    def tokenizer_text(self) -> str:
        """Content of `tokenizer_file`. Raises UserError if it cannot be read."""
        try:
            return Path(self.tokenizer_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the tokenizer of {self.place.path} cannot be read: {error}") from error

    @property
    def bytes_per_target(self) -> float:
        """Bytes of text per target token of this split. Bits per byte = nats per token / (bytes_per_target · ln 2)."""
        counts = self.manifest["splits"][self.split].values()
        # The first token of a document is not a target, because nothing predicts it.
        targets = sum(count["tokens_in"] - count["documents"] for count in counts)
        return sum(count["bytes"] for count in counts) / targets


@dataclass(frozen=True)
class _Failure:
    """Returned by a worker instead of raising, because an exception that crosses processes loses its message."""

    message: str


@dataclass(frozen=True)
class _Plan:
    """Which samples belong to each microbatch of a rank.

    Step s takes samples first_sample + [s · batch_size, (s + 1) · batch_size) over all ranks.
    """

    first_sample: int
    batch_size: int
    microbatch: int
    rank: int
    world_size: int

    @property
    def accumulation(self) -> int:
        return self.batch_size // (self.microbatch * self.world_size)

    def samples(self, number: int) -> range:
        step, index = divmod(number, self.accumulation)
        first = self.first_sample + step * self.batch_size + (index * self.world_size + self.rank) * self.microbatch
        return range(first, first + self.microbatch)


@dataclass(frozen=True)
class _Rows:
    """A microbatch before `collate`. Small numpy arrays move between processes faster than torch's shared tensors."""

    rows: list[Row]
    sources: list[int]


class _Microbatches(Dataset[_Rows | _Failure]):
    """The microbatches of a rank by index, as rows."""

    def __init__(self, data: PackedData, order: Order, plan: _Plan, steps: int):
        self.data = data
        self.order = order
        self.plan = plan
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * self.plan.accumulation

    def __getitem__(self, number: int) -> _Rows | _Failure:
        samples = [self.order[k] for k in self.plan.samples(number)]
        try:
            rows = [self.data.row(sample.source, sample.row) for sample in samples]
        except UserError as error:
            return _Failure(str(error))
        return _Rows(rows, [sample.source for sample in samples])

    def shards(self, number: int) -> list[str]:
        """Returns the shards that a microbatch reads, for messages."""
        samples = [self.order[k] for k in self.plan.samples(number)]
        return sorted({self.data.stores[self.data.names[s.source]].shard_of(s.row) for s in samples})


class Ahead(Iterator[T]):
    """Yields the items of an iterator. `prepare` makes the next one early, while a GPU works or others are waited for.

    An error in making an item is raised when the item is asked for, so that what comes before it is not lost.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._next: list[T | Exception] = []  # at most one

    def prepare(self) -> None:
        if self._next:
            return
        try:
            self._next.append(next(self._items))
        except Exception as error:  # whatever it is, StopIteration too: `__next__` raises it
            self._next.append(error)

    def __next__(self) -> T:
        self.prepare()
        item = self._next.pop()
        if isinstance(item, Exception):
            raise item
        return item


def make_order(data: PackedData, mixes: Sequence[tuple[int, Mix]], seed: int) -> Order:
    """Returns the order in which a run reads the rows of `data`. Raises UserError for an invalid mix."""
    return Order({name: store.shard_rows for name, store in data.stores.items()}, mixes, seed)


def make_loader(
    data: PackedData,
    *,
    mixes: Sequence[tuple[int, Mix]],
    seed: int,
    first_sample: int,
    num_samples: int,
    batch_size: int,
    microbatch: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    prefetch: int = 4,
    one_document: bool = False,
    timeout: float = 600.0,
) -> Generator[list[Batch]]:
    """Returns an iterator over num_samples // batch_size optimizer steps, each a list of this rank's microbatches.

    Sample k of a run is the same row for any number of ranks and workers and any microbatch. A run that has consumed n
    samples resumes with first_sample=n.

    mixes: pairs (first sample, share of each source); see `Order`. batch_size: rows per step over all ranks, a multiple of
    microbatch · world_size. prefetch: microbatches that a worker reads ahead. one_document: treat each row as one document.
    timeout: seconds to wait for a microbatch of a worker.
    Raises ValueError if batch_size is not such a multiple, and UserError for an invalid mix. Iterating raises UserError for
    a broken shard and for a worker that takes too long, and WorkerKilled.
    """
    if batch_size % (microbatch * world_size):
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of microbatch={microbatch} · world_size={world_size}"
        )
    order = make_order(data, mixes, seed)
    plan = _Plan(first_sample, batch_size, microbatch, rank, world_size)
    dataset = _Microbatches(data, order, plan, num_samples // batch_size)
    loader = DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_as_is,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        timeout=timeout if num_workers else 0,
        # Its own generator, because seeding the workers must not use up random numbers of the run.
        generator=torch.Generator().manual_seed(0),
    )
    return _steps(dataset, loader, one_document)


def _begin_worker(run: int, worker: int) -> None:
    """Ties a worker to its run and lets it ignore signals. run: process id of the run."""
    end_with(run, signal.SIGKILL)  # a worker that waits to hand over a batch would never notice its end
    # Schedulers send signals to every process of a job, but the run needs its workers until it has saved.
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _as_is(rows: _Rows | _Failure) -> _Rows | _Failure:
    return rows


def _steps(dataset: _Microbatches, loader: DataLoader, one_document: bool) -> Generator[list[Batch]]:
    pin = torch.cuda.is_available()
    batches: list[Batch] = []
    iterator = iter(loader)
    for number in range(len(dataset)):
        try:
            item = next(iterator)
        except RuntimeError as error:  # a worker that was killed, or a timeout
            killed = killed_worker(error)
            if killed is not None:
                raise WorkerKilled(killed, STALLED) from error
            where = ", ".join(dataset.shards(number))
            raise UserError(
                f"rank {dataset.plan.rank} got no batch from its loader, reading {where}: {error}"
            ) from error
        if isinstance(item, _Failure):
            raise UserError(f"rank {dataset.plan.rank}: {item.message}")
        batch = collate(item.rows, item.sources, one_document)
        batches.append(batch.pin_memory() if pin else batch)
        if len(batches) == dataset.plan.accumulation:
            yield batches
            batches = []


def valid_batches(
    data: PackedData, rows: int, microbatch: int, rank: int = 0, world_size: int = 1, one_document: bool = False
) -> Iterator[Batch]:
    """Yields this rank's share of `rows` validation rows, in batches of `microbatch` rows.

    The rows are spread evenly over the split and are the same at every call. If the split has fewer, all are taken. Every
    rank gets the same number of batches, as collectives require. The last batches are padded with rows without targets,
    so that sums over the ranks are equal in every layout.
    """
    numbers = [(source, number) for source, name in enumerate(data.names) for number in range(data.sources[name])]
    count = min(rows, len(numbers))
    chosen = [numbers[i * len(numbers) // count] for i in range(count)]
    group = microbatch * world_size
    for first in range(0, count, group):
        start = first + rank * microbatch
        mine = chosen[start : start + microbatch]
        filled = mine + [chosen[0]] * (microbatch - len(mine))
        packed = [data.row(source, number) for source, number in filled]
        yield collate(packed, [source for source, _ in filled], one_document, num_real=len(mine))
