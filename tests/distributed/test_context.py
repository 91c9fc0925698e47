"""A ring of stick-breaking attention ends when all sticks are spent."""

from typing import Any

import pytest
import torch

from kernels.stickbreaking import stickbreaking_reference
from ssscale.layout import PackedLayout
from ssscale.parallel import stickbreaking_ring
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
