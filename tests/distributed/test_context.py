"""Which keys meet which queries on a ring, and that stick-breaking's ends when all sticks are spent."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_reference

from ssscale.layout import PackedLayout
from ssscale.parallel import softmax_ring, stickbreaking_ring
from ssscale.parallel.context import share_of
from ssscale.parallel.transfer import LineShift
from tests.distributed.jobs import regroup
from tests.pool import Pool

LENGTH, ROWS, SKIP = 64, 2, 2.0**-12


def attend(logit: float, skip_below: float) -> dict[str, Any]:
    """The largest errors of o and of the gradients on a ring of four, in float64, and the transfers that they took."""
    groups = regroup(1, 1, 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, ROWS * LENGTH, 2, 8, dtype=torch.float64, generator=generator)
    q, k = logit + 0.1 * q, 1 + 0.1 * k  # β is about σ(logit · √8)
    whole = PackedLayout.from_lengths([LENGTH] * ROWS)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, _ = stickbreaking_reference(*inputs, cu_seqlens_q=whole.cu_seqlens)
    expected.backward(grad)
    tokens, layout = share_of(whole, ROWS, groups)
    mine = [x[tokens].clone().requires_grad_() for x in (q, k, v)]
    count, original = [0, 0], LineShift.__init__

    def counted(self: LineShift, *arguments: Any, **more: Any) -> None:
        count[-1] += 1
        original(self, *arguments, **more)

    LineShift.__init__ = counted  # type: ignore[method-assign]
    try:
        o, _ = stickbreaking_ring.ring_stickbreaking(*mine, layout, groups, None, skip_below)
        count[0] = count[1]
        o.backward(grad[tokens])
    finally:
        LineShift.__init__ = original  # type: ignore[method-assign]
    errors = [(o - expected[tokens]).abs().max().item()]
    errors += [(x.grad - y.grad[tokens]).abs().max().item() for x, y in zip(mine, inputs, strict=True)]  # type: ignore[union-attr]
    return {"errors": errors, "forward": count[0], "backward": count[1] - count[0]}


JOB = "tests.distributed.test_context:attend"


@pytest.mark.parametrize(
    ("logit", "skip_below", "forward", "error"),
    [
        (1.0, 0.0, 7, 1e-12),  # seven steps along a line of eight chunks, whatever is left
        (1.0, SKIP, 1, SKIP),  # σ(2.8) = 0.94: a stick is spent within a chunk of eight keys
        (-1.0, SKIP, 7, 1e-12),  # σ(−2.8) = 0.06: never spent, and nothing is left out
    ],
)
def test_the_line_is_as_long_as_the_sticks(
    logit: float, skip_below: float, forward: int, error: float, pool4: Pool
) -> None:
    for found in pool4.run(JOB, logit=logit, skip_below=skip_below):
        assert max(found["errors"]) <= error
        assert found["forward"] == forward
        assert found["backward"] <= 2 * forward


def timeouts() -> list[float]:
    """Seconds after which the collectives of each group give up, in a layout that has all of them."""
    groups = regroup(1, 2, 2)
    found = [groups.tensor_group, groups.replica_group, groups.ulysses_group, groups.ring_group]
    backends = [group._get_backend(groups.device) for group in found if group is not None]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_group_waits_as_long_as_it_was_told(pool4: Pool) -> None:
    """`initialize` says ten minutes where nothing else is asked for; libraries have other times of their own."""
    assert pool4.run("tests.distributed.test_context:timeouts") == [[600.0] * 4] * 4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_rectangles_and_causal_parts_hold_every_pair_once(size: int, seed: int) -> None:
    """All pairs (query, key ≤ query of the same document), the keys of whichever rank they are on."""
    rows, length = 3, 8 * 2 * size
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    for _ in range(rows):
        cuts = torch.randperm(length - 1, generator=generator)[: seed // 2] + 1
        bounds = [0, *sorted(cuts.tolist()), length]
        lengths += [b - a for a, b in itertools.pairwise(bounds)]
    whole = PackedLayout.from_lengths(lengths)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    times = torch.zeros(rows * length, rows * length, dtype=torch.int64)
    shares = []
    for rank in range(size):
        groups: Any = SimpleNamespace(ring_size=size, ring_rank=rank, ulysses_size=1)
        shares.append(share_of(whole, rows, groups))
    for rank, (tokens, layout) in enumerate(shares):
        for a, b in itertools.pairwise(layout.cu_seqlens.tolist()):
            times[tokens[a:b, None], tokens[a:b]] += torch.ones(b - a, b - a, dtype=torch.int64).tril()
        assert layout.ring is not None
        for owner in range(size):
            seen = softmax_ring.rectangles(layout.ring, rank, owner)
            for queries, keys in seen.slices():
                assert queries.stop - queries.start <= seen.max_queries
                assert keys.stop - keys.start <= seen.max_keys
                times[tokens[queries, None], shares[owner][0][keys]] += 1
            if (rank - owner) % size > softmax_ring.num_steps(layout.ring, size):
                assert not seen
    i = torch.arange(rows * length)
    assert torch.equal(times, ((documents[:, None] == documents) & (i[:, None] >= i)).long())
