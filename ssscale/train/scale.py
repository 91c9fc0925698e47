"""Predicts the speed of a run on many GPUs by arithmetic, without torch and without a GPU.

The step is modelled as the stack runs it now. Nothing of the exchange of gradients and weights is hidden behind computation:
after the last backward pass DeepSpeed reduces all gradients in the dtype of the weights (bf16, although it accumulates in
fp32), steps, and gathers the weights. With `parallel.overlap`, the last backward pass hides the reduction, which is in fp32
unless gradients stay in bf16, and the next forward pass hides the gather. Only the embedding's share stays in the open: its
gradient comes last, and its weights are needed first. With `parallel.shard_within=node`, a bucket's all-reduce between nodes
runs beside the reduce-scatters of later buckets within them. Tensor and context parallelism exchange between compiled pieces
of a block, or, with `train.compile_exchanges`, within whole blocks, which the host launches in less time.

Not modelled: how much exchanges slow down the computation beside them (with `parallel.overlap` on two H200s, a backward pass
of 1b takes 0.228 s in place of 0.197 s, docs/log/2026-11-25-two-gpus.md), exchanges that whole blocks or copy engines hide,
DeepSpeed's hooks under ZeRO-3, for which the GPU waits, waiting for data, ragged documents, noise between ranks, and a
network that other jobs use.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ssscale.config.choices import Compile, Recompute, ShardWithin
from ssscale.config.schema import Config
from ssscale.engine.buckets import REDUCE_BUCKET, overlap_bucket
from ssscale.errors import UserError
from ssscale.model.flops import PEAK_FLOPS, count_parameters, flops_per_token, parameters_by_part
from ssscale.optim.base import in_one_pass
from ssscale.train.estimate import (
    Memory,
    fp8_speedup,
    memory_per_gpu,
    shard_ranks,
    stays_in_bf16,
    weight_bytes,
)
from ssscale.train.links import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    HOP,
    REDUCE_SCATTER,
    SEND,
    Cluster,
    Constant,
    Exchange,
    Traffic,
)
from ssscale.train.microbatch import MOST_TOKENS, fits
from ssscale.validate_graphs import records_blocks
from ssscale.validate_parallel import check_copies_within_node, check_node, check_parallel

OPTIMIZER = Constant(
    6e-12,
    True,
    "s per parameter of this rank's partition, norm and update in one pass: accumulation 1 beside 16, 1b_softmax at 942a5df "
    "(docs/results/training_speed.md)",
)
SUMS = Constant(
    10 / 4.1e12,
    False,
    "s per parameter and microbatch that is summed in fp32: 10 bytes, at the update kernel's 4.1 TB/s",
)
BUCKETS = Constant(8e-12, False, "s per parameter: DeepSpeed moves 32 bytes in and out of its buckets, at 4 TB/s")
DIRECT_BUCKETS = Constant(3e-12, False, "the same where it reduces the bf16 gradients themselves: 12 bytes")
# Of stages and optimizers without the update in one pass. BUCKETS are in it, as DeepSpeed moves them on one GPU as well.
OWN_STEP = Constant(
    20e-12, True, "s per parameter of DeepSpeed's own step: accumulation 1 beside 16, 1b and 3b, recorded in 4addd06"
)
SPLIT = Constant(0.5, False, "share of OWN_STEP that ZeRO divides: by the bytes that its kernels move")
LAUNCH = Constant(
    0.72e-3, True, "s of the host per exchange within a block: 57,000 tokens/s (docs/log/2026-11-23-tp2-alone.md)"
)
WHOLE = Constant(
    235e-3 / 40,
    False,
    "s of the host per whole block, both passes: 90 and 145 ms of 40 layers under the tracer, which slows the host, so an "
    "upper bound (docs/log/2026-11-25-scale.md)",
)
UNCOMPILED = Constant(
    0.85, False, "speed without compiled blocks: between 0.81 and 0.95 (docs/log/2026-11-22-several-gpus.md)"
)
RECOMPUTED = {
    Recompute.none: Constant(1.0, True, "nothing is computed again"),
    Recompute.selective: Constant(1.05, False, "times the computation: assumed"),
    Recompute.full: Constant(4 / 3, False, "times the computation: the forward pass twice"),
}
UNMEASURED = {
    "HOP": HOP,
    "SUMS": SUMS,
    "BUCKETS": BUCKETS,
    "DIRECT_BUCKETS": DIRECT_BUCKETS,
    "SPLIT": SPLIT,
    "WHOLE": WHOLE,
}


class Rate(NamedTuple):
    """A measurement of one GPU with microbatches of 4 rows of 4,096 tokens. step: tokens per step. mfu: at 6N + 12·L·d·S."""

    tokens_per_second: float
    mfu: float
    step: int
    parameters: float

    @property
    def within_step(self) -> float:
        """The MFU of forward and backward alone, without the time of the fp32 sums and the optimizer."""
        spent = (OPTIMIZER.value + SUMS.value * self.step / 16_384) * self.parameters
        return self.mfu / (1 - spent * self.tokens_per_second / self.step)


# By run file: medians over 120 steps on one H200 at 46bdec8 (docs/results/width.md). 3b_ssmax is from
# docs/results/training_speed.md, with DeepSpeed's own step, whose time makes this rate 0.4 % too low.
RATES = {
    "1b_sb": Rate(64_319, 0.668, 65_536, 1.21e9),
    "1b_sb_rem": Rate(64_744, 0.673, 65_536, 1.21e9),
    "1b_ssmax": Rate(56_342, 0.586, 65_536, 1.21e9),
    "1b_softmax": Rate(57_049, 0.593, 65_536, 1.21e9),
    "3b_sb": Rate(25_664, 0.665, 65_536, 3.51e9),
    "3b_ssmax": Rate(22_234, 0.576, 262_144, 3.51e9),
}
LOWEST_MFU = min(rate.within_step for rate in RATES.values())


@dataclass(frozen=True)
class Prediction:
    """Seconds per step, by what they are spent on. exposed: exchanges during which nothing is computed."""

    config: Config
    compute: float
    optimizer: float  # with the fp32 sums of gradients and the copies of DeepSpeed's buckets
    host: float  # the GPU waits for the host to launch the next piece of a block, or the next whole one
    exposed: dict[str, float]
    memory: Memory
    traffic: Traffic

    @property
    def seconds(self) -> float:
        return self.compute + self.optimizer + self.host + sum(self.exposed.values())

    @property
    def tokens_per_second(self) -> float:
        return self.config.tokens_per_step / self.seconds

    @property
    def label(self) -> str:
        parallel, train = self.config.parallel, self.config.train
        sizes = {"TP": parallel.tensor, "Ulysses": parallel.ulysses, "ring": parallel.ring}
        split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        zero = f"ZeRO-{parallel.zero_stage}{' with overlap' * parallel.overlap}{' in bf16' * parallel.overlap_bf16}"
        if parallel.shard_within is not ShardWithin.all:
            node = isinstance(parallel.shard_within, ShardWithin)
            zero += " within nodes" if node else f" within {parallel.shard_within} ranks"
        return ", ".join([zero, *split, f"microbatch {train.microbatch}"])


def predict(config: Config, cluster: Cluster, mfu: float | None = None) -> Prediction:
    """Predicts one step. `config` has passed `validate` for this cluster, and its microbatch is a number.

    mfu: of forward and backward on one GPU in bf16, at 6N + 12·L·d·S. None: the measured one (`forward_mfu`).
    """
    train, parallel = config.train, config.parallel
    accumulation = train.batch_size // (train.microbatch_rows * _data_ranks(config, cluster))
    tokens = train.microbatch_rows * config.data.length
    within = _block_exchanges(config, cluster, tokens)
    compute = tokens * _seconds_per_token(config, mfu) / (parallel.tensor * parallel.context * fp8_speedup(config))
    busy = compute + sum(seconds for _, seconds in within.values())
    n = _parameters_per_rank(config)
    exchanges = _replica_exchanges(config, cluster, n, accumulation)
    return Prediction(
        config=config,
        compute=accumulation * compute,
        optimizer=n * _update(config, cluster, accumulation),
        host=accumulation * max(0.0, _launch(config, sum(number for number, _ in within.values())) - busy),
        exposed={
            **{name: accumulation * seconds for name, (_, seconds) in within.items()},
            **_in_the_open(config, {name: cluster.pipelined(found) for name, found in exchanges.items()}, compute),
        },
        memory=memory_per_gpu(config, cluster.size, cluster.gpus),
        traffic=cluster.traffic(exchange for found in exchanges.values() for exchange in found),
    )


def check_cluster(config: Config, cluster: Cluster) -> None:
    """Raises UserError if a layout needs other nodes (`parallel.shard_within=node`, `parallel.copy_engines`)."""
    parallel = config.parallel
    if parallel.shard_within is ShardWithin.node:
        check_node(parallel.shard_within, cluster.gpus, parallel.tensor, cluster.size)
    check_copies_within_node(config, shard_ranks(config, cluster.size, cluster.gpus), cluster.gpus)


def other_shards(config: Config, cluster: Cluster) -> Config | None:
    """Returns `config` with the other value of `parallel.shard_within`, `all` or `node`. None if it would change nothing."""
    parallel = config.parallel
    if not parallel.overlap or cluster.nodes == 1:
        return None
    within = ShardWithin.node if parallel.shard_within is ShardWithin.all else ShardWithin.all
    other = replace(config, parallel=replace(parallel, shard_within=within))
    try:
        check_cluster(other, cluster)
    except UserError:
        return None
    return other


def forward_mfu(config: Config) -> tuple[float, bool]:
    """Returns the MFU of forward and backward on one GPU, and whether the run file was measured."""
    rate = RATES.get(config.name)
    return (LOWEST_MFU, False) if rate is None else (rate.within_step, True)


def layouts(config: Config, cluster: Cluster, mfu: float | None = None) -> list[Prediction]:
    """Returns the valid layouts of `config` that fit into the memory, fastest first, with the best microbatch of each.

    Recomputation, compilation and the batch are those of `config`.
    """
    best: dict[tuple[int | ShardWithin, ...], Prediction] = {}
    for changed in _candidates(config, cluster):
        parallel = changed.parallel
        key = (parallel.tensor, parallel.ulysses, parallel.ring, parallel.zero_stage, parallel.shard_within)
        found = predict(changed, cluster, mfu)
        # Of two that the model takes for equally fast, the larger microbatch: it gives kernels more to do.
        if key not in best or found.tokens_per_second >= best[key].tokens_per_second:
            best[key] = found
    return sorted(best.values(), key=lambda found: (-found.tokens_per_second, found.memory.total))


def _candidates(config: Config, cluster: Cluster) -> Iterator[Config]:
    powers = [2**i for i in range(7)]
    for tensor in (size for size in powers if size <= cluster.gpus):
        for ulysses in (size for size in powers if size <= cluster.gpus // tensor):
            for ring in powers:
                for stage in (1, 2, 3):
                    parallel = replace(config.parallel, tensor=tensor, ulysses=ulysses, ring=ring, zero_stage=stage)
                    if stage > 1:
                        within = ShardWithin.all
                        parallel = replace(parallel, overlap=False, overlap_bf16=False, shard_within=within)
                    found = replace(config, parallel=parallel)
                    for changed in filter(None, (found, other_shards(found, cluster))):
                        yield from _with_microbatches(changed, cluster)


def _with_microbatches(config: Config, cluster: Cluster) -> Iterator[Config]:
    ranks = _data_ranks(config, cluster)
    if ranks * config.parallel.tensor * config.parallel.context != cluster.size or config.train.batch_size % ranks:
        return
    rows = config.train.batch_size // ranks
    for microbatch in (number for number in range(1, rows + 1) if rows % number == 0):
        if microbatch > 1 and microbatch * config.data.length // config.parallel.context > MOST_TOKENS:
            return
        changed = replace(config, train=replace(config.train, microbatch=microbatch))
        try:
            check_parallel(changed, gpu=True)
            check_cluster(changed, cluster)
        except UserError:
            continue
        if not fits(changed, cluster.size, cluster.memory, cluster.gpus):
            return
        yield changed


def _data_ranks(config: Config, cluster: Cluster) -> int:
    return cluster.size // (config.parallel.tensor * config.parallel.context)


def _seconds_per_token(config: Config, mfu: float | None) -> float:
    """Seconds of one GPU for forward and backward of one token."""
    length = config.data.length
    rate = (forward_mfu(config)[0] if mfu is None else mfu) * PEAK_FLOPS
    if config.compiled() is Compile.none:
        rate *= UNCOMPILED.value
    return RECOMPUTED[config.train.recompute].value * flops_per_token(config.model, length, causal_half=False) / rate


def _parameters_per_rank(config: Config) -> float:
    parts = parameters_by_part(config.model, config.data.length)
    return (parts["embedding"] + parts["matrices"]) / config.parallel.tensor + parts["vectors"]


def _update(config: Config, cluster: Cluster, accumulation: int) -> float:
    """Returns the seconds per parameter for fp32 sums of gradients, DeepSpeed's buckets, norm and update in a step."""
    overlap, ranks = config.parallel.overlap, cluster.size // config.parallel.tensor
    split = shard_ranks(config, cluster.size, cluster.gpus) if config.parallel.zero_stage else 1
    if not in_one_pass(config, weight_bytes(config) == 2):
        return SUMS.value * accumulation + OWN_STEP.value * (1 - SPLIT.value + SPLIT.value / split)
    direct = stays_in_bf16(config, ranks, accumulation)
    buckets = 0.0 if ranks == 1 or overlap else (DIRECT_BUCKETS if direct else BUCKETS).value
    return (0.0 if direct else SUMS.value * accumulation) + buckets + OPTIMIZER.value / split


