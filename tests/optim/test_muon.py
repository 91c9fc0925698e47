"""Muon takes torch.optim.Muon's steps, in every parallel layout, and goes on from a checkpoint of any."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssscale.config import load_config
from ssscale.config.schema import WidthConfig
from ssscale.engine.deepspeed import parameter_groups
from ssscale.engine.matrices import Matrix, owners
from ssscale.engine.muon import newton_schulz
from ssscale.errors import UserError
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.estimate import memory_per_gpu
from ssscale.validate import validate
from tests.models import CASES
from tests.optim.muon_jobs import GIVEN, MOVE, SMALL, STEPS, TORCH, TRAIN
from tests.pool import Pool
from tests.train.ranks import Ranks, running
from tests.train.same import compare

Saved = dict[str, dict[str, Tensor]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, arguments
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "dp2": (2, {}),
    "overlap2": (2, {"overlap": True}),
    "ulysses2": (2, {"ulysses": 2}),
    "ring2": (2, {"ring": 2}),
    "tp2dp2": (4, {"tensor": 2}),
    "within2": (4, {"overlap": True, "within": 2}),  # each rank's part is on another node, too
    "tp2within2": (4, {"tensor": 2, "overlap": True, "within": 2}),
}
PROJECTIONS = ("attention.qkv.weight", "attention.out.weight", "mlp.gate_up.weight", "mlp.down.weight")


@pytest.fixture(scope="module")
def pools(pool1: Pool, pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {1: pool1, 2: pool2, 4: pool4}


def run(job: str, pools: dict[int, Pool], layout: str, **arguments: Any) -> Any:
    size, own = LAYOUTS[layout]
    return pools[size].run(job, **own, **arguments)[0]


def saved(folder: Path) -> Saved:
    """What the newest checkpoint has, by state and weight, without the vocabulary's padding."""
    reader = CheckpointReader(list_checkpoints(folder)[-1])
    found: Saved = {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for state, values in found.items():
        for name in filter(lambda name: reader.has(name, state), reader.weights):
            whole = reader.whole(name, state)
            values[name] = whole[: SMALL.vocab_size] if name in ("embedding.weight", "head.weight") else whole
    return found


def unequal(a: Saved, b: Saved) -> list[tuple[str, str]]:
    assert all(a[state].keys() == b[state].keys() for state in a)
    return [(state, name) for state in a for name in a[state] if not torch.equal(a[state][name], b[state][name])]


@pytest.fixture(scope="module")
def by_torch(pool1: Pool) -> Saved:
    (found,) = pool1.run(TORCH)
    return {
        state: {name: value[: SMALL.vocab_size] if len(value) == 384 else value for name, value in values.items()}
        for state, values in found.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_gradients_change_weights_as_torch_does(
    layout: str, pools: dict[int, Pool], by_torch: Saved, tmp_path: Path
) -> None:
    """Three steps, in every bit: also where a rank has only parts of a matrix, and where a weight stacks several."""
    run(GIVEN, pools, layout, save=str(tmp_path))
    found = saved(tmp_path)
    kept = found.pop("exp_avg_sq")
    assert not [name for name in kept if name.endswith(PROJECTIONS)]
    assert unequal(found, by_torch) == []


def test_options_reach_the_step(pool1: Pool, pool4: Pool, by_torch: Saved, tmp_path: Path) -> None:
    """Without nesterov, and with weights in bf16, whose masters take the same steps in every layout."""
    (expected,) = pool1.run(TORCH, nesterov=False)
    pool1.run(GIVEN, save=str(tmp_path / "plain"), nesterov=False)
    found = saved(tmp_path / "plain")
    found.pop("exp_avg_sq")
    different = dict(unequal(found, by_torch))
    assert different
    for name, value in found["weight"].items():
        assert torch.equal(value[:300], expected["weight"][name][:300]), name
    for pool, folder, tensor in ((pool1, "one", 1), (pool4, "four", 2)):
        pool.run(GIVEN, save=str(tmp_path / folder), tensor=tensor, dtype=torch.bfloat16, momentum_dtype="bf16")
    assert unequal(saved(tmp_path / "one"), saved(tmp_path / "four")) == []
    momentum = saved(tmp_path / "one")["exp_avg"]["blocks.0.mlp.down.weight"]
    assert torch.equal(momentum, momentum.bfloat16().float())
    torch.testing.assert_close(momentum, by_torch["exp_avg"]["blocks.0.mlp.down.weight"], rtol=0.02, atol=1e-5)


def distance(a: Saved, b: Saved) -> float:
    """‖w − w'‖ / ‖w'‖ over the projections."""
    names = [name for name in a["weight"] if name.endswith(PROJECTIONS)]
    one, other = (torch.cat([found["weight"][name].flatten().double() for name in names]) for found in (a, b))
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_in_a_layout_differs_like_another_order_of_summation(
    dtype: str, pools: dict[int, Pool], tmp_path: Path
) -> None:
    """The other orders are those of one process that adds up 2, 4 or 8 microbatches, and that adds up products with
    weights in two halves, as tensor-parallel ranks do.

    Rounding flips some elements of the bf16 inputs of Newton-Schulz, so distances of both kinds scatter a little.
    """

    def train(layout: str, folder: str, **more: Any) -> tuple[list[float], Saved]:
        path = tmp_path / folder
        losses = run(TRAIN, pools, layout, save=str(path), newton_schulz_dtype=dtype, **more)["losses"]
        return losses, saved(path)

    losses, expected = train("one", "one")
    ways: dict[str, dict[str, Any]] = {f"in {n}": {"accumulation": n} for n in (2, 4, 8)} | {"halves": {"halves": True}}
    orders = [distance(train("one", name, **way)[1], expected) for name, way in ways.items()]
    rounding = {"fp32": 1e-7, "bf16": 2e-4}[dtype]
    assert 0 < max(orders) < rounding
    for layout in list(LAYOUTS)[1:]:
        found, weights = train(layout, layout)
        assert found == pytest.approx(losses, rel={"fp32": 1e-7, "bf16": 1e-5}[dtype]), layout
        assert distance(weights, expected) <= 1.25 * max(orders), (layout, orders)


@pytest.mark.parametrize("layout", ["one", "tp2dp2", "within2"])
def test_resuming_changes_no_bit(layout: str, pools: dict[int, Pool], tmp_path: Path) -> None:
    whole, half = str(tmp_path / "whole"), str(tmp_path / "half")
    options = {"momentum_dtype": "bf16"}
    straight = run(TRAIN, pools, layout, steps=4, save=whole, **options)
    run(TRAIN, pools, layout, steps=2, save=half, **options)
    rest = run(TRAIN, pools, layout, steps=2, first=2, load=half, save=half, **options)
    assert rest == {key: values[2:] for key, values in straight.items()}
    assert unequal(saved(tmp_path / "whole"), saved(tmp_path / "half")) == []


def test_a_checkpoint_moves_to_other_layouts(pools: dict[int, Pool], tmp_path: Path) -> None:
    run(TRAIN, pools, "tp2dp2", save=str(tmp_path / "tp2dp2"))
    before = "tp2dp2"
    for layout in ("dp2", "within2", "one", "overlap2", "tp2"):
        assert run(MOVE, pools, layout, load=str(tmp_path / before), save=str(tmp_path / layout)) == ""
        assert unequal(saved(tmp_path / before), saved(tmp_path / layout)) == [], layout
        before = layout


def test_adamw_needs_moments_that_muon_has_not_kept(pool1: Pool, tmp_path: Path) -> None:
    first, other = str(tmp_path / "first"), str(tmp_path / "other")
    pool1.run(TRAIN, save=first, steps=STEPS)
    (sentence,) = pool1.run(MOVE, load=first, save=other, name="adamw")
    assert "has no exp_avg_sq of blocks.0.attention.qkv.weight, which optimizer.name=adamw needs" in sentence
    pool1.run(TRAIN, save=other, steps=STEPS, name="adamw")
    assert pool1.run(MOVE, load=other, save=first, name="muon") == [""]


def test_a_killed_run_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    keys = [f"data.path={corpus}", "data.num_workers=0", "optimizer.name=muon", "train.save_every=2"]
    keys += ["train.max_steps=6", "train.keep=1", "train.guard_every=2", "optimizer.muon.momentum_dtype=bf16"]
    Ranks(keys, tmp_path / "plain").finish()
    with running(keys, tmp_path / "killed") as ranks:
        ranks.wait_for_step(3)
        ranks.kill()
    Ranks(keys, tmp_path / "killed").finish()
    compare(tmp_path / "plain", tmp_path / "killed")


def test_newton_schulz_brings_singular_values_close_to_1() -> None:
    torch.manual_seed(0)
    for rows, columns in ((24, 40), (40, 24)):
        matrix = torch.randn(rows, columns)
        values = torch.linalg.svdvals(newton_schulz(matrix, 5))
        assert 0.6 < values.min() <= values.max() < 1.3
        expected = torch.linalg.svd(matrix, full_matrices=False)
        polar = expected.U @ expected.Vh
        cosine = (newton_schulz(matrix, 5) * polar).sum() / polar.norm() / newton_schulz(matrix, 5).norm()
        assert cosine > 0.98
    assert newton_schulz(torch.zeros(3, 5), 5).eq(0).all()


def test_matrices_are_spread_by_cost() -> None:
    """Seven matrices in a block of 1b on 8 ranks: no rank has much more to compute than the mean."""
    block = [(1536, 1536)] * 4 + [(4096, 1536)] * 2 + [(1536, 4096)]
    matrices = [Matrix(rows, columns, 0, 1) for _ in range(40) for rows, columns in block]
    found = owners(matrices, 8)
    assert sorted(number for own in found for number in own) == list(range(len(matrices)))
    costs = [sum(matrices[number].cost for number in own) for own in found]
    assert max(costs) < 1.02 * sum(costs) / 8
    assert all(matrices[a].cost >= matrices[b].cost for own in found for a, b in pairwise(own))


def test_only_projections_are_matrices(groups: Groups) -> None:
    """FIRE's small networks have two dimensions, too; the divisor of the width is the root of AdamW's."""
    fire = next(model for name, model in CASES.items() if "fire" in name)
    model = replace(fire, width=WidthConfig(base_hidden_size=8))  # m_width = 4
    decoder = Decoder(model, groups, 24)
    names = {weight: name for name, weight in decoder.named_parameters()}
    assert [name for weight, name in names.items() if weight.dim() == 2 and "position_weights" in name]

    def divisors(*keys: str) -> dict[str, float]:
        config = replace(load_config(["config=tiny_softmax", "optimizer.name=muon"]), model=model)
        if keys:
            config = replace(config, model=replace(model, width=WidthConfig(8, matrix_lr_divisor=3.0)))
        made = parameter_groups(decoder, config)
        assert all(names[w].endswith(PROJECTIONS) == group["matrix"] for group in made for w in group["params"])
        return {names[weight]: 1 / group["lr_scale"] for group in made for weight in group["params"]}

    assert divisors()["blocks.0.mlp.down.weight"] == pytest.approx(2.0)
    assert divisors()["embedding.weight"] == 1.0
    assert divisors("given")["blocks.1.attention.qkv.weight"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("parallel.zero_stage=2", r"optimizer\.name=muon needs parallel\.zero_stage=1, not 2"),
        ("parallel.zero_stage=0 train.precision=fp32", r"optimizer\.name=muon needs parallel\.zero_stage=1, not 0"),
        ("parallel.zero_stage=3", r"optimizer\.name=muon needs parallel\.zero_stage=1, not 3"),
        ("optimizer.muon.mu=1", r"optimizer\.muon\.mu must be 0 or more and less than 1, not 1"),
        ("optimizer.muon.betas=[0.9,-1]", r"optimizer\.muon\.betas must be 0 or more and less than 1, not -1"),
        ("optimizer.muon.rms=0", r"optimizer\.muon\.rms must be greater than 0, not 0"),
        ("optimizer.muon.eps=-1", r"optimizer\.muon\.eps must be greater than 0, not -1"),
        ("optimizer.muon.newton_schulz_steps=0", r"optimizer\.muon\.newton_schulz_steps must be from 1 to 20, not 0"),
        ("optimizer.muon.momentum_dtype=fp8", r"optimizer\.muon\.momentum_dtype.*fp32.*bf16"),
    ],
)
def test_what_does_not_combine_is_refused(keys: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        validate(load_config(["config=tiny_ssmax", "optimizer.name=muon", *keys.split()]))


def test_the_estimate_counts_one_state_of_matrices() -> None:
    def optimizer(*keys: str) -> float:
        return memory_per_gpu(load_config(["config=1b_softmax", *keys]), 1).optimizer

    matrices, muon = 40 * (4 * 1536**2 + 3 * 1536 * 4096), "optimizer.name=muon"
    everything = 1_208_083_968
    assert optimizer() == 12 * everything
    assert optimizer(muon) == pytest.approx(12 * everything - 4 * matrices)
    assert optimizer(muon, "optimizer.muon.momentum_dtype=bf16") == pytest.approx(12 * everything - 6 * matrices)
