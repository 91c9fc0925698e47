"""Memory arithmetic against numbers worked out by hand, and the command."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import estimate as command
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.estimate import activation_bytes_per_token, estimate, logit_bytes, memory_per_gpu

ROOT = Path(__file__).resolve().parents[2]
N = 3_513_473_280


def test_days_and_tokens_of_3b():
    result = estimate(load_config(["config=3b_sb"]), gpus=64, mfu=0.4)
    flops = 6 * N + 12 * 40 * 2304 * 4096
    assert result.flops_per_token == flops
    assert result.tokens_per_day == pytest.approx(64 * 0.4 * 989e12 * 86_400 / flops)
    assert result.days == pytest.approx(1.25e12 / result.tokens_per_day)
    assert (result.parameters, result.tokens, result.steps) == (N, 1_250_000_000_000, 298_024)


def test_fire_needs_a_table():
    fire, alibi = (
        estimate(load_config([f"config=350m_{name}", "train.microbatch=16"]), gpus=8, mfu=0.4).memory.activations
        for name in ("fire", "alibi")
    )
    assert fire - alibi == 4 * (2 * 32 + 4 * 32) * 2048**2


def test_max_steps_bounds_the_budget():
    result = estimate(load_config(["config=3b_sb", "train.max_steps=100"]), gpus=64, mfu=0.4)
    assert (result.steps, result.tokens) == (100, 100 * 4_194_304)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        (1, 2 * N, 4 * N + 2 * 2304 * 50_304, 12 * N / 64),
        (2, 2 * N, 4 * N / 64 + 10**9, 12 * N / 64),
        (3, 2 * N / 64 + 2 * (4 * 2304**2 + 3 * 2304 * 9216), 4 * N / 64 + 2**26, 12 * N / 64),
    ],
)
def test_zero_stages(stage, weights, gradients, optimizer):
    memory = memory_per_gpu(load_config(["config=3b_sb", f"parallel.zero_stage={stage}"]), 64)
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, optimizer)
    assert memory.total == pytest.approx(
        weights + gradients + optimizer + memory.activations + memory.logits, rel=1e-12
    )


def test_gradients_of_one_microbatch_stay_in_bf16():
    def gradients(*keys):
        config = load_config(["config=3b_sb", "train.microbatch=1", "train.precision=bf16", *keys])
        return memory_per_gpu(config, 64).gradients

    one = "train.batch_size=64"
    assert gradients(one) == 2 * N
    assert gradients(one, "parallel.overlap=true") > 4 * N
    for key, more, slots in (("copy_engines", 2 * 63, 64 * 2**26), ("overlap_bf16", 4, 0)):
        assert gradients(one, "parallel.overlap=true", f"parallel.{key}=true") == 2 * N + more * N / 64 + slots
        several = gradients("train.batch_size=128", "parallel.overlap=true", f"parallel.{key}=true")
        assert several == 4 * N + 2 * 2304 * 50_304 + slots


def test_slots_of_copy_engines():
    """Two slots of 32 MiB for each rank of the exchange: all that hold the same weights, or those of a node."""

    def slots(*keys, per_node=8, gpus=64):
        plain, copied = (
            memory_per_gpu(load_config(["config=3b_sb", "parallel.overlap=true", *keys, *more]), gpus, per_node)
            for more in ([], ["parallel.copy_engines=true"])
        )
        assert (copied.weights, copied.optimizer, copied.logits) == (plain.weights, plain.optimizer, plain.logits)
        return copied.gradients - plain.gradients

    assert slots() == 64 * 2**26
    assert slots("parallel.shard_within=node") == 8 * 2**26
    assert slots("parallel.shard_within=node", "parallel.tensor=2") == 4 * 2**26
    assert slots(gpus=1) == 0


def test_shards_within_nodes():
    """Eight nodes of eight GPUs: each node holds all of the optimizer's state."""

    def memory(*keys, per_node=8):
        return memory_per_gpu(load_config(["config=3b_sb", "parallel.overlap=true", *keys]), 64, per_node)

    everywhere, node = memory(), memory("parallel.shard_within=node")
    assert (everywhere.optimizer, node.optimizer) == (12 * N / 64, 12 * N / 8)
    assert node.total - everywhere.total == pytest.approx(12 * N * 7 / 64)
    assert memory("parallel.shard_within=16", per_node=None).optimizer == 12 * N / 16
    assert memory("parallel.shard_within=node", per_node=None) == everywhere  # one node
    halves = memory("parallel.shard_within=node", "parallel.tensor=2")
    vectors = 40 * 2 * 2304 + 2304
    assert halves.optimizer == pytest.approx(12 * ((N - vectors) / 2 + vectors) / 4)


def test_activations_and_logits():
    d, f = 2304, 9216
    config = load_config(["config=3b_sb"])
    block = 2 * (4 * d + 4 * d + 3 * f) + 4 * 36
    assert activation_bytes_per_token(config) == 40 * block + 4 * d
    for name in ("3b_softmax", "3b_ssmax"):
        assert activation_bytes_per_token(load_config([f"config={name}"])) == 40 * (block + 4 * d) + 4 * d
    full = load_config(["config=3b_sb", "train.recompute=full"])
    assert activation_bytes_per_token(full) == 40 * 2 * d + block + 4 * d
    assert logit_bytes(config) == 4
    assert memory_per_gpu(config, 64).logits == 2 * 4096 * 50_304 * 4


