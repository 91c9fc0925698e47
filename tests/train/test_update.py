"""`optimizer.adamw.one_pass` gives the results of DeepSpeed's own update, on CPUs with gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.estimate import memory_per_gpu
from ssscale.validate import validate
from tests.models import MODELS
from tests.pool import Pool
from tests.train.update_jobs import REFUSAL, TRAIN

MODEL = MODELS["ssmax"]
ONCE, FEWER = (4, 4, 4), (2, 2, 2)  # rows per microbatch, of 4 rows per step
Result = dict[str, Any]


def both(pool: Pool, **arguments: Any) -> list[tuple[Result, Result]]:
    """The results of each rank, without and with one_pass."""
    arguments = {"model": MODEL, "microbatches": ONCE} | arguments
    return list(zip(*(pool.run(TRAIN, one_pass=one_pass, **arguments) for one_pass in (False, True)), strict=True))


def assert_same(before: Result, after: Result) -> None:
    for key in ("state", "weights"):
        assert before[key].keys() == after[key].keys()
        differ = [name for name in before[key] if not torch.equal(before[key][name], after[key][name])]
        assert not differ, (key, differ)
    assert before["losses"] == after["losses"]
    assert before["steps"] == after["steps"]


def test_one_microbatch_gives_the_same_bits_without_fp32_sums(pool1: Pool) -> None:
    ((before, after),) = both(pool1)
    assert_same(before, after)
    assert before["norms"] == after["norms"]
    assert min(before["norms"]) > 0.5, "nothing was clipped"
    assert min(before["sums"]) > 0 == max(after["sums"])


def test_several_microbatches_give_the_same_bits_as_unrounded_sums(pool1: Pool) -> None:
    """The number of microbatches also changes from step to step, and with it where gradients are kept."""
    ((before, after),) = both(pool1, microbatches=(1, 4, 2, 4), fp32_reduction=True)
    assert_same(before, after)
    assert before["norms"] == after["norms"]
    assert [size > 0 for size in after["sums"]] == [True, False, True, False]


def test_tensor_parallel_ranks_count_their_copies_once(pool2: Pool) -> None:
    for before, after in both(pool2, tensor=2):
        assert_same(before, after)
        assert before["norms"] == after["norms"]


@pytest.mark.parametrize("microbatches", [FEWER, (1, 2, 1)])
def test_data_parallel_ranks_update_their_partitions(pool2: Pool, microbatches: tuple[int, ...]) -> None:
    """Each rank adds up its own partition, so norms differ in the last bits, and clipped gradients with them."""
    for before, after in both(pool2, microbatches=microbatches, clip=1e9):
        assert_same(before, after)
        torch.testing.assert_close(before["norms"], after["norms"], rtol=1e-6, atol=0)
    for before, after in both(pool2, microbatches=microbatches[:1]):
        torch.testing.assert_close(before["state"], after["state"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("microbatches", [FEWER, (1, 1, 1)])
def test_nan_on_one_rank_skips_the_step_on_all(pool2: Pool, microbatches: tuple[int, ...]) -> None:
    """The step after the skipped one corrects biases as if the skipped one had not been."""
    for before, after in both(pool2, microbatches=microbatches, clip=0.0, broken=1):
        assert_same(before, after)
        assert before["norms"][1] == after["norms"][1] == torch.inf
        assert after["norms"][2] < torch.inf


@pytest.mark.parametrize("microbatch", [4, 2])
def test_a_weight_without_a_gradient_decays(pool1: Pool, microbatch: int) -> None:
    """Not clipped, because the norm counts its zeros, which changes the order of the sum."""
    arguments = {"microbatches": (microbatch,) * 3, "unused": "blocks.1.mlp.down.weight", "fp32_reduction": True}
    ((before, after),) = both(pool1, clip=1e9, **arguments)
    assert_same(before, after)


@pytest.mark.parametrize("first", [False, True])
def test_a_run_may_switch_it_at_a_checkpoint(pool1: Pool, tmp_path: Path, first: bool) -> None:
    (straight,) = pool1.run(TRAIN, model=MODEL, one_pass=first, microbatches=(4, 4, 4))
    folder = str(tmp_path)
    pool1.run(TRAIN, model=MODEL, one_pass=first, microbatches=(4, 4), save=folder)
    (resumed,) = pool1.run(TRAIN, model=MODEL, one_pass=not first, microbatches=(4,), first_step=2, load=folder)
    assert straight["losses"][2:] == resumed["losses"]
    assert_same(straight | {"losses": []}, resumed | {"losses": []})


def test_a_used_engine_takes_a_restored_state(pool1: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool1.run(TRAIN, model=MODEL, one_pass=True, microbatches=(4, 4), save=folder)
    arguments = {"model": MODEL, "microbatches": (4,), "first_step": 2, "load": folder}
    (fresh,), (used,) = (pool1.run(TRAIN, one_pass=True, again=again, **arguments) for again in (False, True))
    assert_same(fresh, used)


def test_what_it_cannot_update_is_refused(pool1: Pool) -> None:
    keys = ["config=tiny_ssmax", "optimizer.adamw.one_pass=true"]
    validate(load_config([*keys, "train.precision=bf16"]))
    with pytest.raises(UserError, match=r"optimizer\.adamw\.one_pass needs parallel\.zero_stage=1, not 2"):
        validate(load_config([*keys, "parallel.zero_stage=2"]))
    with pytest.raises(UserError, match=r"optimizer\.adamw\.one_pass needs train\.precision=bf16, not fp32"):
        validate(load_config([*keys, "train.precision=fp32"]))
    (sentence,) = pool1.run(REFUSAL, model=MODEL)
    assert sentence.startswith("UserError: optimizer.adamw.one_pass needs bf16 weights")


def test_the_estimate_leaves_out_the_fp32_sums() -> None:
    def gradients(*keys: str) -> float:
        config = load_config(["config=1b_softmax", "train.microbatch=4", *keys])
        return memory_per_gpu(config, 1).gradients

    on, four = "optimizer.adamw.one_pass=true", "train.batch_size=4"
    parameters = 1_208_083_968
    assert gradients(on, four) == 2 * parameters
    assert gradients(four) == gradients() == gradients(on) > 4 * parameters
