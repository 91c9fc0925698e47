"""Which row blocks leave the range of the fast algebra."""

import math

import pytest
import torch

from eval.benchmarks.stickbreaking_range import BITS, blocks_beyond

EIGHT = math.log(2**8 - 1)  # a logit with which a key spends 8 bits of the stick, and 16 keys 128
LOW = -30.0


def shares(logits: torch.Tensor) -> list[tuple[float, ...]]:
    return list(blocks_beyond(torch.ones(len(logits), 2, 1), logits.view(-1, 1, 1), len(logits), 1.0))


def test_rows_that_are_dead_do_not_leave_the_range_far_away() -> None:
    any_row, live, far = shares(torch.full((256,), EIGHT))
    assert any_row == live == (1.0,) * len(BITS)
    assert far == (0.0,) * len(BITS)


def test_a_far_group_concerns_the_blocks_beyond_two_tiles() -> None:
    logits = torch.full((256,), LOW)
    logits[:16] = EIGHT
    any_row, live, far = shares(logits)
    assert any_row == live == (1.0,) * len(BITS)
    assert far == (0.5,) * len(BITS)


def test_dead_rows_count_where_the_block_goes_on() -> None:
    """The last row of a block spends its stick at once and the others none, and then 16 keys spend 128 bits."""
    q = torch.zeros(192, 1, 2)
    q[:, 0, 0], q[191, 0, 1] = 1.0, 1.0
    k = torch.zeros(192, 1, 2)
    k[:, 0, 0], k[:, 0, 1] = LOW, EIGHT - LOW
    any_row, live, far = blocks_beyond(q, k, 192, 1.0)
    assert any_row == live == pytest.approx((1 / 3,) * len(BITS))
    assert far == (0.0,) * len(BITS)


def test_quiet_keys_stay_in_the_range() -> None:
    assert shares(torch.zeros(128)) == [(0.0,) * len(BITS)] * 3
