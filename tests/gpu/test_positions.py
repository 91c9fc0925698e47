"""Every allowed core × position on a GPU: fused paths against float64, isolation of documents, cached passes.

`pytest -m gpu tests/gpu/test_positions.py -v` names each pair with PASSED or FAILED; FlexAttention compiles for a minute.
"""

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from ssscale_kernels.cached import cached_attention
from ssscale_kernels.exact import exact_attention

from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.generate import extend
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from tests.models import models, packed

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = [1, 150, 37, 196]
# FlexAttention wants 16 dimensions a head at least; a window of 6 keys would leave blocks of keys out of nothing.
CASES = {
    name: dataclasses.replace(
        model,
        hidden_size=128,
        position=dataclasses.replace(model.position, window=model.position.window and 40),
    )
    for name, model in models().items()
}
# FlexAttention has larger tiles for 64 dims than for others, which must leave room for a bias that is read.
CASES["softmax-fire-64"] = dataclasses.replace(CASES["softmax-fire"], head_dim=64)


@pytest.fixture(autouse=True)
def exact_products_and_many_graphs() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch._dynamo.config.patch(recompile_limit=64):  # every case is a graph of its own
        yield
    torch.set_float32_matmul_precision(before)


def make(name: str, groups: Groups) -> Decoder:
    decoder = Decoder(CASES[name], groups, 256)
    initialize_weights(decoder, CASES[name], groups, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in decoder.parameters():
            if hasattr(weight, "declared"):
                weight += 0.3 * torch.rand(weight.shape, generator=generator)
    return decoder


def run(decoder: Decoder, dtype: torch.dtype, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Losses and gradients in float64 on the CPU, from weights rounded to bf16 whatever the dtype."""
    decoder = decoder.to(torch.bfloat16).to(dtype).to(device)
    decoder.zero_grad()
    tokens, layout, labels = packed(LENGTHS, seed)
    losses = decoder(tokens.to(device), layout.to(device), labels.to(device))
    losses.sum().backward()
    found = {key: weight.grad for key, weight in decoder.named_parameters()} | {"losses": losses.detach()}
    return {key: value.double().cpu() for key, value in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_bf16_matches_float64(name: str, groups: Groups) -> None:
    """At most twice the error of plain torch on the CPU in bf16, with float32 inside attention.

    Errors are those of all layers' weights of a name and of three inputs: a head's scale is a single number, whose error
    on one input is one draw.
    """
    squares: dict[str, list[float]] = {}
    for seed in range(3):
        exact = run(make(name, groups), torch.float64, "cpu", seed)
        plain = run(make(name, groups), torch.bfloat16, "cpu", seed)
        ours = run(make(name, groups), torch.bfloat16, DEVICE, seed)
        for key, value in exact.items():
            assert ours[key].isfinite().all(), key
            found = squares.setdefault(re.sub(r"blocks\.\d+", "blocks", key), [0.0, 0.0, 0.0])
            for i, x in enumerate((ours[key] - value, plain[key] - value, value)):
                found[i] += float(x.square().sum())
    for key, found in squares.items():
        error, usual, size = (x**0.5 for x in found)
        # The last bias is 0 but for rounding: softmax does not feel what is added to all of a head's logits. Fused backward
        # passes take the row sums of dP ⊙ P from the rounded output.
        assert key.endswith(".position_weights.b2") or error <= 2 * usual + 3e-3 * size + 1e-3, (
            key,
            error,
            usual,
            size,
        )


@pytest.mark.parametrize("name", CASES)
def test_a_document_feels_nothing_of_its_neighbours(name: str, groups: Groups) -> None:
    decoder = make(name, groups).to(torch.bfloat16).to(DEVICE)
    tokens, layout, labels = (x.to(DEVICE) for x in packed(LENGTHS))
    other = tokens.clone()
    mine = slice(151, 188)
    other[:151] = (other[:151] + 7) % 300
    other[188:] = (other[188:] + 7) % 300
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for row in (tokens, other):
            captured: list[torch.Tensor] = []
            hook = decoder.embedding.register_forward_hook(
                lambda module, inputs, out, captured=captured: (out.retain_grad(), captured.append(out))[0]
            )
            losses = decoder(row, layout, labels)
            losses[mine].sum().backward()
            hook.remove()
            gradient = captured[0].grad.view(len(row), -1)
            assert not gradient[: mine.start].any()
            assert not gradient[mine.stop :].any()
            results.append((losses[mine], gradient[mine]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", CASES)
def test_cached_passes_give_the_logits_of_one_pass(name: str, groups: Groups) -> None:
    """In float32; in chunks of more and of fewer tokens than decoding takes, beside another sequence."""
    decoder = make(name, groups).to(DEVICE).requires_grad_(False)
    tokens, *_ = packed([120], seed=4)
    layout = dataclasses.replace(PackedLayout.from_lengths([120], 256).to(DEVICE))
    alone = decoder(tokens.to(DEVICE), layout).cpu()
    cache = KVCache(decoder, [120, 256])
    extend(decoder, cache, [[], list(range(60))])
    at = 0
    for count in (30, 50, 1, 1, 16, 22):
        found = extend(decoder, cache, [tokens[at : at + count].tolist(), [7, 8, 9]])
        at += count
        torch.testing.assert_close(found[0].cpu(), alone[at - 1].float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 0, 16], [64, 0, 100]])
def test_cached_attention_in_bf16(counts: list[int], window: int | None) -> None:
    """Decoding, and FlashAttention over packed keys for many queries; 4 query heads on 2 key heads."""
    lengths, capacity = [100, 7, 30], 200
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    generator = torch.Generator().manual_seed(0)
    shapes = [(starts[-1], 4, 64), (3 * capacity, 2, 64), (3 * capacity, 2, 64)]
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in shapes)
    rows = [torch.arange(n, n + count) + b * capacity for b, (n, count) in enumerate(zip(lengths, counts))]
    settings = {"starts": starts, "lengths": lengths, "rows": torch.cat(rows).to(DEVICE), "capacity": capacity}
    ours = cached_attention(q, k, v, **settings, window=window)
    slots = [b * capacity for b in range(3)]
    expected = exact_attention(
        q.double(), k.double(), v.double(), starts_q=starts, starts_k=slots, offsets=lengths, window=window
    )
    assert (ours.double() - expected).abs().max() < 2e-2
