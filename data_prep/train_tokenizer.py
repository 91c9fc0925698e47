"""`train-tokenizer`: a byte-level BPE of a given size, lossless on any text."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.errors import DataError
from data_prep.parse import document_key
from data_prep.progress import Progress
from data_prep.settings import Settings
from data_prep.sources import bytes_to_read, read_batches

BOUNDARY = "<|endoftext|>"
SMALLEST = 257  # 256 bytes and the boundary


def train_tokenizer(settings: Settings, vocab_size: int, out: Path, progress: Progress) -> None:
    """Train on the training texts of the sources (never the validation documents) and write tokenizer.json."""
    if vocab_size < SMALLEST:
        raise DataError(f"a vocabulary of {vocab_size} is too small: 256 bytes and {BOUNDARY} make {SMALLEST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    patterns = [pattern for patterns in settings.sources.values() for pattern in patterns]
    progress.start("read for the tokenizer", bytes_to_read(patterns))
    tokenizer.train_from_iterator(_texts(settings, progress), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(f"the text yields {tokenizer.get_vocab_size()} tokens only, not {vocab_size}: give more text")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    tokenizer.save(str(temporary))
    temporary.rename(out)


def _texts(settings: Settings, progress: Progress) -> Iterator[str]:
    for source, patterns in settings.sources.items():
        parser = settings.parser(source)
        for pattern in patterns:
            for batch in read_batches(pattern):
                progress.advance(batch.consumed)
                for text in parser(batch)[0]:
                    if text and not settings.is_valid(source, document_key(text.encode())):
                        yield text
