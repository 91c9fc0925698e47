"""Byte-level BPE with a cache of words.

A byte-level BPE splits a text with a regular expression and encodes each word separately. Words repeat, so most of the
work here is looking up known words, which is about three times as fast as encoding them again. The `regex` package
splits the text, because `tokenizers` returns its words slowly. Both must assign every character to the same class, but
their tables depend on their versions. So each character is compared when it first occurs, and texts with a character on
which they differ are left to `tokenizers`.
"""

import json

import numpy as np
import regex
from tokenizers import Tokenizer, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_WORDS = 1 << 20  # limit of the cache, about 150 MB
MAX_LENGTH = 64  # longest word that is cached, in characters
NEIGHBOURS = ("", "a", "E", "1", " ", "\n", "!", "'")  # one character of each class that a pattern may distinguish


class WordEncoder:
    """Encodes texts to the ids of `tokenizer`, as bytes of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, pattern: str, dtype: str):
        self._find = regex.compile(pattern).findall
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._words = _Words(tokenizer, dtype)
        self._same: dict[str, bool] = {}  # character → whether both split it in the same way

    def __call__(self, text: str) -> bytes | None:
        """Returns the ids of a text, or None if it must be left to `tokenizers`."""
        for character in set(text) - self._same.keys():
            self._same[character] = self._is_divided_alike(character)
        if not all(map(self._same.__getitem__, set(text))):
            return None
        if len(self._words) > MAX_WORDS:
            self._words.clear()
        return b"".join(map(self._words.__getitem__, self._find(text)))

    def _is_divided_alike(self, character: str) -> bool:
        """Whether both split a character in the same way, next to characters of every class."""
        for before in NEIGHBOURS:
            for after in (*NEIGHBOURS, character):
                text = before + character + after
                expected = [text[start:end] for _, (start, end) in self._pre_tokenizer.pre_tokenize_str(text)]
                if self._find(text) != expected:
                    return False
        return True


class _Words(dict[str, bytes]):
    """The cache: word → its ids."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        super().__init__()
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.to_characters = _byte_characters()

    def __missing__(self, word: str) -> bytes:
        # latin-1 maps each byte to one character, which the table replaces by the byte's character in the vocabulary.
        characters = str(word.encode(), "latin-1").translate(self.to_characters)
        ids = np.array([token.id for token in self.tokenizer.model.tokenize(characters)], self.dtype).tobytes()
        if len(word) <= MAX_LENGTH:
            self[word] = ids
        return ids


def word_encoder(tokenizer: Tokenizer, dtype: str) -> WordEncoder | None:
    """Returns a WordEncoder, or None if the tokenizer works in another way."""
    description = json.loads(tokenizer.to_str())
    pattern = _pattern(description["pre_tokenizer"])
    # Special tokens are not searched for in texts (`encode_special_tokens`), but other added tokens are.
    added = any(not token["special"] for token in description["added_tokens"])
    if pattern is None or description["normalizer"] or description["model"].get("dropout") or added:
        return None
    try:
        return WordEncoder(tokenizer, pattern, dtype)
    except regex.error:
        return None


def _pattern(pre_tokenizer: dict | None) -> str | None:
    """Returns the regular expression that splits texts into words, or None for an unknown pre-tokenizer."""
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
    """Maps each byte to its character: itself if it is printable, otherwise the next one from U+0100 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(character for character in alphabet if ord(character) > 255))
    return {byte: chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)}
