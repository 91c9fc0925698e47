"""Every parallel layout of matrix.csv trains as one process does: losses, gradients and weights, in fp32."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed import matrix
from tests.distributed.matrix import Layout
from tests.pool import Pool

LAYOUTS = matrix.read()
JOBS = "tests.distributed.matrix_jobs"
FAST = [layout for layout in LAYOUTS if layout.processes <= matrix.FAST]
SLOW = [layout for layout in LAYOUTS if layout.processes > matrix.FAST]

Saved = Callable[[Layout], dict[str, Any]]


@pytest.fixture(scope="module")
def pool8() -> Iterator[Pool]:
    """Eight gloo processes; they start at the first job."""
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def saved(pool1: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What one process found: losses, norms, and a folder with its checkpoints after steps 1 and 3."""

    @functools.cache
    def train(core: str, variant: int) -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp(f"{core}{variant}"))
        layout = Layout(1, 1, False, "1", 1, 1, core, variant, "none")
        return pool1.run(f"{JOBS}:train", layout=layout, save=folder, at=(1, 3))[0] | {"folder": folder}

    return lambda layout: train(layout.core, layout.variant)


def check(found: dict[str, Any], one: dict[str, Any], layout: Layout) -> None:
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-6)
    if layout.zero > 0:  # DeepSpeed's stage 0 says no gradient norm
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert found["gradients"].keys() == found["changes"].keys()
    for name, error in found["gradients"].items():
        assert error <= 1e-5, name
    for name, error in found["changes"].items():
        assert error <= 1e-4, name


@pytest.mark.parametrize("layout", FAST, ids=str)
def test_a_layout_trains_like_one_process(layout: Layout, saved: Saved, pool2: Pool, pool4: Pool) -> None:
    one, pool = saved(layout), {2: pool2, 4: pool4}[layout.processes]
    for found in pool.run(f"{JOBS}:compare", layout=layout, saved=one["folder"]):
        check(found, one, layout)


@pytest.mark.parametrize("layout", [x for x in FAST if x.zero == 1 and x.processes > x.tensor], ids=str)
def test_a_layout_with_overlap_trains_like_one_process(layout: Layout, saved: Saved, pool2: Pool, pool4: Pool) -> None:
    one, pool = saved(layout), {2: pool2, 4: pool4}[layout.processes]
    for found in pool.run(f"{JOBS}:compare", layout=layout, saved=one["folder"], overlap=True):
        check(found, one, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW, ids=str)
def test_eight_processes_train_like_one(layout: Layout, saved: Saved, pool8: Pool) -> None:
    one = saved(layout)
    for found in pool8.run(f"{JOBS}:compare", layout=layout, saved=one["folder"], timeout=600.0):
        check(found, one, layout)


def test_the_list_covers_what_it_says() -> None:
    for most, layouts in ((matrix.FAST, FAST), (matrix.SLOW, LAYOUTS)):
        possible = set().union(*map(matrix.pairs, matrix.every(most)))
        assert set().union(*map(matrix.pairs, layouts)) == possible
    assert set(LAYOUTS) <= set(matrix.every(matrix.SLOW))
    triples = itertools.product(("softmax", "ssmax", "stickbreaking"), matrix.CONTEXT, (1, 2, 4))
    possible = {
        (core, context, tensor)
        for core, context, tensor in triples
        if tensor < 4 or ("4" not in context and context != "ulysses2_ring2")
    }
    assert set(map(matrix.triple, LAYOUTS)) == possible
