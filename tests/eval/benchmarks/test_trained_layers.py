"""What the benchmark of trained models takes from a model, and how it counts live tiles."""

import math

import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_reference

from eval.benchmarks.trained_layers import KEYS, ROWS, THRESHOLD, capture, count_tiles
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from tests.models import MODELS, packed

LENGTHS = [7, 1, 24]


@pytest.fixture
def model(groups):
    decoder = Decoder(MODELS["stickbreaking"], groups, sum(LENGTHS))
    initialize_weights(decoder, MODELS["stickbreaking"], groups, seed=1)
    return decoder.eval().requires_grad_(False)


@pytest.fixture
def batch():
    return packed(LENGTHS)


def loss_moved(model, batch, number, direction, step):
    """The mean loss after `step` · `direction` is added to the attention output of layer `number`."""
    attention = model.blocks[number].attention
    plain = type(attention).attend
    attention.attend = lambda *inputs: plain(attention, *inputs) + step * direction
    try:
        return float(model(*batch).double().mean())
    finally:
        del attention.attend


def test_captured_layers_are_those_of_the_model(model, batch):
    """dO against differences of the loss, and q, k and v by the outputs that they give."""
    layers = capture(model, batch[0], batch[2], batch[1])
    assert [len(layer) for layer in layers] == [4, 4]
    for number, (q, k, v, grad) in enumerate(layers):
        direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(number))
        up, down = (loss_moved(model, batch, number, direction, sign * 1e-2) for sign in (1, -1))
        assert (up - down) / 2e-2 == pytest.approx(float((grad * direction).sum()), rel=2e-2)
        scale = model.blocks[number].attention.scale or q.shape[-1] ** -0.5
        found = []
        attention = model.blocks[number].attention
        attention.attend = lambda *x, a=attention, found=found: found.append(type(a).attend(a, *x)) or found[-1]
        model(*batch)
        del attention.attend
        wanted = torch.cat(
            [stickbreaking_reference(*x, scale=scale)[0] for x in zip(*(y.split(LENGTHS) for y in (q, k, v)))]
        )
        torch.testing.assert_close(found[0].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_capture_leaves_the_model_as_it_was(model, batch):
    capture(model, batch[0], batch[2], batch[1])
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert all("attend" not in vars(block.attention) for block in model.blocks)


def count_slowly(q, k, length, scale):
    live = visible = 0
    for first in range(0, q.shape[0], length):
        for head in range(q.shape[1]):
            of_keys = head // (q.shape[1] // k.shape[1])
            for top in range(0, length, ROWS):
                for left in range(0, length, KEYS):
                    pairs = [(j, left) for j in range(top, min(top + ROWS, length)) if left < j]
                    visible += bool(pairs)
                    for j, _ in pairs:
                        nearer = k[first + left + KEYS : first + j, of_keys].double() @ q[first + j, head].double()
                        spent = float(torch.nn.functional.softplus(scale * nearer).sum())
                        if math.exp(-spent) >= THRESHOLD:
                            live += 1
                            break
    return live / visible


@pytest.mark.parametrize("own", [False, True])
def test_live_tiles_against_a_loop(own):
    """With `own`, a query would spend all of its stick on its own key, and spends little on the others."""
    torch.manual_seed(5)
    q, k, scale = 0.3 * torch.randn(2 * 300, 4, 8), torch.randn(2 * 300, 2, 8), 0.4
    if own:
        k = torch.nn.functional.normalize(k, dim=-1)
        q, scale = 30 * k.repeat_interleave(2, 1), 1.0
        k, q = torch.cat([k, torch.ones(600, 2, 1)], 2), torch.cat([q, torch.full((600, 4, 1), -14.0)], 2)
    found = count_tiles(q, k, 300, scale)
    assert 0 < found.live < 1
    assert found.live == pytest.approx(count_slowly(q, k, 300, scale), abs=1e-9)
    assert sorted(found.faint) == list(found.faint)
