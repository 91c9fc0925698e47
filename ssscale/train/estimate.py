"""Estimates the memory per GPU and the duration of a run by arithmetic, without torch and without a GPU.

Memory follows DeepSpeed's mixed precision: weights in bf16, gradients accumulated in fp32, and on each data-parallel rank a
share of the fp32 master weights and of the optimizer's states (`ssscale.optim.base`). With `precision=fp32` weights take
4 bytes. Activations are the tensors that autograd saves in compiled blocks, counted with saved-tensor hooks on our decoder.
"""

from dataclasses import dataclass, fields, replace

from ssscale.config.choices import Auto, Compile, Fp8, Precision, Recompute, ShardWithin
from ssscale.config.schema import Config
from ssscale.engine.buckets import REDUCE_BUCKET, overlap_bucket
from ssscale.errors import UserError
from ssscale.model.flops import PEAK_FLOPS, count_parameters, flops_per_token, parameters_by_part
from ssscale.model.mixers.base import Sizes
from ssscale.optim.base import BYTES, in_one_pass
from ssscale.train.schedule import total_tokens
from ssscale.train.stages import Plan
from ssscale.validate_graphs import records_blocks

FP8_COPIES = 2  # bytes per weight of fp8 layers: W and Wᵀ (ssscale/parallel/fp8.py)
# Bf16 time of a block's four products, forward and backward, by that in fp8 with the casts, at the widths of 1b and 3b: from
# the measured tokens/s (docs/results/options.md). `rowwise` was not measured, so that no gain is assumed.
FP8_WIDTHS = (1536, 2304)
FP8_GAIN = {
    Fp8.none: (1.0, 1.0),
    Fp8.tensorwise: (1.10, 1.455),
    Fp8.rowwise: (1.0, 1.0),
    Fp8.rowwise_bf16_dw: (1.30, 1.455),
}
PRODUCTS_SHARE = 0.54  # of a step in bf16 that is matrix products, with those of the head
COPY_SLOTS = 2 * 2**25  # bytes per rank that a rank's two slots of the exchange take (ssscale/parallel/copies.py)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step, without the CUDA context, NCCL and fragmentation (1 to 3 GiB)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Estimate:
    """FLOPs count forward and backward. N parameters, L layers, d = num_heads · head_dim, S tokens per row."""

    parameters: int
    flops_per_token: float  # 6N + 12·L·d·S
    flops_per_token_causal: float  # 6N + 6·L·d·S
    memory: Memory
    tokens_per_second_per_gpu: float
    tokens_per_day: float
    tokens: int
    steps: int
    days: float


def estimate(config: Config, gpus: int, mfu: float, peak: float = PEAK_FLOPS, per_node: int | None = None) -> Estimate:
    """Estimates parameters, FLOPs, memory and duration of a run. `config` has passed `validate`.

    mfu: fraction of the peak at 6N + 12·L·d·S FLOPs per token, as most published figures count it. In bf16: with `train.fp8`
        the speed is higher by `fp8_speedup`.
    peak: FLOP/s of one GPU in bf16. per_node: as for `memory_per_gpu`.
    """
    length = config.data.length
    flops = flops_per_token(config.model, length, causal_half=False)
    plan = Plan(config)
    tokens = min(total_tokens(config.train.stages), plan.tokens(plan.total_steps))
    rate = mfu * peak / flops * fp8_speedup(config)
    a_day = gpus * rate * 86_400
    return Estimate(
        parameters=count_parameters(config.model, length),
        flops_per_token=flops,
        flops_per_token_causal=flops_per_token(config.model, length, causal_half=True),
        memory=memory_per_gpu(config, gpus, per_node),
        tokens_per_second_per_gpu=rate,
        tokens_per_day=a_day,
        tokens=tokens,
        steps=plan.total_steps,
        days=tokens / a_day,
    )


