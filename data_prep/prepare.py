"""The command `pack`: converts sources to tokens, rows and shards, in one pass with bounded memory."""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.pack import BestFitPacker, ConcatPacker, Packer, Row
from data_prep.parse import DUPLICATE
from data_prep.progress import Progress
from data_prep.read_shards import read_manifest
from data_prep.readers import RawBatch
from data_prep.resume import Seen, State, load_state
from data_prep.settings import Settings
from data_prep.sources import Input, find_inputs
from data_prep.token_corpora import Boundaries
from data_prep.tokenize import Encoded, TokenizerInfo, describe, encode_all
from data_prep.train_tokenizer import train_tokenizer
from data_prep.write_shards import MANIFEST, TOKENIZER, ShardFolder, check_free, remove_scratch, write_whole

SPLITS = ("train", "valid")
SAVE_EVERY = 30.0  # seconds
DOCUMENTS_OF_A_TASK = 1 << 40  # keeps the document numbers of different tasks apart

Inputs = list[tuple[str, Input]]  # of a source, with the default split of their documents


def prepare(
    settings: Settings, out: str, workers: int, progress: Progress, save_every: float = SAVE_EVERY
) -> tuple[dict[str, Any], bool]:
    """Makes the data folder `out`. Returns its manifest, and whether it was made now rather than kept.

    Raises DataError if `out` holds something else, such as data from other settings, inputs or another tokenizer.
    """
    inputs = {source: _inputs(settings, source) for source in settings.sources}
    plan = {"settings": settings.to_dict(), "inputs": {source: _sizes(found) for source, found in inputs.items()}}
    made = (Path(out) / MANIFEST).is_file()
    # A finished folder does not need the file any more.
    needed = settings.tokenizer and not (made and not os.path.exists(settings.tokenizer))
    given = _describe(settings, settings.tokenizer) if settings.tokenizer and needed else None
    if given:  # the settings have its path only, and the file may change
        plan["tokenizer"] = asdict(given)
    if made:
        manifest = read_manifest(out)
        changed = [key for key in plan if manifest.get(key) != plan[key]]
        if changed:
            other = "another tokenizer" if changed[0] == "tokenizer" else f"other {changed[0]}"
            raise DataError(f"{out} holds data made from {other}: choose another --out or remove it")
        remove_scratch(Path(out))
        return manifest, False
    check_free(Path(out))
    with ShardFolder(out, settings.shard_bytes) as folder:
        state = load_state(folder, plan)
        if state is None:
            folder.clear()
            state = State(plan)
        tokenizer = folder.partial / TOKENIZER
        if settings.tokenizer:
            write_whole(tokenizer, Path(settings.tokenizer).read_bytes())
        elif not tokenizer.is_file():
            assert settings.train_vocab_size is not None
            train_tokenizer(settings, settings.train_vocab_size, tokenizer, progress)
        info = given or _describe(settings, str(tokenizer))
        conversion = _Conversion(settings, folder, state, info, workers, progress, save_every)
        for source in settings.sources:
            if source not in state.finished:
                conversion.pack(source, inputs[source])
        splits = {split: {name: asdict(counts[split]) for name, counts in state.finished.items()} for split in SPLITS}
        manifest = {
            "length": settings.length,
            "packing": settings.packing,
            "dtype": info.dtype,
            "tokenizer": asdict(info),
            "splits": splits,
            **plan,
        }
        return folder.commit(manifest), True


def _describe(settings: Settings, tokenizer: str) -> TokenizerInfo:
    info = describe(tokenizer, settings.bos, settings.eos)
    if settings.vocab_size is not None and info.vocab_size > settings.vocab_size:
        raise DataError(
            f"{tokenizer} has token ids up to {info.vocab_size - 1}, beyond the model's vocab_size={settings.vocab_size}"
        )
    return info


def _inputs(settings: Settings, source: str) -> Inputs:
    found: Inputs = []
    splits: dict[str, str] = {}  # of the files so far
    for split, patterns in (("train", settings.sources[source]), ("valid", settings.valid.get(source, []))):
        inputs = [item for pattern in patterns for item in find_inputs(pattern)]
        for item in inputs:
            path = os.path.realpath(item.path)  # a link is the file that it leads to
            if path in splits:
                twice = "twice" if splits[path] == split else "for training and for validation"
                raise DataError(f"source {source!r} reads {item.path} {twice}: name it once")
            splits[path] = split
            if settings.where.get(source) and not item.has_columns:
                raise DataError(f"where.{source} filters records by their columns, which {item.path} does not have")
        if settings.task is not None:
            inputs = _share(inputs, *settings.task_numbers)
        found += [(split, item) for item in inputs]
    return found


def _share(inputs: list[Input], task: int, tasks: int) -> list[Input]:
    """Returns about an equal share of the inputs: contiguous ones, so that all tasks in order give the whole."""
    total = sum(item.bytes for item in inputs)
    mine, before = [], 0
    for item in inputs:
        if (before + item.bytes / 2) * tasks // max(total, 1) == task:
            mine.append(item)
        before += item.bytes
    return mine


