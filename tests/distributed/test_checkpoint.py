"""A checkpoint gives back the run: to the last bit in the same layout, to rounding in any other."""

from pathlib import Path
from typing import Any

import pytest

from ssscale.errors import UserError
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from tests.distributed.jobs import TRAIN
from tests.distributed.matrix import Layout
from tests.models import MODELS
from tests.pool import Pool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, arguments
    "one_z1": (1, {}),
    "one_z3": (1, {"zero": 3}),
    "tp2sp_z1": (2, {"tensor": 2, "sequence": True}),
    "dp2_z0": (2, {"zero": 0}),
    "dp2_z1": (2, {"zero": 1}),
    "dp2_z2": (2, {"zero": 2}),
    "dp2_z3": (2, {"zero": 3}),
}


def run(layout: str, pools: dict[int, Pool], model: str, **arguments: Any) -> dict[str, Any]:
    size, more = LAYOUTS[layout]
    return pools[size].run(TRAIN, model=MODELS[model], **more, **arguments)[0]


@pytest.fixture(scope="module")
def pools(pool1: Pool, pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {1: pool1, 2: pool2, 4: pool4}


@pytest.mark.parametrize("layout", ["one_z1", "tp2sp_z1", "dp2_z0", "dp2_z1", "dp2_z2", "dp2_z3"])
def test_resuming_in_the_same_layout_changes_no_bit(layout: str, pools: dict[int, Pool], tmp_path: Path) -> None:
    whole = run(layout, pools, "ssmax", steps=4)
    run(layout, pools, "ssmax", steps=2, save=str(tmp_path))
    rest = run(layout, pools, "ssmax", steps=2, first_step=2, load=str(tmp_path))
    assert rest["losses"] == whole["losses"][2:]
    assert rest["norms"] == whole["norms"][2:]


def layout(
    processes: int, zero: int, tensor: int = 1, context: str = "1", sequence: bool = False, variant: int = 0
) -> Layout:
    return Layout(processes, tensor, sequence, context, zero, 1, "ssmax", variant, "none")


MOVES = [
    (layout(2, 1, tensor=2), layout(1, 3)),
    (layout(4, 2, tensor=2, sequence=True), layout(4, 3, context="ring4")),
    (layout(4, 3, context="ring2"), layout(4, 1, tensor=4, sequence=True)),
    (layout(4, 0), layout(4, 2, tensor=2, context="ulysses2")),
    (layout(4, 1, context="ulysses2_ring2"), layout(2, 0)),
    (layout(1, 1), layout(4, 3, tensor=2, context="ring2")),
    (layout(4, 3, tensor=4), layout(2, 2, context="ulysses2")),
    (layout(2, 3), layout(2, 1, tensor=2, sequence=True)),
    (layout(2, 2, context="ring2"), layout(1, 1)),
    (layout(2, 0, tensor=2), layout(4, 3)),
    # with biases
    (layout(2, 1, tensor=2, variant=1), layout(2, 3, variant=1)),
    (layout(2, 3, variant=1), layout(4, 2, tensor=2, sequence=True, variant=1)),
]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
def test_a_checkpoint_moves_between_layouts(
    source: Layout, target: Layout, pools: dict[int, Pool], tmp_path: Path
) -> None:
    job = "tests.distributed.matrix_jobs:train"
    whole = pools[source.processes].run(job, layout=source, steps=5, save=str(tmp_path), at=(2,))[0]
    rest = pools[target.processes].run(job, layout=target, first=2, steps=3, load=str(tmp_path))[0]
    assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)


def test_only_safetensors_and_json_are_written_and_damage_is_named(pool1: Pool, tmp_path: Path) -> None:
    pool1.run(TRAIN, model=MODELS["ssmax"], steps=1, save=str(tmp_path))
    (checkpoint,) = list_checkpoints(tmp_path)
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}
    weights = checkpoint / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    reader = CheckpointReader(checkpoint)
    with pytest.raises(UserError, match=r"rank-00000\.safetensors is broken"):
        reader.whole("norm.weight", "weight")
    (checkpoint / "rank-00000.json").unlink()
    with pytest.raises(UserError, match="not a whole checkpoint"):
        CheckpointReader(checkpoint)


def test_a_checkpoint_of_another_model_is_refused(pool1: Pool, tmp_path: Path) -> None:
    pool1.run(TRAIN, model=MODELS["ssmax"], steps=1, save=str(tmp_path))
    with pytest.raises(RuntimeError, match="is of another model"):
        pool1.run(TRAIN, model=MODELS["softmax"], steps=1, load=str(tmp_path))
