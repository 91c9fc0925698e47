"""One bit that differs between two copies of a weight is found, and named."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ssscale.errors import Stop
from ssscale.train.hooks.guard import bit_sum, check_copies, without_gradient
from tests.distributed.matrix import Layout
from tests.distributed.matrix_jobs import make_engine, train_step
from tests.pool import Pool


def flip(weight: Tensor, bit: int) -> None:
    weight.detach().flatten()[-1:].view(torch.int32).bitwise_xor_(1 << bit)


def verdicts(layout: Layout, planted: list[tuple[str, int]]) -> list[str | None]:
    """What the guard says of a trained model, and after a bit is flipped in each of these weights on that rank (and back)."""
    engine, groups = make_engine(layout)
    train_step(engine, groups, 0)
    found: list[str | None] = []
    for name, rank in [("", -1), *planted]:
        weight = {n: w for n, w, _ in engine.copies()}.get(name)
        if groups.rank == rank:
            assert weight is not None
            flip(weight, len(found))
        try:
            check_copies(engine, groups, 7)
            found.append(None)
        except Stop as stop:
            found.append(str(stop))
        if groups.rank == rank and weight is not None:
            flip(weight, len(found) - 1)
    return found


JOB = "tests.distributed.test_guard:verdicts"
ROWS: list[tuple[dict[str, Any], list[tuple[str, int]], list[str]]] = [
    (  # all four have the norm, ranks 0 and 2 one half of the matrix
        {"tensor": 2, "zero": 0},
        [("norm.weight", 3), ("blocks.1.mlp.down.weight", 2)],
        [
            "step 7: norm.weight on rank 3 differs from that on ranks 0, 1, 2:",
            "step 7: blocks.1.mlp.down.weight differs between ranks 0, 2:",
        ],
    ),
    (
        {"context": "ring4", "zero": 1},
        [("embedding.weight", 1)],
        ["step 7: embedding.weight on rank 1 differs from that on ranks 0, 2, 3:"],
    ),
    (  # two halves of the norm, each on two ranks
        {"tensor": 2, "context": "ulysses2", "zero": 3},
        [("norm.weight", 1), ("blocks.0.attention_norm.weight", 2)],
        [
            "step 7: norm.weight differs between ranks 0, 1:",
            "step 7: blocks.0.attention_norm.weight differs between ranks 2, 3:",
        ],
    ),
]


@pytest.mark.parametrize(("options", "planted", "expected"), ROWS)
def test_a_flipped_bit_is_named(
    options: dict[str, Any], planted: list[tuple[str, int]], expected: list[str], pool4: Pool
) -> None:
    layout = Layout(4, 1, False, "1", 1, 1, "ssmax", 0, "none")._replace(**options)
    for found in pool4.run(JOB, layout=layout, planted=planted):
        assert found[0] is None  # before anything was planted
        assert len(found) == len(expected) + 1
        for sentence, start in zip(found[1:], expected):
            assert sentence is not None
            assert sentence.startswith(start)


def unreached(layout: Layout) -> tuple[list[str], list[str]]:
    """Weights without a gradient after a step of a model as it is, and of one with a part that lets none through."""
    found = []
    for cut in (False, True):
        engine, groups = make_engine(layout)
        if cut:
            mlp: Any = engine.module.get_submodule("blocks.1.mlp")
            whole = mlp.forward
            mlp.forward = lambda x, whole=whole: whole(x).detach()
        train_step(engine, groups, 0)
        found.append(without_gradient(engine, groups))
    return found[0], found[1]


@pytest.mark.parametrize(
    "options", [{"tensor": 2, "zero": 1}, {"zero": 0}, {"zero": 2, "context": "ring2"}, {"zero": 3}]
)
def test_weights_that_no_gradient_reaches_are_named(options: dict[str, Any], pool4: Pool) -> None:
    layout = Layout(4, 1, False, "1", 1, 1, "ssmax", 0, "none")._replace(**options)
    for whole, cut in pool4.run("tests.distributed.test_guard:unreached", layout=layout):
        assert whole == []
        assert cut == ["blocks.1.mlp_norm.weight", "blocks.1.mlp.gate_up.weight", "blocks.1.mlp.down.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    whole = torch.randn(size + 1).to(dtype)
    weight = whole[1:]  # on no multiple of eight bytes
    before = bit_sum(weight)
    assert before == bit_sum(weight.clone())
    words = weight.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    for bit in range(15 if dtype == torch.bfloat16 else 31):
        for place in {0, size // 2, size - 1}:
            words[place] ^= 1 << bit
            assert bit_sum(weight) != before
            words[place] ^= 1 << bit
