import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from eval.checkpoint.batches import pack
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.questions import Question, with_headers
from ssscale.config.schema import mixer_config, position_config
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate
from ssscale.model.init import initialize_weights
from tests.eval.conftest import LENGTH

PAIRS = [
    ("The stick", " breaking"),
    ("", "Softmax"),
    ("A longer context, of stick and softmax, ", "max and more"),  # whitespace at its end
    ("The stick", " softing laermo"),
    ("x " * 300, " end of a context that does not fit"),
    ("<|endoftext|>", " spelt out"),
]


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def alone(lm: PackedLM, tokens: list[int], scored: int) -> tuple[float, bool]:
    """One document in a pass of its own, token by token in float64."""
    tokens = tokens[-(LENGTH + 1) :]
    logits = lm.model(torch.tensor(tokens[:-1]), PackedLayout.from_lengths([len(tokens) - 1])).double()
    total, greedy = 0.0, True
    for i in range(len(tokens) - 1 - scored, len(tokens) - 1):
        total += float(logits[i].log_softmax(-1)[tokens[i + 1]])
        greedy = greedy and int(logits[i].argmax()) == tokens[i + 1]
    return total, greedy


def split_as_hugging_face(lm: PackedLM, context: str, continuation: str) -> tuple[list[int], list[int]]:
    stripped = context.rstrip()
    before = [lm.text.bos_id, *lm.text.encode(stripped)]
    whole = [lm.text.bos_id, *lm.text.encode(context + continuation)]
    return before, whole[len(before) :]


@pytest.mark.parametrize("batch_tokens", [1, 150, 100_000])
def test_packed_log_likelihoods_equal_single_documents(model, tokenizer, batch_tokens):
    lm = PackedLM(model, tokenizer, LENGTH, batch_tokens=batch_tokens)
    for (context, continuation), got in zip(PAIRS, lm.loglikelihood(ask("loglikelihood", *PAIRS)), strict=True):
        before, after = split_as_hugging_face(lm, context, continuation)
        value, greedy = alone(lm, before + after, len(after))
        assert got[0] == pytest.approx(value, rel=1e-5)
        assert got[1] == greedy


def test_every_path_begins_with_bos(lm, monkeypatch):
    seen = []
    monkeypatch.setattr(lm, "model", Recorder(lm.model, seen))
    lm.loglikelihood(ask("loglikelihood", ("", " stick"), ("The", " stick")))
    lm.loglikelihood_rolling(ask("loglikelihood_rolling", ("The stick",)))
    lm.generate_until(ask("generate_until", ("The stick", {"until": [], "max_gen_toks": 1})))
    assert len(seen) == 4
    text = lm.text.encode("The stick")
    whole = [lm.text.bos_id, *text]
    assert sorted(map(len, seen)) == sorted([len(lm.text.encode(" stick")), len(whole) - 1, len(whole) - 1, len(whole)])
    for document in seen:
        assert document[0] == lm.text.bos_id
        assert lm.text.bos_id not in document[1:]


class Recorder(torch.nn.Module):
    """Keeps the documents that a model is given."""

    def __init__(self, model, seen):
        super().__init__()
        self.model, self.seen, self.groups, self.config = model, seen, model.groups, model.config
        self.sequence_parallel = model.sequence_parallel

    def forward(self, tokens, layout, **cached):
        bounds = layout.cu_seqlens.tolist()
        self.seen += [tokens[a:b].tolist() for a, b in pairwise(bounds)]
        return self.model(tokens, layout, **cached)


def test_an_empty_context_and_rolling_agree(lm):
    text = "The stick is breaking."
    (value, _), rolling = (
        lm.loglikelihood(ask("loglikelihood", ("", text)))[0],
        lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))[0],
    )
    assert rolling == pytest.approx(value, rel=1e-6)


def test_rolling_scores_every_token_once(lm):
    text = "stick breaking softmax, lamo tirane. " * 30
    tokens = lm.text.encode(text)
    assert len(tokens) > 2 * LENGTH
    whole = [lm.text.bos_id, *tokens]
    expected = alone(lm, whole[: LENGTH + 1], LENGTH)[0]
    for first in range(LENGTH, len(tokens), LENGTH):
        last = min(first + LENGTH, len(tokens))
        window = whole[last - LENGTH : last + 1]
        expected += alone(lm, window, last - first)[0]
    assert lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))[0] == pytest.approx(expected, rel=1e-5)


