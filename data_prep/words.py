"""Byte-level BPE with a memory: the ids of a word are looked up once it has been seen.

A byte-level BPE first divides a text by a regular expression, then encodes each word by itself; words repeat, so that
most of the work is looking them up, about three times as fast as encoding them again. The words are divided by the
`regex` package rather than by `tokenizers` itself, which hands them out slowly. The two must agree on every character's
class, whose tables depend on their versions: a character is compared when it first occurs, and a text with one on which
they differ is left to `tokenizers`.
"""

import json

import numpy as np
import regex
from tokenizers import Tokenizer, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_WORDS = 1 << 20  # remembered, some 150 MB
MAX_LENGTH = 64  # characters of a word that is remembered
NEIGHBOURS = ("", "a", "E", "1", " ", "\n", "!", "'")  # one of each class that a pattern may tell apart


class WordEncoder:
    """Encodes texts to the ids that `tokenizer` gives them, as bytes of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, dtype: str):
        self._find = regex.compile(pattern).findall
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._words = _Words(tokenizer, dtype)
        self._same: dict[str, bool] = {}  # character → whether both divide it alike

    def __call__(self, text: str) -> bytes | None:
        """None for a text that this cannot encode."""
        for character in set(text) - self._same.keys():
            self._same[character] = self._is_divided_alike(character)
        if not all(map(self._same.__getitem__, set(text))):
            return None
        if len(self._words) > MAX_WORDS:
            self._words.clear()
        return b"".join(map(self._words.__getitem__, self._find(text)))

    def _is_divided_alike(self, character: str) -> bool:
        """Whether the two divide it alike beside characters of every class."""
        for before in NEIGHBOURS:
            for after in (*NEIGHBOURS, character):
                text = before + character + after
                expected = [text[start:end] for _, (start, end) in self._pre_tokenizer.pre_tokenize_str(text)]
                if self._find(text) != expected:
                    return False
        return True


class _Words(dict[str, bytes]):
    """Word → its ids."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        super().__init__()
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.to_characters = _byte_characters()

    def __missing__(self, word: str) -> bytes:
        # latin-1: a character a byte, which the table turns into the one that stands for it in the vocabulary.
        characters = str(word.encode(), "latin-1").translate(self.to_characters)
        ids = np.array([token.id for token in self.tokenizer.model.tokenize(characters)], self.dtype).tobytes()
        if len(word) <= MAX_LENGTH:
            self[word] = ids
        return ids


def word_encoder(tokenizer: Tokenizer, dtype: str) -> WordEncoder | None:
    """A WordEncoder, or None for a tokenizer that works in another way."""
    description = json.loads(tokenizer.to_str())
    pattern = _pattern(description["pre_tokenizer"])
    # Special tokens are not looked for in texts (`encode_special_tokens`), but other added ones are.
    added = any(not token["special"] for token in description["added_tokens"])
    if pattern is None or description["normalizer"] or description["model"].get("dropout") or added:
        return None
    try:
        return WordEncoder(tokenizer, pattern, dtype)
    except regex.error:
        return None


def _pattern(pre_tokenizer: dict | None) -> str | None:
    """The regular expression that divides texts into words, which bytes are then spelled in characters."""
    parts = [pre_tokenizer or {}]
    if parts[0].get("type") == "Sequence":
        parts = parts[0]["pretokenizers"]
    byte_level = parts[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if len(parts) == 1 and byte_level.get("use_regex", True):
        return GPT2
    if len(parts) != 2 or byte_level.get("use_regex", True):
        return None
    split = parts[0]
    isolated = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    return split["pattern"].get("Regex") if isolated else None


def _byte_characters() -> dict[int, str]:
    """Byte → the character that stands for it: itself where it is printable, else the next one from U+0100 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(character for character in alphabet if ord(character) > 255))
    return {byte: chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)}
