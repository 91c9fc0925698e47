"""The model of scale against arithmetic by hand and against measurements, and the command."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch import estimate as command
from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.model.flops import count_parameters, flops_per_token
from ssscale.train.estimate import memory_per_gpu
from ssscale.train.links import HOP, LATENCY, NVLINK, Cluster
from ssscale.train.scale import (
    BUCKETS,
    LAUNCH,
    OPTIMIZER,
    RATES,
    SPLIT,
    check_cluster,
    forward_mfu,
    layouts,
    other_shards,
    predict,
)
from ssscale.validate import validate

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
N = 3_513_473_280


def of(name: str, *keys: str) -> Config:
    return load_config([f"config={name}", "model.vocab_size=50257", *keys])


def hosts(nodes: int, gpus: int = 8, network: float = 50.0) -> Cluster:
    return Cluster(nodes, gpus, network * 1e9, 79 * GIB)


def test_data_parallel_by_hand() -> None:
    """3b on 64 nodes: bf16 gradients all-reduced and weights gathered by 8 GPUs' networks per node, nothing hidden."""
    found = predict(load_config(["config=3b_sb"]), hosts(64, network=25))
    rank_tokens, ranks = 1024 * 4096 / 512, 512
    flops = 6 * N + 12 * 40 * 2304 * 4096
    assert found.compute == pytest.approx(rank_tokens * flops / (forward_mfu(found.config)[0] * 989e12))
    assert found.optimizer == pytest.approx(N * (20e-12 * (0.5 + 0.5 / ranks) + 8e-12))
    step = LATENCY.value + HOP.value * 63
    sent = 2 * N * 511 / 512
    assert found.exposed == {
        "gradients": pytest.approx(2 * (8 * step + sent / 200e9)),
        "weights": pytest.approx(8 * step + sent / 200e9),
    }
    assert found.host == 0
    assert found.tokens_per_second == pytest.approx(
        4_194_304 / (found.compute + found.optimizer + sum(found.exposed.values()))
    )
    assert found.memory == memory_per_gpu(found.config, 512)
    assert (OPTIMIZER.value, SPLIT.value, BUCKETS.value) == (20e-12, 0.5, 8e-12)


def test_the_measured_rate_returns_on_one_gpu() -> None:
    """The rates of the table include the optimizer's time, which the model takes out and adds again."""
    for name, rate in RATES.items():
        config = load_config([f"config={name}", "train.microbatch=4", f"train.batch_size={rate.step // 4096}"])
        found = predict(config, Cluster(1, 1, 1.0, 1.0))
        reached = found.tokens_per_second * flops_per_token(config.model, 4096, causal_half=False) / 989e12
        assert reached == pytest.approx(rate.mfu, rel=0.002)
        assert count_parameters(config.model, 4096) == pytest.approx(rate.parameters, rel=0.002)
        assert found.exposed == {}


def test_exchanges_of_tensor_parallelism_by_hand() -> None:
    """A profile of one step counted 243 gathers and 162 scatters."""
    config = of("1b_softmax", "parallel.tensor=2", "train.batch_size=8", "train.microbatch=8")
    found = predict(config, hosts(1, 2))
    assert found.exposed["tensor"] == pytest.approx(405 * (LATENCY.value + 8 * 4096 * 1536 * 2 / 2 / NVLINK.value))
    assert found.compute == pytest.approx(predict(of("1b_softmax", "train.batch_size=4"), hosts(1, 1)).compute)
    keys = ("train.compile_exchanges=true", "parallel.keep_gathered=true")
    once = predict(
        of("1b_softmax", "parallel.tensor=2", "train.batch_size=8", "train.microbatch=8", *keys), hosts(1, 2)
    )
    assert once.exposed["tensor"] == pytest.approx(found.exposed["tensor"] * (405 - 81) / 405)  # 81 of them are repeats
    few = predict(of("1b_softmax", "parallel.tensor=2", "train.batch_size=1", "train.microbatch=1"), hosts(1, 2))
    assert few.host + few.compute + few.exposed["tensor"] == pytest.approx(405 * LAUNCH.value)  # the host is late


