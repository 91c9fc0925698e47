import pytest
import torch

from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.generate import extend, generate, pick, prefill

PROMPTS = [[0, 5, 9, 200], [0], [0, *range(40, 70)]]


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)]))[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_one_prompt_at_a_time(model):
    assert generate(model, PROMPTS, 12) == [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_a_tiny_nucleus_is_greedy(model):
    assert generate(model, PROMPTS, 6, temperature=1.0, top_p=1e-6) == generate(model, PROMPTS, 6)


def test_seed_decides_and_the_other_prompts_do_not(model):
    drawn = generate(model, PROMPTS, 10, temperature=2.0, seed=3)
    assert drawn == generate(model, PROMPTS, 10, temperature=2.0, seed=3)
    assert drawn != generate(model, PROMPTS, 10, temperature=2.0, seed=4)
    assert drawn[0] == generate(model, PROMPTS[:1], 10, temperature=2.0, seed=3)[0]
    assert drawn[1:] == generate(model, PROMPTS[1:], 10, temperature=2.0, seed=[4, 5])


def test_stops_at_the_end_of_the_document(model):
    text = generate(model, PROMPTS[:1], 12)[0]
    end = text[4]
    assert generate(model, PROMPTS[:1], 12, eos_id=end)[0] == text[: text.index(end)]


def test_stops_where_told_and_at_the_length(model):
    text = generate(model, PROMPTS[:1], 12)[0]
    assert generate(model, PROMPTS[:1], 12, stop=lambda texts: [len(tokens) == 3 for tokens in texts])[0] == text[:3]
    assert generate(model, PROMPTS, 12, max_length=31) == [*generate(model, PROMPTS[:2], 12), []]


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0}])
def test_ids_beyond_the_tokenizer_are_never_chosen(model, settings):
    known = 5  # so few of 400 that a draw among all is sure to leave them
    free = [token for text in generate(model, PROMPTS, 12, **settings) for token in text]
    assert max(free) >= known
    texts = generate(model, PROMPTS, 12, vocab_size=known, **settings)
    assert [len(text) for text in texts] == [12] * 3
    assert max(token for text in texts for token in text) < known


def test_greedy_among_the_tokenizers_ids_is_the_likeliest_of_them(model):
    (text,) = generate(model, PROMPTS[:1], 8, vocab_size=50)
    tokens = PROMPTS[0] + text
    logits = model(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)]))
    assert logits[len(PROMPTS[0]) - 1 : -1, :50].argmax(-1).tolist() == text


def test_nucleus_keeps_the_likeliest_tokens_and_their_proportions():
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([pick(probabilities.log(), 1.0, 0.75, generator) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=5) / 4000
    expected = torch.tensor([0, 0.4, 0, 0.3, 0.15]) / 0.85
    assert (shares - expected).abs().max() < 0.03
    assert shares[[0, 2]].sum() == 0


def test_temperature_sharpens():
    logits = torch.tensor([0.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([pick(logits, 0.5, 1.0, generator) for _ in range(4000)])
    assert abs(drawn.float().mean() - torch.tensor(2.0).sigmoid()) < 0.03


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_at_once_and_in_chunks(model, chunk):
    alone = torch.cat([extend(model, KVCache(model, [40]), [prompt]) for prompt in PROMPTS])
    assert (prefill(model, KVCache(model, [40] * 3), PROMPTS, chunk) - alone).abs().max() < 1e-5


def test_a_full_cache_is_said(model):
    cache = KVCache(model, [5, 9])
    extend(model, cache, [[1, 2, 3], [4]])
    with pytest.raises(ValueError, match="a sequence of 6 tokens does not fit its 5 of the cache"):
        extend(model, cache, [[5, 6, 7], []])
    with pytest.raises(ValueError, match="2 sequences are cached"):
        extend(model, cache, [[5]])


@pytest.mark.parametrize(("changed", "words"), [({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p")])
def test_bad_settings(model, changed, words):
    with pytest.raises(ValueError, match=words):
        generate(model, PROMPTS, 3, **changed)


def test_empty_prompt(model):
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[]], 3)


def test_texts_that_end_early_leave_the_others_alone(model):
    """Their sequences stay in the cache until a quarter of them have ended."""
    prompts = [[0, 5 * i, 200 - i] for i in range(8)]
    ends = {tuple(greedy(model, prompt, 2 + i)) for i, prompt in enumerate(prompts)}
    texts = generate(model, prompts, 10, stop=lambda texts: [tuple(tokens) in ends for tokens in texts])
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text == greedy(model, prompt, 2 + i)
