"""The command `train-tokenizer`, which trains a byte-level BPE of a given size. It is lossless on any text."""

import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.errors import DataError
from data_prep.parse import document_key
from data_prep.progress import Progress
from data_prep.settings import Settings
from data_prep.sources import Input, find_inputs
from data_prep.tokenize import LARGEST
from data_prep.write_shards import write_whole

BOUNDARY = "<|endoftext|>"
SMALLEST = 257  # 256 bytes and the boundary token


def train_tokenizer(settings: Settings, vocab_size: int, out: Path, progress: Progress) -> None:
    """Trains on the training texts of the sources (never on validation documents) and writes tokenizer.json.

    Raises DataError if `out` exists or its folder cannot be made, or if the vocabulary is too small, or too large for the text.
    """
    if vocab_size < SMALLEST:
        raise DataError(f"a vocabulary of {vocab_size} is too small: 256 bytes and {BOUNDARY} make {SMALLEST}")
    if vocab_size > LARGEST:
        raise DataError(f"a vocabulary of {vocab_size} is too large: {LARGEST:,} is the most")
    if out.is_dir():
        raise DataError(f"{out} is a folder: --out names the file to write")
    if os.path.lexists(out):  # data may have been packed with it
        raise DataError(f"{out} exists: choose another --out or remove it")
    inputs = {
        source: [item for pattern in patterns for item in find_inputs(pattern)]
        for source, patterns in settings.sources.items()
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder of {out}: {error.strerror}") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    progress.start("read for the tokenizer", sum(item.bytes for items in inputs.values() for item in items))
    tokenizer.train_from_iterator(_texts(settings, inputs, progress), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(f"the text yields {tokenizer.get_vocab_size()} tokens only, not {vocab_size}: give more text")
    write_whole(out, tokenizer.to_str(pretty=True).encode())  # save() raises no OSError for a full disk


def _texts(settings: Settings, inputs: dict[str, list[Input]], progress: Progress) -> Iterator[str]:
    for source, items in inputs.items():
        parser = settings.parser(source)
        for item in items:
            for batch in item.read(parser.columns):
                progress.advance(batch.consumed)
                for text in parser(batch)[0]:
                    if text and not settings.is_valid(source, document_key(text.encode())):
                        yield text