def test_tensor_parallelism_splits_all_but_the_vectors():
    one = load_config(["config=3b_sb", "train.compile=none"])
    two = replace(one, parallel=replace(one.parallel, tensor=2))
    vectors = 40 * 2 * 2304 + 2304
    assert memory_per_gpu(two, 64).weights == 2 * ((N - vectors) / 2 + vectors)
    assert activation_bytes_per_token(two) == activation_bytes_per_token(one) / 2
    loose = replace(two, parallel=replace(two.parallel, sequence=False))
    assert activation_bytes_per_token(loose) > activation_bytes_per_token(two)
    kept = replace(
        two, parallel=replace(two.parallel, keep_gathered=True)
    )  # 2 per layer and the head's, of w·(D − D/2)
    assert activation_bytes_per_token(kept) == activation_bytes_per_token(two) + 81 * 2 * 2304 / 2


def test_recomputation_and_zero_only_save():
    totals = [
        memory_per_gpu(load_config(["config=1b_ssmax", f"train.recompute={kind}"]), 8).activations
        for kind in ("none", "selective", "full")
    ]
    assert totals == sorted(totals, reverse=True)
    totals = [
        memory_per_gpu(load_config(["config=1b_ssmax", "train.compile=block", f"parallel.zero_stage={stage}"]), 8).total
        for stage in (1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)


def test_command_prints_every_figure(capsys):
    command.main(["config=3b_sb", "gpus=64", "mfu=0.5", "train.microbatch=1"])
    out = capsys.readouterr().out
    for text in ("3,513,473,280", "25,610,688,000", "23,345,763,840", "298,024", "1,250,000,000,000", "MFU 0.5"):
        assert text in out
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "total"):
        assert f"memory: {part}" in out


@pytest.mark.parametrize(("steps", "hours"), [(1, "0.0013"), (1000, "1.3"), (8000, "10"), (100_000, "126")])
def test_few_gpu_hours_have_two_digits(steps, hours, capsys):
    command.main(["config=162m_softmax", "gpus=8", f"train.max_steps={steps}"])
    assert f" {hours} GPU hours " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("gpus=none", "gpus must be a whole number, not 'none'"),
        ("gpus=0", "gpus must be at least 1, not 0"),
        ("mfu=40", "mfu must be above 0 and at most 1, not 40"),
        ("mfu=x", "mfu must be a number, not 'x'"),
        ("gpu=64", "did you mean gpus"),
        ("gpus=3", "train.batch_size=1024 is not a multiple of the 6 rows"),
    ],
)
def test_command_refuses(argument, expected):
    with pytest.raises(UserError) as error:
        command.main(["config=3b_sb", argument])
    assert expected in str(error.value)


def test_a_refusal_by_the_number_of_gpus_names_the_default():
    with pytest.raises(UserError, match=r"use train.batch_size=64, .* \(gpus=8 is the default\)$"):
        command.main(["config=tiny_sb"])
    with pytest.raises(UserError, match=r"or train.microbatch=1 or 2$"):
        command.main(["config=tiny_sb", "gpus=8"])
    with pytest.raises(UserError, match=r"model.num_heads=3 does not divide (?!.*default)"):
        command.main(["config=tiny_sb", "model.num_heads=3"])


def test_one_gpu_is_singular(capsys):
    command.main(["config=tiny_sb", "gpus=1"])
    out = capsys.readouterr().out
    assert out.startswith("tiny_sb on 1 GPU ")
    assert "16 rows on 1 rank " in out


def test_users_command_runs_as_written_without_torch():
    """A mistake ends with 2 and one line."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['launch/estimate.py', 'config=3b_sb', 'gpus=64'];"
        "sys.path[0] = 'launch'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    good = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    assert "3,513,473,280" in good.stdout
    command = [sys.executable, "launch/estimate.py", "config=3b_sb", "train.micobatch=1"]
    bad = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: there is no key 'train.micobatch'; did you mean train.microbatch?\n"


def test_context_parallelism_divides_activations_and_what_zero_divides():
    one = load_config(["config=1b_sb", "train.compile=none"])
    shared = replace(one, parallel=replace(one.parallel, ulysses=4))
    alone, shared = memory_per_gpu(one, 8), memory_per_gpu(shared, 8)
    assert (shared.activations, shared.logits) == (alone.activations / 4, alone.logits / 4)
    assert (shared.weights, shared.optimizer) == (alone.weights, alone.optimizer)  # over the same eight ranks


@pytest.mark.parametrize(
    ("layout", "meant"),
    [
        ("tensor=2", "block"),
        ("ring=2", "block"),
        ("zero_stage=2", "block"),
        ("zero_stage=3", "block"),
        ("zero_stage=3 parallel.tensor=2", "none"),
    ],
)
def test_auto_compiles_blocks_but_torn_ones_under_zero_3(layout, meant):
    auto, none, block = (
        memory_per_gpu(load_config(["config=1b_ssmax", *f"parallel.{layout}".split(), f"train.compile={compiled}"]), 8)
        for compiled in ("auto", "none", "block")
    )
    assert auto == {"none": none, "block": block}[meant]
    assert block.activations < none.activations