def _launch(config: Config, count: int) -> float:
    """Returns the seconds of the host for a microbatch whose blocks make `count` exchanges.

    0 where it is never late: without any exchange, and where it launches two CUDA graphs per block (`train.cuda_graphs`).
    """
    if records_blocks(config):
        return 0.0
    whole = count and config.compiled() is not Compile.none and not config.breaks_in_blocks()
    return WHOLE.value * config.model.num_layers if whole else LAUNCH.value * count


def _block_exchanges(config: Config, cluster: Cluster, tokens: int) -> dict[str, tuple[int, float]]:
    """Returns (number, exposed seconds) of the exchanges of one microbatch (docs/reference/parallelism.md).

    tokens: of the microbatch, before context parallelism divides them.
    """
    model, parallel = config.model, config.parallel
    layers, width = model.num_layers, weight_bytes(config)
    t, u, r = parallel.tensor, parallel.ulysses, parallel.ring
    found: dict[str, tuple[int, float]] = {}
    if (
        t > 1
    ):  # per layer 6 gathers and 4 scatters, at the ends 3 and 2; or 4 and 2 all-reduces, each of twice the bytes
        size, times = (t - 1) / t * model.hidden_size * tokens / (u * r) * width, 2 * layers + 1
        gathers, scatters = (2 if config.keeps_gathered() else 3) * times, 2 * times
        each = [
            Exchange(ALL_GATHER, t, 1, gathers, gathers * size),
            Exchange(REDUCE_SCATTER, t, 1, scatters, scatters * size),
        ]
        if not parallel.sequence:
            each = [Exchange(ALL_REDUCE, t, 1, 2 * times, 2 * times * 2 * size)]
        found["tensor"] = sum(exchange.number for exchange in each), sum(map(cluster.seconds, each))
    if u > 1:  # one all-to-all of q, k and v, one of the outputs, and their gradients
        heads = 2 * (model.num_heads + model.kv_heads) * model.head_size / t
        size = 2 * layers * (u - 1) / u * heads * tokens / (u * r) * width
        found["ulysses"] = 4 * layers, cluster.seconds(Exchange(ALL_TO_ALL, u, t, 4 * layers, size))
    if r > 1:  # keys and values in both passes, their gradients in fp32; hidden behind attention as far as that lasts
        x = 2 * model.kv_heads * model.head_size / (t * u) * tokens / r
        count = layers * (3 * (r - 1) + 1)
        sent = layers * x * (2 * (r - 1) * width + r * 4)
        seconds = cluster.seconds(Exchange(SEND, r, t * u, count, sent))
        attention = _attention_share(config) * tokens * _seconds_per_token(config, None) / (t * u * r)
        found["ring"] = count, max(0.0, seconds - attention) + attention / 3  # backward runs the forward ring again
    return found