def _sizes(inputs: Inputs) -> dict[str, dict[str, int]]:
    """Returns number and size of the input files by split. A difference shows that the input has changed."""
    return {
        split: {
            "files": sum(item.files for kind, item in inputs if kind == split),
            "bytes": sum(item.bytes for kind, item in inputs if kind == split),
        }
        for split in SPLITS
    }


class _Conversion:
    """Packs the sources in sequence, starting from `state`."""

    def __init__(
        self,
        settings: Settings,
        folder: ShardFolder,
        state: State,
        info: TokenizerInfo,
        workers: int,
        progress: Progress,
        save_every: float,
    ):
        self.settings, self.folder, self.state, self.info = settings, folder, state, info
        self.workers, self.progress, self.save_every = workers, progress, save_every
        self.seen = Seen(folder, state.num_keys) if settings.deduplicate else None
        self.saved = time.monotonic()

    def pack(self, source: str, inputs: Inputs) -> None:
        """Writes the shards of a source and records its counts."""
        settings, state = self.settings, self.state
        state.packers = {split: self._packer(split, source) for split in SPLITS}
        for split, held in state.held.items():
            try:
                state.packers[split].restore(held)
            except (LookupError, TypeError, ValueError) as error:
                where = self.folder.partial
                raise DataError(f"the state in {where} is broken ({error}): remove {where}") from error
        state.held = {}
        self.folder.begin(source, self.info.dtype, state.unfinished)
        self.progress.start(f"pack {source}", sum(item.bytes for _, item in inputs))
        positions: deque[tuple[int, int]] = deque()
        batches = self._batches(source, inputs, positions)
        tokenizer = str(self.folder.partial / TOKENIZER)
        for batch in encode_all(batches, tokenizer, self.info, settings.parser(source), self.workers):
            number, batches_of_it = positions.popleft()
            for split, row in self._rows(source, inputs[number][0], batch):
                self.folder.write(split, row)
            state.position = (number, batches_of_it)
            state.documents += len(batch.lengths)
            self.progress.advance(batch.consumed, len(batch.tokens))
            if time.monotonic() - self.saved >= self.save_every:
                self._save()
        for split, packer in state.packers.items():
            for row in packer.finish():
                self.folder.write(split, row)
        train = state.packers["train"].counts
        if not train.rows and settings.task is None:
            dropped = ", ".join(f"{number:,} {reason}" for reason, number in train.documents_dropped.items())
            raise DataError(
                f"source {source!r} has {train.tokens_in:,} tokens: not one row of {settings.length:,}"
                + (f" (documents dropped: {dropped})" if dropped else "")
            )
        self.folder.end()
        state.finished[source] = {split: packer.counts for split, packer in state.packers.items()}
        state.position, state.documents, state.packers, state.unfinished = (0, 0), 0, {}, {}
        self._save()

    def _save(self) -> None:
        if self.seen:
            self.seen.flush()
            self.state.num_keys = self.seen.num_keys
        self.state.save(self.folder)
        self.saved = time.monotonic()

    def _batches(self, source: str, inputs: Inputs, positions: deque[tuple[int, int]]) -> Iterator[RawBatch]:
        """Yields the batches that are not packed yet. Their positions are appended to `positions`."""
        columns = self.settings.parser(source).columns
        boundaries = Boundaries(self.info.bos_id, self.info.eos_id)
        done = self.state.position
        for number, (_, item) in enumerate(inputs):
            if number < done[0]:
                self.progress.advance(item.bytes)
                continue
            for count, batch in enumerate(item.read(columns, boundaries), start=1):
                if (number, count) <= done:
                    self.progress.advance(batch.consumed)
                else:
                    positions.append((number, count))
                    yield batch

    def _packer(self, split: str, source: str) -> Packer:
        settings = self.settings
        if settings.packing == "concat":
            return ConcatPacker(settings.length)
        seed = "/".join(map(str, (settings.seed, split, source, *(settings.task_numbers if settings.task else ()))))
        return BestFitPacker(settings.length, settings.buffer_tokens, seed)

    def _rows(self, source: str, default: str, batch: Encoded) -> Iterator[tuple[str, Row]]:
        """Yields the rows that a batch completes, each with its split."""
        settings, packers = self.settings, self.state.packers
        first = self.state.documents + (settings.task_numbers[0] * DOCUMENTS_OF_A_TASK if settings.task else 0)
        kept = batch.lengths > 0
        dropped = dict(batch.dropped)
        if self.seen:
            new = kept.copy()
            new[kept] = self.seen.add(batch.keys[kept])
            dropped[DUPLICATE] = int((kept & ~new).sum())
            kept = new
        ends = batch.lengths.cumsum()
        for index in kept.nonzero()[0].tolist():
            split = "valid" if settings.is_valid(source, int(batch.keys[index])) else default
            tokens = batch.tokens[ends[index] - batch.lengths[index] : ends[index]]
            for row in packers[split].add(first + index, tokens, int(batch.text_bytes[index])):
                yield split, row
        total = packers[default].counts.documents_dropped
        for reason, count in dropped.items():
            if count:
                total[reason] = total.get(reason, 0) + count
