"""Muon takes torch.optim.Muon's steps, and the same ones in every parallel layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from tests.optim.muon_jobs import GIVEN, SMALL, TORCH
from tests.pool import Pool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, arguments
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "dp2": (2, {}),
    "overlap2": (2, {"overlap": True}),
    "ulysses2": (2, {"ulysses": 2}),
    "ring2": (2, {"ring": 2}),
    "tp2dp2": (4, {"tensor": 2}),
}


@pytest.fixture(scope="module")
def pools(pool1: Pool, pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {1: pool1, 2: pool2, 4: pool4}


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What the newest checkpoint has, by state and weight, without the vocabulary's padding."""
    reader = CheckpointReader(list_checkpoints(folder)[-1])
    found: dict[str, dict[str, Tensor]] = {"weight": {}, "exp_avg": {}}
    for state, values in found.items():
        for name in reader.weights:
            whole = reader.whole(name, state)
            values[name] = whole[: SMALL.vocab_size] if "embedding" in name or "head" in name else whole
    return found


@pytest.fixture(scope="module")
def by_torch(pool1: Pool) -> dict[str, dict[str, Tensor]]:
    return pool1.run(TORCH)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_gradients_change_weights_as_torch_does(
    layout: str, pools: dict[int, Pool], by_torch: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Three steps, in every bit: also where a rank has only parts of a matrix, and where a weight stacks several."""
    size, arguments = LAYOUTS[layout]
    pools[size].run(GIVEN, save=str(tmp_path), **arguments)
    for state, values in saved(tmp_path).items():
        for name, value in values.items():
            expected = by_torch[state][name][: SMALL.vocab_size] if len(value) == SMALL.vocab_size else by_torch[state][name]
            print(state, name, (value-expected).abs().max().item())
            assert torch.equal(value, expected), (state, name)