def _attention_share(config: Config) -> float:
    length, model = config.data.length, config.model
    n = count_parameters(model, length) - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    return 1 - 6.0 * n / flops_per_token(model, length, causal_half=False)


def _replica_exchanges(config: Config, cluster: Cluster, n: float, accumulation: int) -> dict[str, list[Exchange]]:
    """Returns the exchanges of gradients and weights in a step. n: parameters of a tensor-parallel rank.

    | ZeRO | gradients | weights |
    |---|---|---|
    | 0 | all-reduce per step | |
    | 1 | all-reduce per step; with `overlap` reduce-scatter in fp32 or bf16 | gather per step |
    | 1, `shard_within=node` | reduce-scatter within a node, all-reduce of the shards between nodes | gather within a node |
    | 2 | all-reduce per microbatch (of DeepSpeed's buckets) | gather per step |
    | 3 | reduce-scatter per microbatch | gather per pass of a microbatch |
    """
    stage, stride = config.parallel.zero_stage, config.parallel.tensor
    ranks = cluster.size // stride
    if ranks == 1:
        return {}
    if config.parallel.overlap:
        return _overlapped(config, cluster, n, accumulation)
    share = (ranks - 1) / ranks * n * weight_bytes(config)
    buckets = math.ceil(n / REDUCE_BUCKET) if stage < 3 else 2 * config.model.num_layers
    gradients, weights = ((1, 0), (1, 1), (accumulation, 1), (accumulation, 2 * accumulation))[stage]
    reduction = REDUCE_SCATTER if stage == 3 else ALL_REDUCE
    return {
        "gradients": [Exchange(reduction, ranks, stride, gradients * buckets, reduction.rounds * gradients * share)],
        "weights": [Exchange(ALL_GATHER, ranks, stride, weights * buckets, weights * share)],
    }


