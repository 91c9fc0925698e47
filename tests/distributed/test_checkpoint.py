"""A checkpoint gives back the run: to the last bit in the same layout, to rounding in any other."""

from pathlib import Path
from typing import Any

import pytest

from ssscale.errors import UserError
from ssscale.train.checkpoint import CheckpointReader, list_checkpoints
from tests.distributed.test_training import MODELS, TRAIN
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
def pools(pool1: Pool, pool2: Pool) -> dict[int, Pool]:
    return {1: pool1, 2: pool2}


@pytest.mark.parametrize("layout", ["one_z1", "tp2sp_z1", "dp2_z0", "dp2_z1", "dp2_z2", "dp2_z3"])
def test_resuming_in_the_same_layout_changes_no_bit(layout: str, pools: dict[int, Pool], tmp_path: Path) -> None:
    whole = run(layout, pools, "ssmax", steps=4)
    run(layout, pools, "ssmax", steps=2, save=str(tmp_path))
    rest = run(layout, pools, "ssmax", steps=2, first_step=2, load=str(tmp_path))
    assert rest["losses"] == whole["losses"][2:]
    assert rest["norms"] == whole["norms"][2:]


MOVES = [
    ("tp2sp_z1", "one_z3"),
    ("dp2_z3", "tp2sp_z1"),
    ("dp2_z2", "one_z1"),
    ("one_z1", "dp2_z2"),
    ("dp2_z1", "dp2_z3"),
]


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_checkpoint_moves_between_layouts(source: str, target: str, pools: dict[int, Pool], tmp_path: Path) -> None:
    whole = run(source, pools, "ssmax", steps=4)
    run(source, pools, "ssmax", steps=2, save=str(tmp_path))
    rest = run(target, pools, "ssmax", steps=2, first_step=2, load=str(tmp_path))
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
