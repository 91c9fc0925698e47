"""Context parallelism changes nothing: losses and gradients are those of one process."""

import dataclasses
from typing import Any

import pytest
import torch

from ssscale.schema import Recompute
from tests.distributed.test_training import MODELS
from tests.pool import Pool

JOB = "tests.distributed.context_jobs:gradients"
NAMES = ("softmax", "ssmax", "stickbreaking", "stickbreaking_remainder")
WEIGHTS = {name: dataclasses.replace(MODELS[name], init_std=0.1) for name in NAMES}
# Row by row, and several rows at once.
MICROBATCHES = [[0], [1, 2], [3, 4]]

KNOWN: dict[str, Any] = {}


def one_process(pool1: Pool) -> dict[str, Any]:
    if not KNOWN:
        KNOWN.update(pool1.run(JOB, models=WEIGHTS, microbatches=MICROBATCHES)[0])
    return KNOWN


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() <= expected.keys()
    for model, ours in found.items():
        theirs = expected[model]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6), model
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in ours["gradients"].items():
            mine, other = torch.tensor(gradient), torch.tensor(theirs["gradients"][name])
            assert not mine.isnan().any(), (model, name)
            assert (mine - other).norm() <= 1e-5 * other.norm(), (model, name, (mine - other).norm() / other.norm())


TWO = {"ulysses2": {"ulysses": 2}, "ring2": {"ring": 2}}


@pytest.mark.parametrize("name", TWO)
def test_two_context_ranks(name: str, pool1: Pool, pool2: Pool) -> None:
    for found in pool2.run(JOB, models=WEIGHTS, microbatches=MICROBATCHES, **TWO[name]):
        check(found, one_process(pool1))


FOUR: dict[str, dict[str, Any]] = {
    "ring4": {"ring": 4},
    "ulysses2_ring2": {"ulysses": 2, "ring": 2},
    "tp2_sp_ring2": {"tensor": 2, "sequence": True, "ring": 2},
    "dp2_ring2_full": {"ring": 2, "recompute": Recompute.full},
    "dp2_ulysses2_selective": {"ulysses": 2, "recompute": Recompute.selective},
}


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name: str, pool1: Pool, pool4: Pool) -> None:
    for found in pool4.run(JOB, models=WEIGHTS, microbatches=MICROBATCHES, **FOUR[name]):
        check(found, one_process(pool1))


def test_selective_recomputation_in_a_ring(pool1: Pool, pool2: Pool) -> None:
    options = {"ring": 2, "recompute": Recompute.selective}
    for found in pool2.run(JOB, models=WEIGHTS, microbatches=MICROBATCHES, **options):
        check(found, one_process(pool1))
