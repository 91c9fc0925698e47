"""Words looked up give the ids that `tokenizers` gives, whatever the text."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from data_prep.tokenize import load
from data_prep.words import GPT2, WordEncoder, word_encoder
from tests.data_prep.conftest import make_texts

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["the stick", " breaking", "'s", "'LL", "'ſ", "\n\n", "  ", "\t", "12345", " ½²", "<|endoftext|>"]
        ),
        st.sampled_from(
            ["\u3000", "\x85", "\x1c", "\u180e", "\u200b", "é", "e\u0301", "漢字", "🜁👩‍👩‍👧", "ﬀ", "Ⅷ", "\0"]
        ),
    ),
    max_size=12,
).map("".join)


def encoder_of(tokenizer: str, pattern: str | None) -> tuple[Tokenizer, WordEncoder]:
    loaded = load(tokenizer)
    if pattern:
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        loaded.pre_tokenizer = pre_tokenizers.Sequence(parts)
    words = word_encoder(loaded, "uint16")
    assert words is not None
    return loaded, words


@pytest.mark.parametrize("pattern", [None, LLAMA3])
def test_same_ids_as_tokenizers(tokenizer: str, pattern: str | None) -> None:
    loaded, words = encoder_of(tokenizer, pattern)
    encoded = 0

    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        nonlocal encoded
        ids = words(text)
        if ids is not None:
            encoded += 1
            assert np.frombuffer(ids, np.uint16).tolist() == loaded.encode(text, add_special_tokens=False).ids

    check()
    assert encoded > 200  # a text with a character of which the two think differently is left to `tokenizers`
    for text in make_texts(50, 7):
        assert (
            np.frombuffer(words(text) or b"", np.uint16).tolist() == loaded.encode(text, add_special_tokens=False).ids
        )


def test_characters_on_which_the_two_differ_are_found(tokenizer: str) -> None:
    """A wrong pattern, as other tables of Unicode would be: letters of ASCII alone."""
    _, words = encoder_of(tokenizer, None)
    pattern = GPT2.replace(r" ?\p{L}+", " ?[a-zA-Z]+").replace(r"\s\p{L}\p{N}", r"\sa-zA-Z\p{N}")
    wrong = WordEncoder(words._words.tokenizer, pattern, "uint16")
    assert wrong("plain letters") is not None
    assert wrong("not λ") is None
    assert wrong("plain again") is not None


def test_most_characters_are_looked_up(tokenizer: str) -> None:
    _, words = encoder_of(tokenizer, None)
    rng = np.random.default_rng(0)
    characters = [chr(c) for c in rng.integers(0, sys.maxunicode, 1500) if not 0xD800 <= c < 0xE000]
    assert sum(words(character) is not None for character in characters) > 0.97 * len(
        characters
    )  # the two know other versions of Unicode


@pytest.mark.parametrize("change", ["normalizer", "prefix", "added"])
def test_other_tokenizers_are_left_alone(tokenizer: str, change: str) -> None:
    from tokenizers import AddedToken, normalizers

    loaded = load(tokenizer)
    if change == "normalizer":
        loaded.normalizer = normalizers.NFC()
    elif change == "prefix":
        loaded.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        loaded.add_tokens([AddedToken("stick")])
    assert word_encoder(loaded, "uint16") is None
