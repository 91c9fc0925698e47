"""`train.fp8` in the engine: weights are cast once per step and never stale, in every layout; what is refused; the estimate."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ssscale.config import load_config
from ssscale.config.choices import Fp8
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.estimate import estimate, fp8_speedup
from ssscale.train.scale import Cluster, predict
from ssscale.validate import validate
from tests.pool import Pool
from tests.train.commands import run_command
from tests.train.fp8_jobs import SHARDS, TRAIN
from tests.train.jobs import SMALL

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(pool1: Pool) -> Train:
    """Trains on a single process."""
    return lambda **options: pool1.run(TRAIN, **options)[0]


@pytest.mark.parametrize(
    "options", [{}, {"evaluate": True}, {"recompute": "full"}, {"recipe": "tensorwise", "zero": 2}]
)
def test_weights_are_cast_once_per_step(options: dict[str, Any], train: Train) -> None:
    """Four microbatches per step. The bits are those of casts in each pass, with evaluations between steps as well."""
    once, always = train(**options), train(cache="always", **options)
    assert once["layers"] == 8
    assert once["casts"] == [8, 8, 8]
    assert always["casts"] == [32, 32, 32]
    for key in ("losses", "state", "evaluated"):
        assert once[key] == always[key], key
    if options.get("evaluate"):
        assert len(set(once["evaluated"])) == 3


def test_a_stale_cast_is_noticed(train: Train) -> None:
    """What the test above compares does differ if the casts of the first step are kept."""
    once, stale = train(), train(cache="stale")
    assert stale["casts"] == [8, 0, 0]
    assert stale["losses"][0] == once["losses"][0]
    assert stale["losses"][1:] != once["losses"][1:]
    assert stale["state"] != once["state"]


def test_resuming_equals_never_stopping(train: Train, tmp_path: Path) -> None:
    """`again`: the engine has trained on other weights before the checkpoint is loaded into it."""
    whole = train(steps=4)
    train(steps=2, save=str(tmp_path))
    for again in (False, True):
        rest = train(first=2, steps=2, load=str(tmp_path), again=again)
        assert rest["losses"] == whole["losses"][2:]
        assert rest["state"] == whole["state"]
    assert train(first=2, steps=2, load=str(tmp_path), again=True, cache="stale")["state"] != whole["state"]


def test_checkpoints_have_the_same_tensors(train: Train, tmp_path: Path) -> None:
    found = []
    for recipe in ("none", "rowwise"):
        train(recipe=recipe, steps=1, save=str(tmp_path / recipe))
        tensors = {}
        for file in sorted(list_checkpoints(tmp_path / recipe)[-1].rglob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    part = opened.get_slice(name)
                    tensors[file.name, name] = part.get_dtype(), part.get_shape()
        found.append(tensors)
    assert found[0]
    assert found[0] == found[1]
    resumed = train(recipe="none", first=1, steps=1, load=str(tmp_path / "rowwise"))
    assert 0 < resumed["losses"][0] < 10


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_bf16_dw"])
def test_products_on_two_ranks(recipe: str, sequence: bool, pool2: Pool) -> None:
    for kept in [False, True] if sequence else [False]:
        for found in pool2.run(SHARDS, recipe=recipe, sequence=sequence, keep_gathered=kept):
            assert len(found) == 6
            assert all(error < 5e-3 for error in found.values()), found


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True, "recompute": "selective"},
        {"tensor": 2, "recompute": "full"},
        {"tensor": 2, "sequence": True, "compiled": True},
        {"zero": 1, "microbatch": 1},
    ],
)
def test_two_ranks_train_like_one(layout: dict[str, Any], train: Train, pool2: Pool) -> None:
    """Tensor-parallel ranks have other scales of their shares. Replicas have the same, and only sum in another order."""
    alone = train()["losses"]
    for found in pool2.run(TRAIN, **layout):
        assert found["casts"] == [8, 8, 8]
        assert found["losses"] == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_hidden_exchange_is_waited_for_before_weights_are_cast(compiled: bool, pool2: Pool) -> None:
    """Results of `late` collectives are NaN until they are waited for."""
    wanted = pool2.run(TRAIN, overlap=True, way="open", compiled=compiled)
    late = pool2.run(TRAIN, overlap=True, way="late", compiled=compiled)
    for one, other in zip(wanted, late, strict=True):
        assert one["losses"] == other["losses"]
        assert one["state"] == other["state"]


def test_shards_within_nodes_are_waited_for_before_weights_are_cast(pool4: Pool) -> None:
    wanted, late = (pool4.run(TRAIN, overlap=True, way=way, within=2) for way in ("open", "late"))
    assert late == wanted
    undivided = pool4.run(TRAIN, overlap=True)
    assert late[0]["losses"] == pytest.approx(undivided[0]["losses"], rel=1e-3)


# Settings.


def config_of(*arguments: str, name: str = "1b_ssmax") -> Config:
    return load_config([f"config={name}", *arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train.fp8=rowwise", "train.precision=fp32"], "train.fp8=rowwise needs bf16 weights"),
        (["train.fp8=rowwise", "parallel.zero_stage=3"], "train.fp8=rowwise does not go with parallel.zero_stage=3"),
        (["train.fp8=rowwise", "train.compile=model"], "train.fp8=rowwise does not go with train.compile=model"),
        (
            ["train.fp8=rowwise", "parallel.tensor=2", "train.compile_exchanges=false"],
            "parallel.tensor=2 needs train.compile_exchanges=true",
        ),
        (
            ["train.fp8=rowwise", "parallel.tensor=2", "train.compile_exchanges=true", "parallel.overlap_gathers=true"],
            "does not go with parallel.overlap_gathers=true",
        ),
        (
            ["train.fp8=rowwise", "parallel.tensor=2", "train.compile_exchanges=true", "parallel.copy_engines=true"],
            "does not go with parallel.copy_engines=true",
        ),
        (["train.fp8_bf16_blocks=[0]"], "train.fp8_bf16_blocks=[0] has no effect under train.fp8=none"),
        (["train.fp8=rowwise", "train.fp8_bf16_blocks=[0,-99]"], "there is no block -99 in model.num_layers="),
        (["train.fp8=rowwise", "model.num_layers=2"], "leaves no block of model.num_layers=2 to train.fp8=rowwise"),
        (
            ["train.fp8=rowwise", "model.ffn_hidden_size=5000"],
            "model.ffn_hidden_size (5,000) gives 5000: change the size",
        ),
        (
            ["train.fp8=rowwise", "parallel.tensor=8", "train.compile_exchanges=true", "model.ffn_hidden_size=5568"],
            "model.ffn_hidden_size (5,568) gives 696 on each of parallel.tensor=8 ranks",
        ),
    ],
)
def test_what_does_not_combine_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        validate(config_of(*arguments), gpu=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["parallel.tensor=2", "train.compile_exchanges=true"],
        ["parallel.overlap=true"],
        ["parallel.zero_stage=2"],
        ["train.recompute=full"],
        ["train.fp8_bf16_blocks=[]"],
        ["parallel.ulysses=2"],
    ],
)
def test_what_combines(arguments: list[str]) -> None:
    validate(config_of("train.fp8=tensorwise", *arguments), gpu=True)


def test_a_run_on_a_cpu_is_refused_before_it_starts(corpus: Path, tmp_path: Path) -> None:
    own = [f"data.path={corpus}", f"run_dir={tmp_path}/run", "train.fp8=tensorwise", "train.fp8_bf16_blocks=[]"]
    small = [f"{key}={value}" for key, value in SMALL.items()]
    code, output = run_command("launch.pretrain", ["config=tiny_ssmax", *small, *own], tmp_path / "log")
    assert code == 2
    assert "train.fp8=tensorwise needs GPUs of compute capability 9.0 or newer" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "rows", "fp8", "speedup", "gib"),
    [
        ("1b_ssmax", 4, "none", 1.0, 56.0),
        ("1b_ssmax", 4, "tensorwise", 1.046, 49.7),
        ("1b_ssmax", 4, "rowwise_bf16_dw", 1.126, 58.0),
        ("3b_ssmax", 2, "none", 1.0, 91.0),
        ("3b_ssmax", 2, "tensorwise", 1.184, 89.1),
        ("3b_ssmax", 2, "rowwise_bf16_dw", 1.185, 97.1),
    ],
)
def test_the_estimate_agrees_with_an_h200(name: str, rows: int, fp8: str, speedup: float, gib: float) -> None:
    """Measured on 2026-11-28 (docs/results/options.md), the memory as the peak that torch allocated."""
    sizes = ["model.vocab_size=50304", f"train.microbatch={rows}", f"train.batch_size={16 * rows}"]
    config = load_config([f"config={name}", f"train.fp8={fp8}", *sizes])
    assert fp8_speedup(config) == pytest.approx(speedup, rel=0.005)
    assert gib <= estimate(config, 1, 0.4).memory.total / 2**30 <= 1.03 * gib


def test_the_estimate_counts_copies_and_gains() -> None:
    plain = config_of()
    layers = plain.model.num_layers
    size = plain.model.hidden_size * (plain.model.hidden_size * 4 + 3 * plain.model.ffn_hidden_size)  # of a block
    for blocks, changed in ((layers - 2, []), (layers, ["train.fp8_bf16_blocks=[]"])):
        config = config_of("train.fp8=tensorwise", *changed)
        more = estimate(config, 1, 0.4).memory.weights - estimate(plain, 1, 0.4).memory.weights
        assert more == 2 * blocks * size
        part = blocks * size / (layers * size + plain.model.vocab_size * plain.model.hidden_size)
        assert fp8_speedup(config) == pytest.approx(1 / (1 - 0.54 * part + 0.54 * part / 1.1))
        ratio = estimate(config, 1, 0.4).tokens_per_day / estimate(plain, 1, 0.4).tokens_per_day
        assert ratio == pytest.approx(fp8_speedup(config))
        given, cluster = replace(config, train=replace(config.train, microbatch=4)), Cluster(1, 1, 50e9, 141e9)
        without = replace(given, train=replace(given.train, fp8=Fp8.none))
        assert predict(without, cluster).compute / predict(given, cluster).compute == pytest.approx(ratio)
    assert fp8_speedup(plain) == 1.0
    assert fp8_speedup(config_of("train.fp8=rowwise")) == 1.0  # not measured
    assert fp8_speedup(config_of("train.fp8=tensorwise", "train.compile=none")) == 1.0  # casts would not be fused