def test_what_generation_gives_is_greedy(lm):
    context = "The stick"
    text = lm.generate_until(ask("generate_until", (context, {"until": ["\n"], "max_gen_toks": 8})))[0]
    assert "\n" not in text
    tokens = lm.tok_encode(context)
    best = generate(lm.model, [tokens], 5)[0]
    other = [*best[:-1], (best[-1] + 1) % 400]
    pairs = [(("", ""), tokens, best), (("", ""), tokens, other)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs)] == [True, False]


def test_generation_stops_at_a_string_and_ignores_its_neighbours(lm):
    contexts = ["The stick", "", "Softmax and la"]
    settings = {"until": [], "max_gen_toks": 10}
    texts = lm.generate_until(ask("generate_until", *((context, settings) for context in contexts)))
    for context, text in zip(contexts, texts, strict=True):
        assert lm.generate_until(ask("generate_until", (context, settings)))[0] == text
        end = text[len(text) // 2]
        cut = lm.generate_until(ask("generate_until", (context, settings | {"until": [end]})))[0]
        assert cut == text.split(end)[0]


def test_generation_never_leaves_the_tokenizer(config, groups, tokenizer):
    """A model may have more rows than its tokenizer has entries (400)."""
    wide = dataclasses.replace(config.model, vocab_size=1000)
    decoder = Decoder(wide, groups, LENGTH)
    initialize_weights(decoder, wide, groups, seed=5)
    lm = PackedLM(decoder.eval(), tokenizer, LENGTH)
    prompt = lm.tok_encode("The stick")
    assert max(generate(decoder, [prompt], 16)[0]) >= tokenizer.vocab_size == 400
    text = lm.generate_until(ask("generate_until", ("The stick", {"until": [], "max_gen_toks": 16})))[0]
    assert text == tokenizer.decode(generate(decoder, [prompt], 16, vocab_size=400, eos_id=tokenizer.eos_id)[0])


def test_impossible_requests(lm):
    with pytest.raises(UserError, match="no tokens of its own"):
        lm.loglikelihood(ask("loglikelihood", ("The stick", "")))
    with pytest.raises(UserError, match="the model takes 128"):
        lm.loglikelihood(ask("loglikelihood", ("The stick", " softmax" * 300)))
    with pytest.raises(UserError, match="generates 128 tokens"):
        lm.generate_until(ask("generate_until", ("The", {"until": [], "max_gen_toks": 128})))


def test_pack_bounds_batches_and_loses_nothing():
    lengths = [5, 30, 7, 7, 1, 12, 3]
    batches = list(pack(lengths, 15))
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= 15 for batch in batches)
    assert batches[0] == [1]
    assert list(pack([], 15)) == []


SHOTS = {"sticks": "The stick is breaking. " * 4, "soft": "Softmax and lamo, tirane. " * 4}


def with_shots() -> list[tuple[str, str]]:
    """Questions behind the same examples: choices of one token and of several, one answer, and a question of its own."""
    pairs = [(shots + f"la {n} mo:", answer) for shots in SHOTS.values() for n in range(6) for answer in (" 1", " 2")]
    pairs += [(SHOTS["sticks"] + f"ti {n}:", answer) for n in range(3) for answer in (" max", " softing laermo", " s")]
    return [*pairs, (SHOTS["soft"] + "one", " answer that is alone"), ("A stick", " breaking"), ("A stick", " soft")]


@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
@pytest.mark.parametrize("batch_tokens", [130, 100_000])
def test_headers_are_computed_once_and_change_nothing(core, batch_tokens, config, groups, tokenizer, monkeypatch):
    position = position_config("nope" if core == "stickbreaking" else "rope")
    changed = dataclasses.replace(config.model, mixers=[core], position=position)
    model = Decoder(changed, groups, LENGTH)
    initialize_weights(model, changed, groups, seed=5)
    lm = PackedLM(model.eval().requires_grad_(False), tokenizer, LENGTH, batch_tokens=batch_tokens)
    requests = ask("loglikelihood", *with_shots())
    without = lm.loglikelihood(requests)
    monkeypatch.setattr("eval.checkpoint.questions.MIN_HEADER", 16)
    monkeypatch.setattr("eval.checkpoint.questions.MIN_SAVED", 32)
    seen = []
    monkeypatch.setattr(lm, "model", Recorder(model, seen))
    for (value, greedy), (expected, also) in zip(lm.loglikelihood(requests), without, strict=True):
        assert value == pytest.approx(expected, rel=1e-5)
        assert greedy == also
    headers = [tuple(lm.tok_encode(shots)[:16]) for shots in SHOTS.values()]
    counts = [sum(tuple(part[:16]) == header for part in seen) for header in headers]
    assert counts == [1, 1] if batch_tokens > 1000 else max(counts) > 1


