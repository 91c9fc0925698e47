"""The update in one pass gives the results of DeepSpeed's own update and of plain torch, on CPUs with gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ssscale_kernels.adamw import FlatAdamW
from torch.utils._python_dispatch import TorchDispatchMode

from ssscale.config import load_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.optim.adamw import AdamW
from ssscale.optim.base import Optimizer, in_one_pass
from ssscale.parallel.groups import Groups
from ssscale.train.build import log_choices
from ssscale.train.estimate import memory_per_gpu
from tests.models import MODELS
from tests.pool import Pool
from tests.train.update_jobs import LR, PLAIN, REPLACED, TRAIN

MODEL = MODELS["ssmax"]
ONCE, FEWER = (4, 4, 4), (2, 2, 2)  # rows per microbatch, of 4 rows per step
Result = dict[str, Any]


def both(pool: Pool, **arguments: Any) -> list[tuple[Result, Result]]:
    """The results of each rank, by DeepSpeed's own step and in one pass."""
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


class Reads(TorchDispatchMode):
    """Counts the tensors that the host reads as numbers. On a GPU, it waits for all that was launched before."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_launches_a_step_without_reading_anything(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["config=tiny_ssmax", "train.batch_size=1", "train.microbatch=1", "train.precision=bf16"])
    decoder = Decoder(config.model, groups, 64, dtype=torch.bfloat16)
    engine = DeepSpeedEngine(decoder, config, groups)
    engine.set_batch_size(1, 1)
    tokens, layout = torch.arange(64), PackedLayout.from_lengths([64])
    assert engine.update is not None
    engine.forward_backward(tokens, layout, tokens.roll(-1), 64)
    engine.step(LR)  # the first step reads how many there were before
    engine.forward_backward(tokens, layout, tokens.roll(-1), 64)
    monkeypatch.setattr(FlatAdamW, "update", lambda *_: None)  # reads the factor on a CPU
    with Reads() as reads:
        engine.update.step()
    assert reads.count == 0


@pytest.mark.parametrize("microbatch", [4, 2])
def test_a_weight_without_a_gradient_decays(pool1: Pool, microbatch: int) -> None:
    """Not clipped, because the norm counts its zeros, which changes the order of the sum."""
    arguments = {"microbatches": (microbatch,) * 3, "unused": "blocks.1.mlp.down.weight", "fp32_reduction": True}
    ((before, after),) = both(pool1, clip=1e9, **arguments)
    assert_same(before, after)


@pytest.mark.parametrize("microbatches", [ONCE, (1, 4, 2)])
def test_losses_are_those_of_plain_torch(pool1: Pool, microbatches: tuple[int, ...]) -> None:
    """A loop with torch's AdamW on fp32 masters, without DeepSpeed and without the kernels' code.

    A last bit of a master rarely changes a bf16 weight, so losses differ by less than one in 10^5.
    """
    (ours,) = pool1.run(TRAIN, model=MODEL, microbatches=microbatches)
    (torchs,) = pool1.run(PLAIN, model=MODEL, microbatches=microbatches)
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-4)
    found = {key.split()[1]: x for key, x in ours["state"].items() if key.startswith("weight ")}
    assert found.keys() == torchs["state"].keys()
    for name, master in torchs["state"].items():
        # In units of three steps of lr: Adam makes whole steps of gradients that are rounding errors.
        apart = (found[name] - master.flatten()).abs() / (3 * LR)
        assert apart.mean() < 1e-4, name


@pytest.mark.parametrize(("processes", "tensor"), [(1, 1), (2, 1), (2, 2)])
def test_resuming_gives_the_bits_of_never_stopping(
    pool1: Pool, pool2: Pool, tmp_path: Path, processes: int, tensor: int
) -> None:
    pool, folder = {1: pool1, 2: pool2}[processes], str(tmp_path)
    straight = pool.run(TRAIN, model=MODEL, tensor=tensor, microbatches=(2, 1, 2, 1))
    pool.run(TRAIN, model=MODEL, tensor=tensor, microbatches=(2, 1), save=folder)
    resumed = pool.run(TRAIN, model=MODEL, tensor=tensor, microbatches=(2, 1), first_step=2, load=folder)
    for whole, later in zip(straight, resumed, strict=True):
        assert whole["losses"][2:] == later["losses"]
        assert whole["norms"][2:] == later["norms"]
        assert_same(whole | {"losses": []}, later | {"losses": []})


@pytest.mark.parametrize("first", [False, True])
def test_checkpoints_are_those_of_deepspeeds_step(pool1: Pool, tmp_path: Path, first: bool) -> None:
    (straight,) = pool1.run(TRAIN, model=MODEL, one_pass=first, microbatches=(4, 4, 4))
    folder = str(tmp_path)
    pool1.run(TRAIN, model=MODEL, one_pass=first, microbatches=(4, 4), save=folder)
    (resumed,) = pool1.run(TRAIN, model=MODEL, one_pass=not first, microbatches=(4,), first_step=2, load=folder)
    assert straight["losses"][2:] == resumed["losses"]
    assert_same(straight | {"losses": []}, resumed | {"losses": []})


def test_a_used_engine_takes_a_restored_state(pool1: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool1.run(TRAIN, model=MODEL, microbatches=(4, 4), save=folder)
    arguments = {"model": MODEL, "microbatches": (4,), "first_step": 2, "load": folder}
    (fresh,), (used,) = (pool1.run(TRAIN, again=again, **arguments) for again in (False, True))
    assert_same(fresh, used)


class Other(AdamW):
    """Its `make` might return another optimizer."""


@pytest.mark.parametrize(("stage", "bf16"), [(1, True), (1, False), (2, True), (3, True), (0, False)])
def test_the_configuration_decides(pool1: Pool, stage: int, bf16: bool) -> None:
    assert pool1.run(REPLACED, model=MODEL, stage=stage, bf16=bf16) == [stage == 1 and bf16]
    config = load_config(["config=tiny_ssmax", f"parallel.zero_stage={stage}"])
    assert in_one_pass(config, bf16) == (stage == 1 and bf16)


def test_other_optimizers_update_weights_themselves() -> None:
    assert AdamW().one_pass
    assert not Other().one_pass
    assert not Optimizer().one_pass


@pytest.mark.parametrize(
    ("bf16", "how"),
    [
        (True, "clipping, step and rounding to bf16 in one pass"),
        (False, "the torch optimizer's step, which DeepSpeed calls"),
    ],
)
def test_the_log_says_who_updates(bf16: bool, how: str, groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ssscale")
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = load_config(["config=tiny_ssmax"])
    log_choices(Decoder(config.model, groups, 24), config, groups, dtype)
    assert [line for line in caplog.messages if line.startswith("optimizer ")] == [f"optimizer adamw: {how}"]


def test_the_estimate_leaves_out_the_fp32_sums() -> None:
    def gradients(*keys: str) -> float:
        config = load_config(["config=1b_softmax", "train.microbatch=4", *keys])
        return memory_per_gpu(config, 1).gradients

    four = "train.batch_size=4"
    parameters = 1_208_083_968
    assert gradients(four) == 2 * parameters
    assert gradients() == gradients(four, "train.microbatch=2") > 4 * parameters
    assert gradients(four, "train.precision=fp32") > 4 * parameters
