"""Compiled blocks on a GPU, with each recomputation: losses and gradients beside those that nothing compiles or computes again.

`pytest -m gpu tests/gpu/test_compiled.py`: a minute or two, most of it compiling.
"""

import re
from dataclasses import replace

import pytest
import torch

from ssscale.config.choices import Recompute
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from tests.distributed.compiled_models import make_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = [1, 700, 323, 1024]
BATCHES = 4
VOCABULARY = 500
FEW = 64  # entries of a gradient


def gradients(
    core: str, groups: Groups, compiled: bool, recompute: Recompute, device: str = DEVICE
) -> dict[str, torch.Tensor]:
    """Of several batches, with the losses. The first pass, which finds memory that none has used, does not count.

    Rounding alone moves a few entries by half or twice as much the next time. So gradients of few entries, as SSMax's s,
    are one tensor over all blocks and batches.

    On a GPU the model is bf16. On the CPU it has the same weights and computes in float32.
    """
    config = replace(make_model(core, 3), hidden_size=256, ffn_hidden_size=768, vocab_size=VOCABULARY)
    torch._dynamo.reset()
    with torch.device(DEVICE):
        decoder = Decoder(config, groups, sum(LENGTHS), dtype=torch.bfloat16, recompute=recompute)
        initialize_weights(decoder, config, groups, seed=1)
    if device == "cpu":
        rounded = decoder
        decoder = Decoder(config, groups, sum(LENGTHS), dtype=torch.float32, recompute=recompute)
        with torch.no_grad():
            for weight, on_gpu in zip(decoder.parameters(), rounded.parameters(), strict=True):
                weight.copy_(on_gpu)
    if compiled:
        decoder.compile_parts()
    layout = PackedLayout.from_lengths(LENGTHS).to(device)
    passes(decoder, layout, 0)
    every = [passes(decoder, layout, batch) for batch in range(BATCHES)]
    return {name: torch.cat([found[name] for found in every]) for name in every[0]}


def passes(decoder: Decoder, layout: PackedLayout, batch: int) -> dict[str, torch.Tensor]:
    """Return losses and gradients of one batch."""
    decoder.zero_grad()
    tokens = (torch.arange(sum(LENGTHS), device=layout.cu_seqlens.device) + 37 * batch) % VOCABULARY
    losses = decoder(tokens, layout, (7 * tokens + 3) % VOCABULARY)
    losses.mean().backward()
    found = {"losses": losses.detach().float().cpu().flatten()}
    for name, weight in decoder.named_parameters():
        if weight.grad is not None:
            gradient = weight.grad.float().cpu().flatten()
            name = re.sub(r"\d+", "*", name) if gradient.numel() < FEW else name
            found[name] = torch.cat([found[name], gradient]) if name in found else gradient
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking", "ssmax_norm", "stickbreaking_norm"])
def test_compiling_and_recomputing_change_no_gradient(
    core: str, recompute: Recompute, compiled: bool, groups: Groups
) -> None:
    """Compiled code fuses, and so rounds to bf16 in other places. Its errors are about those of what is not compiled.

    Where SSMax sharpens the attention of normalized q and k, bf16 alone changes gradients by several percent.
    """
    exact = gradients(core, groups, False, Recompute.none, "cpu")
    plain = gradients(core, groups, False, Recompute.none)
    other = gradients(core, groups, compiled, recompute)
    assert exact.keys() == plain.keys() == other.keys()
    for name, expected in exact.items():
        error, usual = (other[name] - expected).norm(), (plain[name] - expected).norm()
        assert error <= 1.5 * usual + 0.005 * expected.norm(), (name, error / usual)