@pytest.mark.parametrize("network", [2, 25])
def test_overlap_by_hand(network: int) -> None:
    """3b on 64 nodes: fp32 gradients beside two thirds of a microbatch, bf16 weights beside the other third."""
    config = load_config(["config=3b_sb", "parallel.overlap=true"])
    open_ = predict(load_config(["config=3b_sb"]), hosts(64, network=network))
    found = predict(config, hosts(64, network=network))
    latency = 53 * (LATENCY.value + HOP.value * 63)  # N / 2^26 buckets
    sent = 2 * N * 511 / 512 / (8e9 * network)
    weights = latency + sent
    embedding = 50_257 * 2304 / N
    computed = found.compute / 3  # one microbatch, of whose time the forward pass takes a third
    assert found.exposed == {
        "gradients": pytest.approx(max(embedding * (latency + 2 * sent), latency + 2 * sent - 2 * computed), rel=0.01),
        "weights": pytest.approx(max(embedding * weights, weights - computed), rel=0.01),
    }
    assert found.compute == open_.compute
    assert sum(found.exposed.values()) < (0.9 if network == 2 else 0.3) * sum(open_.exposed.values())
    assert {row.config.parallel.overlap for row in layouts(config, hosts(8)) if row.config.parallel.zero_stage > 1} == {
        False
    }
    assert "ZeRO-1 with overlap" in found.label


@pytest.mark.parametrize("network", [2, 25])
def test_shards_within_nodes_by_hand(network: int) -> None:
    """3b on 64 nodes: reduce-scatters and gathers by NVLink, all-reduces of an eighth by each GPU's own network."""
    config = load_config(["config=3b_sb", "parallel.overlap=true", "parallel.shard_within=node"])
    found = predict(config, hosts(64, network=network))
    within = 53 * LATENCY.value + 4 * N * 7 / 8 / NVLINK.value
    between = 53 * 2 * (LATENCY.value + HOP.value * 63) + 2 * 4 * N / 8 * 63 / 64 / (1e9 * network)
    gradients = max(within, between) + min(within, between) / 53
    weights = 53 * LATENCY.value + 2 * N * 7 / 8 / NVLINK.value
    embedding, computed = 50_257 * 2304 / N, found.compute / 3
    assert found.exposed == {
        "gradients": pytest.approx(max(embedding * gradients, gradients - 2 * computed), rel=0.01),
        "weights": pytest.approx(max(embedding * weights, weights - computed), rel=0.01),
    }
    assert found.optimizer == pytest.approx(N * 20e-12 * (0.5 + 0.5 / 8))
    assert found.traffic.within == pytest.approx(6 * N * 7 / 8)
    assert found.traffic.between == pytest.approx(8 * N / 8 * 63 / 64)
    assert found.memory == memory_per_gpu(config, 512, 8)
    assert found.label == "ZeRO-1 with overlap within nodes, microbatch 2"
    undivided = predict(other_shards(config, hosts(64)) or config, hosts(64, network=network))
    assert sum(undivided.traffic) == pytest.approx(6 * N * 511 / 512)
    assert undivided.traffic.between == pytest.approx(6 * N * 511 / 512 / 8)


def test_shards_of_one_tensor_parallel_group_per_node() -> None:
    """Each GPU holds all of its state. Nothing is exchanged within nodes but by tensor parallelism."""
    config = load_config(["config=3b_sb", "parallel.overlap=true", "parallel.shard_within=node", "parallel.tensor=8"])
    found = predict(config, hosts(4))
    vectors = 40 * 2 * 2304 + 2304
    n = (N - vectors) / 8 + vectors
    assert found.traffic == (0.0, pytest.approx(8 * n * 3 / 4))
    assert found.exposed["weights"] == 0
    assert found.memory.optimizer == pytest.approx(12 * n)
    with pytest.raises(UserError, match="tensor=8 does not divide its 4 ranks"):
        check_cluster(config, hosts(8, gpus=4))


def test_both_settings_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["config=3b_sb", "nodes=64", "gpus=8", "network=50", "parallel.overlap=true"]
    command.main(keys)
    out = " ".join(capsys.readouterr().out.split())
    assert "shard_within=node: ZeRO-1 with overlap" in out
    assert "as configured: per step, each GPU sends 18.41 GB within its node and 2.63 GB to other nodes" in out
    assert "shard_within=node: per step, each GPU sends 18.45 GB within its node and 3.46 GB to other nodes" in out
    command.main([*keys, "parallel.shard_within=node"])
    out = " ".join(capsys.readouterr().out.split())
    assert "shard_within=all: per step, each GPU sends 18.41 GB within its node and 2.63 GB to other nodes" in out
    config = load_config([keys[0], keys[-1]])
    assert other_shards(config, hosts(1)) is None
    assert other_shards(load_config(keys[:1]), hosts(8)) is None
    labels = [row.label for row in layouts(config, hosts(8))]
    assert sum(" within nodes" in label for label in labels) == sum(label.count("with overlap") for label in labels) / 2


def test_links() -> None:
    cluster = hosts(4, 8, 25)
    assert cluster.link(8, 1) == (NVLINK.value, 1)
    assert cluster.link(32, 1) == (200e9, 4)  # all eight networks of a node
    assert cluster.link(4, 8) == (25e9, 4)  # one of them
    assert cluster.link(16, 2) == (100e9, 4)
    assert hosts(4, 8, 100).link(32, 1) == (NVLINK.value, 4)  # within the node it goes no faster