def _overlapped(config: Config, cluster: Cluster, n: float, accumulation: int) -> dict[str, list[Exchange]]:
    """Returns the exchanges with `parallel.overlap`.

    Copy engines leave the sums within a node in fp32, in which they are then summed between nodes, whatever was sent.
    """
    parallel, stride = config.parallel, config.parallel.tensor
    ranks = cluster.size // stride  # that hold the same weights
    buckets = math.ceil(n / overlap_bucket(ranks))
    shards = shard_ranks(config, cluster.size, cluster.gpus)
    copies, part = ranks // shards, (shards - 1) / shards * n
    width = 2 if parallel.overlap_bf16 or stays_in_bf16(config, ranks, accumulation) else 4
    gradients = [Exchange(REDUCE_SCATTER, shards, stride, buckets, part * width)]
    if copies > 1:  # an all-reduce passes around the ring twice
        sent = 2 * (copies - 1) / copies * n / shards * (4 if config.copies_gradients else width)
        gradients.append(Exchange(ALL_REDUCE, copies, stride * shards, buckets, sent))
    weights = [Exchange(ALL_GATHER, shards, stride, buckets, part * weight_bytes(config))]
    return {"gradients": gradients, "weights": weights}


def _in_the_open(config: Config, exchanges: dict[str, float], compute: float) -> dict[str, float]:
    """Returns what computation does not hide of the exchanges of gradients and weights. compute: s of a microbatch."""
    if not config.parallel.overlap:
        return exchanges
    model = config.model
    embedding = model.vocab_size * model.hidden_size / config.parallel.tensor / _parameters_per_rank(config)
    forward = compute / (3 * RECOMPUTED[config.train.recompute].value)
    beside = {"gradients": compute - forward, "weights": forward}
    return {name: max(seconds * embedding, seconds - beside[name]) for name, seconds in exchanges.items()}
