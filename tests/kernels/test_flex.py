"""FlexAttention's masks and biases against the exact path, in eager mode (compiled: tests/gpu/test_positions.py)."""

import dataclasses
import warnings

import pytest
import torch
from ssscale_kernels.flex import BLOCK, document_mask, table_entries
from torch.nn.attention.flex_attention import create_block_mask

from ssscale.config.schema import ModelConfig, position_config
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Attention
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import megatron_config

LENGTHS = [[1], [300], [127, 258, 126, 20], [128, 128], [5, 200, 1, 127, 130], [1, 1, 1, 400], [640]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 1000])
def test_block_mask_is_that_of_every_pair(lengths: list[int], window: int | None) -> None:
    layout = PackedLayout.from_lengths(lengths)
    size = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    reach = window or size

    def visible(b, h, q, k):
        return (document[q] == document[k]) & (k <= q) & (q - k < reach)

    ours = document_mask(layout.positions, window)
    theirs = create_block_mask(visible, None, None, size, size, device="cpu", BLOCK_SIZE=BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())  # blocks with anything in them
    index = torch.arange(size)
    pairs = ours.mask_mod(0, 0, index[:, None], index)
    assert torch.equal(pairs, visible(0, 0, index[:, None], index))
    # A full block skips the mask, so it must be full; which full blocks are not found only costs time.
    rows = -(-size // BLOCK) * BLOCK
    whole = torch.zeros(rows, rows, dtype=torch.bool)
    whole[:size, :size] = pairs
    whole[size:] = whole[size - 1]  # rows behind the end see what the last one does
    blocks = whole.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).all(3).all(1)
    for row, (count, which) in enumerate(zip(ours.full_kv_num_blocks[0, 0], ours.full_kv_indices[0, 0])):
        assert blocks[row][which[:count].long()].all()
        assert count == blocks[row].sum()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 129])
def test_entries_of_a_table(lengths: list[int], window: int | None) -> None:
    positions, longest, size = PackedLayout.from_lengths(lengths).positions, max(lengths), sum(lengths)
    table = torch.arange(2 * longest**2).view(2, longest, longest)
    entries, first = table_entries(table, positions)
    mask, index = document_mask(positions, window), torch.arange(size)
    at = first[:, None] + index
    shown = mask.mask_mod(0, 0, index[:, None], index)
    assert torch.equal(entries[1][at[shown]], table[1][positions[:, None], positions[None]][shown])
    read = mask.to_dense()[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:size, :size].bool()
    assert at[read].min() >= 0
    assert at[read].max() < entries.shape[1]


@pytest.fixture
def inputs() -> tuple[list[torch.Tensor], PackedLayout]:
    lengths = [7, 150, 1, 42]
    generator = torch.Generator().manual_seed(0)
    shape = [(200, 4, 16), (200, 2, 16), (200, 2, 16)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shape)
    return [q, k, v], PackedLayout.from_lengths(lengths)


@pytest.mark.parametrize("method", ["alibi", "fire"])
@pytest.mark.parametrize("window", [None, 33])
def test_flex_attention_is_the_exact_path(method, window, inputs, groups: Groups, monkeypatch) -> None:
    # It refuses gradients on CPUs, where compiled code has none; uncompiled they are there.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
    tensors, layout = inputs
    model = ModelConfig(num_heads=4, num_kv_heads=2, hidden_size=64, position=position_config(method, window=window))
    core = Attention(model, groups, megatron_config(groups, False, torch.float64), 0).double()
    learned = list(core.position_weights.parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in learned:
            weight.copy_(torch.rand(weight.shape, generator=generator) - 0.3)
    masked = dataclasses.replace(layout, block_mask=document_mask(layout.positions, window))
    upstream = torch.randn(200, 4, 16, generator=generator, dtype=torch.float64)
    found = []
    for some in (layout, masked):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that FlexAttention runs uncompiled
            out = core.attend(*tensors, some)
            with torch.no_grad():
                # Without gradients FIRE's MLP is computed inside FlexAttention.
                torch.testing.assert_close(core.attend(*tensors, some), out, rtol=0, atol=1e-5)
        wanted = [*tensors, *learned]
        found.append([out, *torch.autograd.grad(out, wanted, upstream)])
    for exact, ours in zip(*found):
        assert exact.isfinite().all()
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