# docs/results/several_gpus.md and docs/results/predicted_scaling.md. None of these runs gave a constant but the last's.
MEASURED = [
    ("1b_softmax", 1, 4, 4, [], 51_265),
    ("1b_softmax", 2, 8, 4, [], 99_073),
    ("1b_softmax", 2, 16, 8, [], 105_392),
    ("1b_softmax", 4, 32, 8, [], 209_067),
    ("3b_sb", 2, 4, 2, [], 39_325),
    ("3b_sb", 4, 8, 2, [], 76_697),
    ("1b_sb", 2, 16, 4, ["parallel.zero_stage=2"], 120_366),
    ("1b_softmax", 2, 16, 16, ["parallel.tensor=2"], 84_412),
    ("1b_softmax", 4, 32, 16, ["parallel.tensor=2"], 165_346),
    ("1b_softmax", 4, 32, 32, ["parallel.tensor=4"], 132_945),
    ("1b_softmax", 2, 8, 8, ["parallel.tensor=2"], 77_712),
]


@pytest.mark.parametrize(("name", "gpus", "batch", "microbatch", "keys", "measured"), MEASURED)
def test_measured_runs(name: str, gpus: int, batch: int, microbatch: int, keys: list[str], measured: float) -> None:
    config = of(name, f"train.batch_size={batch}", f"train.microbatch={microbatch}", *keys)
    assert predict(config, hosts(1, gpus)).tokens_per_second == pytest.approx(measured, rel=0.1)


def test_layouts_are_valid_fit_and_come_fastest_first() -> None:
    config, cluster = load_config(["config=3b_sb"]), hosts(8)
    found = layouts(config, cluster)
    rates = [layout.tokens_per_second for layout in found]
    assert rates == sorted(rates, reverse=True)
    assert len({layout.label for layout in found}) == len(found) > 20
    for layout in found:
        validate(layout.config, world_size=64, gpu=True)
        assert 1.05 * layout.memory.total + 3 * GIB <= cluster.memory
        parallel = layout.config.parallel
        assert parallel.tensor * parallel.ulysses <= 8  # they stay within a node
    assert layouts(config, Cluster(8, 8, 50e9, 4 * GIB)) == []


def test_more_gpus_than_rows_share_rows() -> None:
    found = layouts(load_config(["config=3b_sb", "train.batch_size=32"]), hosts(8))
    assert {layout.config.parallel.tensor * layout.config.parallel.context for layout in found} >= {2, 4}
    assert min(layout.config.parallel.tensor * layout.config.parallel.context for layout in found) == 2


def test_a_faster_network_is_never_slower() -> None:
    config = load_config(["config=1b_sb", "train.microbatch=2"])
    rates = [predict(config, hosts(64, network=network)).tokens_per_second for network in (5, 25, 45)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_the_command_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["config=3b_sb", "nodes=64", "gpus=8", "network=50"])
    out = capsys.readouterr().out
    best = predict(load_config(["config=3b_sb"]), hosts(64))
    assert "3b_sb on 512 GPUs" in out
    assert "predicted on 64 nodes of 8 GPUs with 50 GB/s each" in out
    assert f"as configured: ZeRO-1, microbatch 2 | {best.tokens_per_second:,.0f}" in out
    assert f"Exposed in the fastest: gradients {best.exposed['gradients']:.3f} s" in out
    assert "measured on one GPU for 3b_sb" in out
    assert "Not measured by micro-benchmarks yet" in " ".join(out.split())
    command.main(["config=1b_sb", "nodes=64", "mfu=0.5"])
    out = " ".join(capsys.readouterr().out.split())
    assert "As configured it cannot run: train.batch_size=1024 is not a multiple of the 2048 rows" in out
    assert "0.500, given" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpus=8", "network=50"], "network= needs nodes="),
        (["parallel.overlap=true", "parallel.shard_within=node"], "parallel.shard_within=node needs nodes="),
        (["nodes=0"], "nodes must be at least 1, not 0"),
        (["nodes=2", "network=0"], "network must be above 0, not 0"),
        (["nodes=2", "gpu_memory=9"], "no layout of 3b_sb with train.recompute=none fits 16 GPUs of 9 GiB"),
        (["nodes=2", "model.num_heads=7"], "model.num_heads=7 does not divide"),
    ],
)
def test_the_command_refuses(arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        command.main(["config=3b_sb", *arguments])
    assert expected in str(error.value)


def test_the_prediction_needs_no_torch() -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['launch/estimate.py', 'config=3b_sb', 'nodes=64'];"
        "sys.path[0] = 'launch'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted on 64 nodes" in done.stdout
