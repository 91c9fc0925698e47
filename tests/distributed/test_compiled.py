"""Blocks and read-out under torch.compile, shared between ranks: losses and every gradient as without it."""

import shutil
from dataclasses import replace

import pytest
import torch

from ssscale.config.schema import Recompute
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.context import share_of
from tests.distributed.compiled_models import TOKENS, make_model
from tests.distributed.jobs import regroup
from tests.pool import Pool

LENGTHS = [100, TOKENS - 100]
BACKEND = "inductor" if shutil.which("g++") else "aot_eager_decomp_partition"  # which is all but code generation


def differences(
    core: str, tensor: int, sequence: bool, ulysses: int, ring: int, recompute: Recompute
) -> dict[str, float]:
    """‖g − g'‖ / ‖g'‖ of every weight and of the losses, compiled beside not compiled. A job for the pool."""
    groups = regroup(tensor, ulysses, ring)
    model = replace(make_model(core, 2), vocab_size=250, tie_embeddings=True)
    tokens, layout = torch.arange(TOKENS), PackedLayout.from_lengths(LENGTHS)
    if groups.context_size > 1:
        tokens, layout = share_of(layout, 1, groups)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        decoder = Decoder(model, groups, TOKENS, dtype=torch.float32, sequence_parallel=sequence, recompute=recompute)
        initialize_weights(decoder, model, groups, 0)
        if compiled:
            decoder.compile_parts(BACKEND)
        losses = decoder(tokens % model.vocab_size, layout, (7 * tokens + 3) % model.vocab_size)
        losses.mean().backward()
        gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        found.append(gradients | {"losses": losses.detach()})
    plain, other = found
    assert plain.keys() == other.keys()
    return {name: float((other[name] - g).norm() / g.norm()) for name, g in plain.items()}


@pytest.mark.parametrize(
    ("core", "tensor", "sequence", "ulysses", "ring", "recompute"),
    [
        ("ssmax", 2, True, 1, 1, Recompute.none),
        ("ssmax_norm", 2, True, 1, 1, Recompute.none),
        ("stickbreaking", 2, False, 1, 1, Recompute.none),
        ("stickbreaking", 2, True, 1, 1, Recompute.full),
        ("softmax", 1, False, 1, 2, Recompute.none),
        ("stickbreaking", 1, False, 1, 2, Recompute.none),
        ("stickbreaking", 1, False, 1, 2, Recompute.full),
        ("ssmax", 1, False, 2, 1, Recompute.none),
    ],
)
def test_compiled_ranks_find_the_gradients_of_those_that_are_not(
    core: str, tensor: int, sequence: bool, ulysses: int, ring: int, recompute: Recompute, pool2: Pool
) -> None:
    """With torch 2.11 Dynamo traced Megatron-core's exchanges and let no gradient through them."""
    layout = {"tensor": tensor, "sequence": sequence, "ulysses": ulysses, "ring": ring, "recompute": recompute}
    for found in pool2.run("tests.distributed.test_compiled:differences", core=core, **layout):
        assert len(found) > 10
        for name, error in found.items():
            assert error <= 1e-5, name