def test_families_are_those_that_save_the_most(monkeypatch):
    monkeypatch.setattr("eval.checkpoint.questions.MIN_HEADER", 4)
    monkeypatch.setattr("eval.checkpoint.questions.MIN_SAVED", 10)
    rng = np.random.default_rng(0)
    one, other = rng.integers(10, 1000, (2, 20))
    contexts = [np.append(one, [i, 1, 2]) for i in range(4)] + [np.append(other[:9], [i]) for i in range(5)]
    contexts += [one[:5], np.array([3, 4, 5, 6, 7, 8]), np.array([3, 4, 5, 6, 7, 9])]
    order = rng.permutation(len(contexts))
    found = with_headers([Question(contexts[i], [int(i)]) for i in order])
    assert {q.members[0]: q.header for q in found} == {
        **dict.fromkeys(range(4), 20),
        **dict.fromkeys(range(4, 9), 9),
        9: 0,
        10: 0,
        11: 0,
    }
    assert [q.header > 0 for q in found] == [True] * 9 + [False] * 3
    for a, b in pairwise(found[:9]):
        assert (a.family == b.family) == ((a.members[0] < 4) == (b.members[0] < 4))


@pytest.mark.gpu
@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
def test_values_on_a_gpu_are_those_of_float64(core, config, groups, tokenizer, monkeypatch):
    """bfloat16 within its rounding of the logits, float32 exactly; packed, behind shared contexts and headers, generated."""
    monkeypatch.setattr("eval.checkpoint.questions.MIN_HEADER", 16)
    monkeypatch.setattr("eval.checkpoint.questions.MIN_SAVED", 32)
    position = position_config("nope" if core == "stickbreaking" else "rope")
    exact = mixer_config("stickbreaking", skip_below=0.0) if core == "stickbreaking" else mixer_config()
    changed = dataclasses.replace(config.model, mixers=[core], mixer=exact, position=position, hidden_size=64)
    exact = Decoder(changed, groups, LENGTH)
    initialize_weights(exact, changed, groups, seed=5)
    weights = {name: weight.bfloat16() for name, weight in exact.state_dict().items() if torch.is_tensor(weight)}
    exact = exact.double()
    exact.load_state_dict(weights, strict=False)
    pairs = [*PAIRS, *with_shots()]
    contexts = ["The stick", "Softmax and la", SHOTS["soft"]]
    cpu = PackedLM(exact.eval().requires_grad_(False), tokenizer, LENGTH)
    for dtype, near in ((torch.bfloat16, 0.1), (torch.float32, 5e-4)):
        with torch.device(groups.device):
            model = Decoder(changed, groups, LENGTH, dtype=dtype)
        model.load_state_dict(weights, strict=False)
        lm = PackedLM(model.eval().requires_grad_(False), tokenizer, LENGTH)
        for (context, continuation), (value, _) in zip(
            pairs, lm.loglikelihood(ask("loglikelihood", *pairs)), strict=True
        ):
            before, after = split_as_hugging_face(cpu, context, continuation)
            assert abs(value - alone(cpu, before + after, len(after))[0]) < near * len(after)
    settings = {"until": ["\n"], "max_gen_toks": 10}
    for context, text in zip(
        contexts, lm.generate_until(ask("generate_until", *((c, settings) for c in contexts))), strict=True
    ):
        tokens = lm.tok_encode(context)
        for _ in range(10):
            tokens.append(int(exact(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)]))[-1].argmax()))
        assert tokenizer.decode(tokens[-10:]).split("\n")[0] == text


def test_samples_of_one_prompt_differ_and_batches_do_not_change_them(model, tokenizer):
    """lm-eval asks for `repeats` samples by as many equal requests, which can be in several batches."""
    options = {"until": [], "do_sample": True, "temperature": 0.7, "max_gen_toks": 16}
    requests = ask("generate_until", *[("A stick", options)] * 6)
    few, many = (PackedLM(model, tokenizer, LENGTH, batch_tokens=n).generate_until(requests) for n in (64, 100_000))
    assert few == many
    assert len(set(few)) == 6