def fp8_speedup(config: Config) -> float:
    """Returns the predicted tokens/s with `train.fp8` by those in bf16: 1 / (1 − p · b · (1 − 1 / gain)).

    p: `PRODUCTS_SHARE`. b: share of the matrices, the head's included, whose products run in fp8. gain: `FP8_GAIN`, in a
    straight line between the two widths, and beyond them as at the nearer one. 1 without compiled blocks: their casts cost
    at least what the products save.
    """
    model = config.model
    if config.compiled() is Compile.none:
        return 1.0
    matrices = parameters_by_part(model, config.data.length)["matrices"]
    in_fp8 = matrices * len(config.train.fp8_blocks(model.num_layers)) / model.num_layers
    share = in_fp8 / (matrices + model.vocab_size * model.hidden_size)
    (narrow, wide), (least, most) = FP8_WIDTHS, FP8_GAIN[config.train.fp8]
    gain = least + (most - least) * min(max((model.hidden_size - narrow) / (wide - narrow), 0.0), 1.0)
    return 1 / (1 - PRODUCTS_SHARE * share * (1 - 1 / gain))


def shard_ranks(config: Config, gpus: int, per_node: int | None = None) -> int:
    """Returns the number of ranks among which ZeRO divides the optimizer's state: D, or D of one node (`shard_within`).

    per_node: GPUs of a node; None: all GPUs are of one node.
    """
    within = config.parallel.shard_within
    node = (gpus if within is ShardWithin.all else per_node or gpus) if isinstance(within, ShardWithin) else within
    return max(1, min(node, gpus) // config.parallel.tensor)


def memory_per_gpu(config: Config, gpus: int, per_node: int | None = None) -> Memory:
    """Estimates the bytes on one GPU at the end of a forward pass, when all activations are alive.

    N' = parameters of one tensor-parallel rank, D = data · context ranks, w = 2 bytes (bf16; 4 in fp32), o = bytes of
    optimizer state per parameter (8 for AdamW; for Muon 4 or 2 of matrices, and 8 of other weights). per_node: GPUs of a
    node, for `parallel.shard_within=node`, with which only D of one node count for ZeRO-1; None: all are of one node:

    | ZeRO | weights | gradients | optimizer |
    |---|---|---|---|
    | 0 | w·N' | w·N' | o·N' (fp32: the weights are the master) |
    | 1 | w·N' | 4·N' + w·(largest matrix, before it is added to the sum) | (4 + o)·N'/D |
    | 2 | w·N' | 4·N'/D + w·(bucket) | (4 + o)·N'/D |
    | 3 | w·N'/D + w·(one block) | 4·N'/D + w·(bucket) | (4 + o)·N'/D |

    With `train.fp8`, weights include the casts of one step, FP8_COPIES bytes per weight of its blocks. Where the update is
    one pass (`in_one_pass`), a step of one microbatch keeps its gradients in bf16: w·N'. With `parallel.overlap`, several
    ranks do so only with `copy_engines` or `overlap_bf16`. With `copy_engines` on one host, they have what the other ranks have
    sent besides: w·N' + w·(D − 1)/D·N'. Otherwise, they have the sums: w·N' + 4·N'/D. With `overlap` and `copy_engines`,
    gradients include the slots of the exchange: COPY_SLOTS · D, with D of `shard_within`. With `train.cuda_graphs`, several
    microbatches keep the gradients of the blocks in bf16 besides.
    """
    model, train, parallel = config.model, config.train, config.parallel
    tensor, stage = parallel.tensor, parallel.zero_stage
    ranks = gpus // tensor  # data · context ranks, which hold the same weights
    width = weight_bytes(config)
    parts = parameters_by_part(model, config.data.length)
    n = (parts["embedding"] + parts["matrices"]) / tensor + parts["vectors"]
    block = parts["matrices"] / model.num_layers / tensor
    largest = model.hidden_size * max(model.vocab_size, 2 * model.ffn_hidden_size) / tensor
    bucket = overlap_bucket(ranks) if config.gathers_blocks() else REDUCE_BUCKET
    partitioned = 4 * n / ranks + width * min(n, bucket)
    summed = 4 * n + width * largest
    shards = shard_ranks(config, gpus, per_node)
    overlap = parallel.overlap and ranks > 1
    in_bf16 = stays_in_bf16(config, ranks, train.batch_size // (train.microbatch_rows * (ranks // parallel.context)))
    if in_bf16:
        pushed = config.copies_gradients and shards == ranks
        summed = width * n + (width * (shards - 1) if pushed else 4) * n / shards * overlap
    if overlap and config.copies_gradients:
        summed += COPY_SLOTS * shards
    if records_blocks(config) and not in_bf16:
        summed += width * block * model.num_layers
    kept = config.optimizer.chosen.mean_state_bytes(parts["matrices"] / tensor / n)
    tokens = train.microbatch_rows * config.data.length // parallel.context
    return Memory(
        weights=width * (n if stage < 3 else n / ranks + block)
        + FP8_COPIES * block * len(train.fp8_blocks(model.num_layers)),
        gradients=(width * n, summed, partitioned, partitioned)[stage],
        optimizer=kept * n if stage == 0 else (BYTES + kept) * n / shards,
        activations=tokens * (activation_bytes_per_token(config) + slot_bytes_per_token(config))
        + model.place.kept_bytes(model.num_heads / tensor / parallel.ulysses, config.data.length),
        logits=tokens * model.vocab_size / tensor * logit_bytes(config),
    )


def stays_in_bf16(config: Config, ranks: int, microbatches: int) -> bool:
    """Whether a step keeps its gradients in bf16: one of one microbatch, with a one-pass update (`ssscale.engine.update`).

    With `parallel.overlap`, they are sent in bf16 then. ranks: those that hold the same weights. microbatches: per step.
    """
    parallel = config.parallel
    sent = ranks == 1 or not parallel.overlap or config.copies_gradients or parallel.overlap_bf16
    return microbatches == 1 and sent and in_one_pass(config, weight_bytes(config) == 2)


def check_memory(config: Config, gpus: int, room: int, per_node: int | None = None) -> None:
    """Raises UserError if a stage cannot be trained with `room` bytes on each of `gpus` GPUs (or processes on CPUs).

    The estimate is incomplete and can be slightly wrong. So it refuses only what certainly fails: more than `room` for
    weights, gradients and optimizer, or more than twice `room` in total.
    """
    for own in Plan(config).configs:
        if isinstance(own.train.microbatch, Auto):
            own = replace(own, train=replace(own.train, microbatch=1))  # the least that `auto` can choose
        memory = memory_per_gpu(own, gpus, per_node)
        kept = memory.weights + memory.gradients + memory.optimizer
        if kept > room or memory.total > 2 * room:
            part = "weights, gradients and optimizer" if kept > room else "activations and logits"
            needed = kept if kept > room else memory.activations + memory.logits
            raise UserError(
                f"{part} take {needed / 2**30:,.0f} GiB on each of {gpus} ranks, which have {room / 2**30:,.0f}: make the "
                "model or train.microbatch smaller, or take more ranks (launch/estimate.py shows the parts)"
            )


def check_weights(config: Config, width: int, room: int) -> None:
    """Raises UserError if a rank's weights (`width` bytes each) and position tables need more than `room` bytes."""
    model, length = config.model, config.data.length
    tables = model.place.table_bytes(model.head_size, length)
    needed = width * count_parameters(model, length) / config.parallel.tensor + tables
    if needed > room:
        raise UserError(
            f"a model of {count_parameters(model, length):,} parameters for {length:,} tokens takes {needed / 2**30:,.0f} GiB, "
            f"and there are {room / 2**30:,.0f}: make it smaller"
        )


def weight_bytes(config: Config) -> int:
    return 4 if config.train.precision is Precision.fp32 else 2


def activation_bytes_per_token(config: Config) -> float:
    """Estimates the bytes per token of a microbatch that one GPU keeps for the backward pass, over all L layers.

    w bytes per element, N query and K key/value heads of H dimensions, hidden size D, ffn size F, by `train.recompute`:

    none:      L · w·(4D + (N + 2K)·H + N·H + 3F): inputs and outputs of both norms; q, k, v as one matrix; the output of
               the mixer; gate, up and their product. Also what the mixer keeps besides (`Mixer.kept_bytes`), w·F per layer
               without torch.compile, and with `qk_norm` w·(N + 2K)·H + 4·(N + K): q, k and v before the norms of q and
               k, and the inverse roots of these norms. A compiled block in fp8 `tensorwise` keeps w·(2D + F) less, by the
               measured peaks of 1b and 3b: as much as the inputs of three of its products.
    selective: L · w·(2D + (2N + 2K)·H + 2F): the input of the block, matrix products and the output of the mixer. Also
               what the mixer of each layer keeps besides, w·D per layer (the last product) without torch.compile, and one
               block of `none`.
    full:      L · w·D: the inputs of the blocks, and one block of `none`.

    Tensor parallelism divides the heads and F by its size, and sequence parallelism also D. With `parallel.keep_gathered`
    each layer keeps 2 · w·D undivided: the inputs of two products. Under `none` they take the place of the norms' outputs.
    """
    model, parallel = config.model, config.parallel
    w, tensor = weight_bytes(config), parallel.tensor
    d = model.hidden_size / (tensor if parallel.sequence else 1)
    q = model.num_heads * model.head_size / tensor
    kv = model.kv_heads * model.head_size / tensor
    f = model.ffn_hidden_size / tensor
    norms = w * (q + 2 * kv) + 4 * (model.num_heads + model.kv_heads) / tensor if model.qk_norm else 0.0
    mixed = [
        mixer.kept_bytes(
            Sizes(
                number=w,
                q=q,
                kv=kv,
                heads=model.num_heads / tensor,
                rotated=model.place_of(mixer).table_bytes(1, 1) > 0,
                ulysses=parallel.ulysses,
                ring=parallel.ring,
            )
        )
        for mixer in model.layer_mixers
    ]
    gathered = 2 * w * model.hidden_size if d < model.hidden_size and config.keeps_gathered() else 0
    block = w * (2 * d + 2 * q + 2 * kv + 3 * f) + (gathered or 2 * w * d) + norms
    if config.compiled() is Compile.none:
        block += w * f
    ends = w * d + (gathered / 2 or w * d)  # the last norm's input and output
    if config.train.recompute is Recompute.none:
        tensorwise = config.train.fp8 is Fp8.tensorwise and config.compiled() is not Compile.none and not gathered
        fewer = len(config.train.fp8_blocks(model.num_layers)) * w * (2 * d + f) if tensorwise else 0.0
        return model.num_layers * block - fewer + sum(mixed) + ends
    kept = w * d
    if config.train.recompute is Recompute.selective:
        products = 3 if config.compiled() is Compile.none else 2
        kept = w * (products * d + 2 * q + 2 * kv + 2 * f) + gathered
    again = sum(mixed) if config.train.recompute is Recompute.selective else 0.0
    return model.num_layers * kept + again + block + max(mixed) + ends


def slot_bytes_per_token(config: Config) -> int:
    """Returns the bytes per token of a microbatch in the two slots of `parallel.copy_engines` (ssscale/parallel/copies.py)."""
    return 2 * weight_bytes(config) * config.model.hidden_size if config.copies_tokens() else 0


def logit_bytes(config: Config) -> float:
    """Estimates the bytes per element of the logits [T, V / tensor] at the peak: w bytes each for logits and gradient.

    The vocabulary-parallel cross entropy also keeps exp(logits) in fp32. Without torch.compile there are also an fp32 copy
    of the logits and their log-softmax.
    """
    fp32 = 4 if config.parallel.tensor > 1 else 8 if config.compiled() is Compile.none else 0
    return 2 * weight_bytes(config) + fp32
