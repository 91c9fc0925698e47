"""The decoder: every run file builds, documents are isolated, the graph does not break, padding gets nothing."""

import dataclasses
import shutil
from typing import Any

import pytest
import torch

from ssscale.config import load_config, run_names
from ssscale.config.choices import Recompute
from ssscale.config.schema import ModelConfig, WidthConfig
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.flops import count_parameters
from ssscale.model.init import initialize_weights
from ssscale.model.recompute import keep_products
from ssscale.parallel import megatron
from ssscale.parallel.groups import Groups
from tests.models import MODELS, packed
from tests.plain_model import plain_losses


def make(model: ModelConfig, groups: Groups, recompute: Recompute = Recompute.none) -> Decoder:
    decoder = Decoder(model, groups, 64, recompute=recompute)
    initialize_weights(decoder, model, groups, seed=1)
    return decoder


@pytest.mark.parametrize("name", run_names())
def test_every_run_file_builds_with_its_parameters(name: str, groups: Groups) -> None:
    config = load_config([f"config={name}"])
    with torch.device("meta"):
        decoder = Decoder(config.model, groups, config.data.length)
    assert decoder.num_parameters() == count_parameters(config.model, config.data.length)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[1], [40], [1, 17, 1, 30], [33, 31]])
def test_losses_match_plain_torch_in_float64(name: str, lengths: list[int], groups: Groups) -> None:
    model = MODELS[name]
    decoder = make(model, groups).double()
    tokens, layout, labels = packed(lengths)
    with torch.no_grad():
        weights = dict(decoder.named_parameters())
        expected = plain_losses(weights, model, tokens, layout, labels)
        # float32 remains inside rope, SSMax's logarithm and the loss.
        torch.testing.assert_close(decoder(tokens, layout, labels).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_without_gradients_the_losses_are_the_same_bits(
    name: str, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers take a shorter way there, and few tokens at a time have all their probabilities in memory."""
    decoder, batch = make(MODELS[name], groups), packed([1, 17, 30])
    counts: list[int] = []
    token_losses = megatron.token_losses

    def count(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(logits))
        return token_losses(logits, *rest)

    monkeypatch.setattr(megatron, "token_losses", count)
    monkeypatch.setattr(megatron, "ROWS_READ", 20)
    with torch.no_grad():
        short = decoder(*batch)
    assert counts == [20, 20, 8]
    assert torch.equal(short, decoder(*batch).detach())


def test_losses_of_some_rows(groups: Groups) -> None:
    """As fine-tuning asks for them: those of all tokens, and the same gradients."""
    decoder, batch = make(next(iter(MODELS.values())), groups).double(), packed([1, 17, 30])
    rows = torch.tensor([3, 4, 29, 46])
    results = []
    for losses in (decoder(*batch)[rows], decoder(*batch, rows=rows)):
        results.append([losses, *torch.autograd.grad(losses.sum(), list(decoder.parameters()))])
    for every, some in zip(*results, strict=True):
        torch.testing.assert_close(some, every)


@pytest.mark.parametrize("name", MODELS)
def test_a_document_does_not_see_its_neighbours(name: str, groups: Groups) -> None:
    decoder = make(MODELS[name], groups)
    tokens, layout, labels = packed([20, 11, 33])
    other = tokens.clone()
    other[:20] = (other[:20] + 7) % 300
    other[31:] = (other[31:] + 7) % 300
    assert torch.equal(decoder(tokens, layout, labels)[20:31], decoder(other, layout, labels)[20:31])
    alone = decoder(tokens[20:31], PackedLayout.from_lengths([11]), labels[20:31])
    torch.testing.assert_close(decoder(tokens, layout, labels)[20:31], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_decoder_compiles_without_a_graph_break(name: str, groups: Groups) -> None:
    decoder = make(MODELS[name], groups)
    tokens, layout, labels = packed([32, 32])
    expected = decoder(tokens, layout, labels)
    expected.sum().backward()
    gradients = {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    losses = compiled(tokens, layout, labels)
    losses.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    for weight, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[weight], rtol=1e-4, atol=1e-4)


def test_one_graph_serves_all_blocks(groups: Groups) -> None:
    decoder = make(MODELS["ssmax"], groups)
    tokens, layout, labels = packed([32, 32])
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    for block in decoder.blocks:
        block.compile(backend=counter)
    decoder(tokens, layout, labels)
    assert counter.frame_count == 1


def gradients(model: ModelConfig, recompute: Recompute, groups: Groups, compiled: bool = False) -> list[torch.Tensor]:
    decoder = make(model, groups, recompute)
    torch._dynamo.reset()
    if compiled:
        decoder.compile_parts()
    for _ in range(2):
        decoder.zero_grad()
        decoder(*packed([20, 44])).sum().backward()
    return [p.grad for p in decoder.parameters()]


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_recomputation_changes_no_gradient(recompute: Recompute, groups: Groups) -> None:
    kept, again = (gradients(MODELS["ssmax"], kind, groups) for kind in (Recompute.none, recompute))
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++) to compile graphs for the CPU")
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("ssmax", Recompute.selective), ("stickbreaking", Recompute.selective), ("softmax", Recompute.full)],
)
def test_recomputation_changes_no_gradient_of_compiled_code(name: str, recompute: Recompute, groups: Groups) -> None:
    """Compiled code writes products into memory that it uses again, which no backend without code generation does."""
    kept, again = (gradients(MODELS[name], kind, groups, kind is recompute) for kind in (Recompute.none, recompute))
    for a, b in zip(again, kept, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_selective_recomputation_around_compiled_code_is_refused(groups: Groups) -> None:
    """Not by us, who compile the whole block, but nothing would tell otherwise."""
    left, right = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    def layer(x: torch.Tensor) -> torch.Tensor:
        torch.mm(x.detach(), right, out=torch.empty(4, 4))
        return x @ right

    with pytest.raises(RuntimeError, match=r"around compiled code: aten\.mm\.out writes"):
        keep_products((), layer, left)


@pytest.mark.parametrize("name", ["softmax", "ssmax"])  # untied and tied
def test_the_vocabulary_padding_gets_no_probability_and_no_gradient(name: str, groups: Groups) -> None:
    decoder = make(MODELS[name], groups)
    with torch.no_grad():
        decoder.embedding.weight[300:] = 5.0
        if not MODELS[name].tie_embeddings:
            decoder.head.weight[300:] = 5.0
    tokens, layout, labels = packed([64])
    losses = decoder(tokens, layout, labels)
    logits = decoder(tokens, layout)
    assert logits.shape == (64, 300)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    assert not decoder.embedding.weight.grad[300:].any()


def test_width_multipliers_match_plain_torch(groups: Groups) -> None:
    width = WidthConfig(8, 12.0, 0.22, 1 / 8)
    model = dataclasses.replace(MODELS["ssmax"], width=width)
    decoder = make(model, groups)
    tokens, layout, labels = packed([20, 44])
    weights = dict(decoder.named_parameters())
    torch.testing.assert_close(
        decoder(tokens, layout, labels), plain_losses(weights, model, tokens, layout, labels), rtol=0, atol=1e-4
    )
