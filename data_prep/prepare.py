"""`pack`: sources → tokens → rows → shards, in one pass and bounded memory."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.pack import BestFitPacker, ConcatPacker, Counts, Packer, Row
from data_prep.progress import Progress
from data_prep.read_shards import read_manifest
from data_prep.settings import Settings
from data_prep.sources import bytes_to_read, input_files, read_batches
from data_prep.tokenize import Encoded, TokenizerInfo, describe, encode_all
from data_prep.train_tokenizer import train_tokenizer
from data_prep.write_shards import MANIFEST, ShardFolder, check_free

SPLITS = ("train", "valid")


def prepare(settings: Settings, out: str, workers: int, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Make the data folder `out`. Gives its manifest, and whether it was made now: what is there already is kept.

    Raises DataError if `out` holds something else, also data of other settings or other input.
    """
    inputs = {name: _inputs(settings, name) for name in settings.sources}
    plan = {"settings": settings.to_dict(), "inputs": inputs}
    if (Path(out) / MANIFEST).is_file():
        manifest = read_manifest(out)
        changed = [key for key in plan if manifest.get(key) != plan[key]]
        if changed:
            raise DataError(f"{out} holds data made from other {changed[0]}: choose another --out or remove it")
        return manifest, False
    check_free(Path(out))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = settings.tokenizer
        if tokenizer is None:
            assert settings.train_vocab_size is not None
            tokenizer = os.path.join(scratch, "tokenizer.json")
            train_tokenizer(settings, settings.train_vocab_size, Path(tokenizer), progress)
        info = describe(tokenizer, settings.bos, settings.eos)
        if settings.vocab_size is not None and info.vocab_size > settings.vocab_size:
            raise DataError(
                f"{tokenizer} has token ids up to {info.vocab_size - 1},"
                f" beyond the model's vocab_size={settings.vocab_size}"
            )
        with ShardFolder(out, info.dtype, settings.shard_bytes) as folder:
            splits: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
            for source in settings.sources:
                patterns = settings.sources[source] + settings.valid.get(source, [])
                progress.start(f"pack {source}", bytes_to_read(patterns))
                for split, counts in _pack_source(settings, source, tokenizer, info, workers, folder, progress).items():
                    splits[split][source] = asdict(counts)
            manifest = {
                "length": settings.length,
                "packing": settings.packing,
                "dtype": info.dtype,
                "tokenizer": asdict(info),
                "splits": splits,
                **plan,
            }
            return folder.commit(tokenizer, manifest), True


def _inputs(settings: Settings, source: str) -> dict[str, dict[str, int]]:
    """Number and size of the input files by split, which tell a changed input from the one that was read."""
    found = {}
    for split, patterns in (("train", settings.sources[source]), ("valid", settings.valid.get(source, []))):
        files = [file for pattern in patterns for file in input_files(pattern)]
        found[split] = {"files": len(files), "bytes": sum(os.path.getsize(file) for file in files)}
    return found


def _pack_source(
    settings: Settings,
    source: str,
    tokenizer: str,
    info: TokenizerInfo,
    workers: int,
    folder: ShardFolder,
    progress: Progress,
) -> dict[str, Counts]:
    packers = {split: _packer(settings, split, source) for split in SPLITS}

    def encoded(patterns: list[str]) -> Iterable[Encoded]:
        batches = (batch for pattern in patterns for batch in read_batches(pattern))
        return encode_all(batches, tokenizer, info, settings.parser(source), workers)

    number = 0
    for default, patterns in (("train", settings.sources[source]), ("valid", settings.valid.get(source, []))):
        for batch in encoded(patterns) if patterns else ():
            for split, row in _pack_batch(settings, source, default, batch, number, packers):
                folder.write(split, source, row)
            number += len(batch.lengths)
            progress.advance(batch.consumed, len(batch.tokens))
    for split, packer in packers.items():
        for row in packer.finish():
            folder.write(split, source, row)
    train = packers["train"].counts
    if not train.rows:
        raise DataError(f"source {source!r} has {train.tokens_in:,} tokens: not one row of {settings.length:,}")
    return {split: packer.counts for split, packer in packers.items()}


def _packer(settings: Settings, split: str, source: str) -> Packer:
    if settings.packing == "concat":
        return ConcatPacker(settings.length)
    return BestFitPacker(settings.length, settings.buffer_tokens, f"{settings.seed}/{split}/{source}")


def _pack_batch(
    settings: Settings, source: str, default: str, batch: Encoded, number: int, packers: dict[str, Packer]
) -> Iterator[tuple[str, Row]]:
    """The rows that a batch completes, each with its split. `number` is that of the batch's first document."""
    start = 0
    for index, length in enumerate(batch.lengths.tolist()):
        if not length:
            continue
        split = "valid" if settings.is_valid(source, int(batch.keys[index])) else default
        tokens = batch.tokens[start : start + length]
        for row in packers[split].add(number + index, tokens, int(batch.text_bytes[index])):
            yield split, row
        start += length
    dropped = packers[default].counts.documents_dropped
    for reason, count in batch.dropped.items():
        dropped[reason] = dropped.get(reason, 0) + count
