"""Every allowed core × position: values and gradients against plain torch, isolation of documents, cached passes."""

import dataclasses
import itertools

import pytest
import torch

from ssscale.config.registry import MIXERS
from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.flops import count_parameters
from ssscale.model.generate import extend, generate
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from tests.models import CASES, disturb, packed
from tests.plain_model import plain_logits


def make(name: str, groups: Groups, dtype: torch.dtype = torch.float32) -> Decoder:
    """Weights whose s, b, p_n and FIRE parameters all matter."""
    model = CASES[name]
    decoder = Decoder(model, groups, 64)
    initialize_weights(decoder, model, groups, seed=1)
    disturb(decoder)
    return decoder.to(dtype)


def test_the_cases_are_the_allowed_pairs() -> None:
    seen = {(model.mixers[0], model.position.method) for model in CASES.values() if len(model.mixers) == 1}
    assert seen == {(name, method) for name, mixer in MIXERS.items() for method in mixer.positions}


TOLERANCES = {
    "ssmax": 2e-5,
    "ssmax_bias": 2e-5,
    "ssmax_pn": 2e-5,
    "rope": 2e-5,
    "alibi": 1e-10,
    "fire": 1e-10,
    "nope": 1e-10,
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_plain_torch_in_float64(name: str, groups: Groups) -> None:
    decoder = make(name, groups, torch.float64)
    tokens, layout, _ = packed([1, 21, 3, 13])
    weights = {key: weight.detach().clone().requires_grad_() for key, weight in decoder.named_parameters()}
    expected = plain_logits(weights, CASES[name], tokens, layout)
    logits = decoder(tokens, layout)
    # float32 remains in rope's tables, SSMax's logarithm and ALiBi's slopes; nothing else is rounded.
    atol = TOLERANCES.get(name.split("-")[0], 0) or TOLERANCES[name.split("-")[1].split("_")[0]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.backward(upstream)
    expected.backward(upstream)
    for key, weight in decoder.named_parameters():
        reference = weights[key].grad
        assert weight.grad is not None, key
        error = (weight.grad - reference).abs().max()
        assert error <= atol * max(1.0, reference.abs().max()), (key, error)
        if "weights." in key and not key.endswith(
            "b2"
        ):  # softmax does not feel what FIRE adds to all of a head's logits
            assert weight.grad.abs().max() > 1e-6, f"{key} is not exercised"


@pytest.mark.parametrize("name", CASES)
def test_a_document_feels_nothing_of_its_neighbours(name: str, groups: Groups) -> None:
    """Forward and the gradient with respect to the embedded tokens, bit for bit."""
    decoder = make(name, groups)
    tokens, layout, labels = packed([20, 11, 33])
    other = tokens.clone()
    other[:20] = (other[:20] + 7) % 300
    other[31:] = (other[31:] + 7) % 300
    results = []
    for row in (tokens, other):
        captured: list[torch.Tensor] = []
        hook = decoder.embedding.register_forward_hook(
            lambda module, inputs, out, captured=captured: (out.retain_grad(), captured.append(out))[0]
        )
        losses = decoder(row, layout, labels)
        losses[20:31].sum().backward()
        hook.remove()
        gradient = captured[0].grad.view(64, -1)
        assert not gradient[:20].any()
        assert not gradient[31:].any()
        results.append((losses[20:31], gradient[20:31]))
        assert gradient[20:31].abs().max() > 0
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def all_logits(decoder: Decoder, tokens: torch.Tensor, final: int | None = None) -> torch.Tensor:
    """Of one document in one pass, which is to reach `final` tokens."""
    layout = PackedLayout.from_lengths([len(tokens)])
    with torch.no_grad():
        return decoder(tokens, dataclasses.replace(layout, final_lengths=torch.tensor([final or len(tokens)])))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [[1] * 26, [9, 17], [20, 1, 1, 4], [26]])
def test_logits_from_a_cache_are_those_of_a_document_alone(name: str, chunks: list[int], groups: Groups) -> None:
    """In chunks, and token by token, beside another sequence of another length; packed behind others."""
    decoder = make(name, groups).requires_grad_(False)
    tokens, *_ = packed([26], seed=4)
    other, *_ = packed([31], seed=5)
    alone = all_logits(decoder, tokens)
    cache = KVCache(decoder, [26, 64])
    extend(decoder, cache, [[], other[:5].tolist()])
    for at, end in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        found = extend(decoder, cache, [tokens[at:end].tolist(), [7, 8] if at else []])
        torch.testing.assert_close(found[0], alone[end - 1], rtol=0, atol=2e-5)
    behind = decoder(torch.cat((other, tokens)), PackedLayout.from_lengths([31, 26]))[31:]
    torch.testing.assert_close(behind, alone, rtol=0, atol=2e-5)


def test_a_mixer_decodes_by_its_own_plan(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax does not get the plan of a mixer that comes first."""
    monkeypatch.setattr(MIXERS["stickbreaking"], "plan_decode", lambda *given: "own")
    model = dataclasses.replace(CASES["softmax-nope"], mixers=["stickbreaking", "softmax"])
    decoder = Decoder(model, groups, 64).requires_grad_(False)
    initialize_weights(decoder, model, groups, seed=1)
    tokens, *_ = packed([9], seed=4)
    cache = KVCache(decoder, [9])
    extend(decoder, cache, [tokens[:8].tolist()])
    found = extend(decoder, cache, [tokens[8:].tolist()])
    torch.testing.assert_close(found[0], all_logits(decoder, tokens)[-1], rtol=0, atol=2e-5)


# What scales q differs between SSMax's variants, and its n does not.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("ssmax_", "ssmax-rope_"))])
def test_200_cached_tokens_are_the_argmax_of_full_passes(name: str, groups: Groups) -> None:
    decoder = make(name, groups).requires_grad_(False)
    prompts = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    texts = generate(decoder, prompts, 200)
    for prompt, text in zip(prompts, texts):
        whole = torch.tensor(prompt + text)
        # One pass over the whole text: causal, so that each row is the full pass over what was there.
        rows = all_logits(decoder, whole)[len(prompt) - 1 : -1]
        assert rows.argmax(-1).tolist() == text
        assert len(text) == 200


@pytest.mark.parametrize("name", ["softmax-fire", "softmax-alibi", "softmax-rope-bias", "ssmax-rope-bias_norm"])
def test_parameters_are_counted(name: str, groups: Groups) -> None:
    assert make(name, groups).num_parameters() == count_parameters(CASES[name], 64)
