"""What a run needs of each GPU, by arithmetic: no torch, no GPU.

The model is DeepSpeed's mixed precision: weights in bf16, gradients accumulated in fp32, and on each data-parallel rank
its share of fp32 master weights and of the optimizer's states (`ssscale.optim.base`). Under `precision=fp32` weights take
4 bytes. Activations are what autograd keeps of compiled blocks, as counted with saved-tensor hooks on our own decoder.
"""

from dataclasses import dataclass, fields, replace

from ssscale.config.schema import Auto, Compile, Config, Precision, Recompute
from ssscale.errors import UserError
from ssscale.model.flops import PEAK_FLOPS, count_parameters, flops_per_token, parameters_by_part
from ssscale.model.mixers.base import Sizes
from ssscale.train.schedule import total_tokens
from ssscale.train.stages import Plan

MASTER_BYTES = 4  # of a weight in fp32
REDUCE_BUCKET = 500_000_000  # elements that DeepSpeed's ZeRO 2 and 3 gather before they reduce them


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step. The CUDA context, NCCL and fragmentation (1 to 3 GiB) are not in it."""

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
    parameters: int
    flops_per_token: float  # 6N + 12·L·d·S
    flops_per_token_causal: float  # 6N + 6·L·d·S
    memory: Memory
    tokens_per_second_per_gpu: float
    tokens_per_day: float
    tokens: int
    steps: int
    days: float


def estimate(config: Config, gpus: int, mfu: float, peak: float = PEAK_FLOPS) -> Estimate:
    """`mfu` counts 6N + 12·L·d·S FLOPs a token, as published figures mostly do. `config` has passed `validate`."""
    length = config.data.length
    flops = flops_per_token(config.model, length, causal_half=False)
    plan = Plan(config)
    tokens = min(total_tokens(config.train.stages), plan.tokens(plan.total_steps))
    a_day = gpus * mfu * peak / flops * 86_400
    return Estimate(
        parameters=count_parameters(config.model, length),
        flops_per_token=flops,
        flops_per_token_causal=flops_per_token(config.model, length, causal_half=True),
        memory=memory_per_gpu(config, gpus),
        tokens_per_second_per_gpu=mfu * peak / flops,
        tokens_per_day=a_day,
        tokens=tokens,
        steps=plan.total_steps,
        days=tokens / a_day,
    )


def memory_per_gpu(config: Config, gpus: int) -> Memory:
    """Bytes by part at the end of a forward pass, when all activations live.

    N' = parameters of one tensor-parallel rank, D = data · context ranks, w = 2 bytes (bf16; 4 in fp32), o = the bytes of the
    optimizer's states (8 for AdamW):

    | ZeRO | weights | gradients | optimizer |
    |---|---|---|---|
    | 0 | w·N' | w·N' | o·N' (fp32: the weights are the master) |
    | 1 | w·N' | 4·N' + w·(largest matrix, on its way to the sum) | (4 + o)·N'/D |
    | 2 | w·N' | 4·N'/D + w·(bucket) | (4 + o)·N'/D |
    | 3 | w·N'/D + w·(one block) | 4·N'/D + w·(bucket) | (4 + o)·N'/D |
    """
    model, train, parallel = config.model, config.train, config.parallel
    tensor, stage = parallel.tensor, parallel.zero_stage
    ranks = gpus // tensor  # that hold the same weights: data and context ranks
    width = weight_bytes(config)
    parts = parameters_by_part(model, config.data.length)
    n = (parts["embedding"] + parts["matrices"]) / tensor + parts["vectors"]
    block = parts["matrices"] / model.num_layers / tensor
    largest = model.hidden_size * max(model.vocab_size, 2 * model.ffn_hidden_size) / tensor
    partitioned = 4 * n / ranks + width * min(n, REDUCE_BUCKET)
    kept = config.optimizer.chosen.state_bytes
    tokens = train.microbatch_rows * config.data.length // parallel.context
    return Memory(
        weights=width * (n if stage < 3 else n / ranks + block),
        gradients=(width * n, 4 * n + width * largest, partitioned, partitioned)[stage],
        optimizer=kept * n if stage == 0 else (MASTER_BYTES + kept) * n / ranks,
        activations=tokens * activation_bytes_per_token(config)
        + model.place.kept_bytes(model.num_heads / tensor, config.data.length),
        logits=tokens * model.vocab_size / tensor * logit_bytes(config),
    )


def check_memory(config: Config, gpus: int, room: int) -> None:
    """Raise UserError where no stage can be trained in `room` bytes on each of so many GPUs, or processes without one.

    The arithmetic leaves out what it cannot know and may be wrong by a little, so it refuses what cannot be right: more than
    `room` for weights, gradients and optimizer, or twice as much in all.
    """
    for own in Plan(config).configs:
        if isinstance(own.train.microbatch, Auto):
            own = replace(own, train=replace(own.train, microbatch=1))  # what `auto` is at least
        memory = memory_per_gpu(own, gpus)
        kept = memory.weights + memory.gradients + memory.optimizer
        if kept > room or memory.total > 2 * room:
            part = "weights, gradients and optimizer" if kept > room else "activations and logits"
            needed = kept if kept > room else memory.activations + memory.logits
            raise UserError(
                f"{part} take {needed / 2**30:,.0f} GiB on each of {gpus} ranks, which have {room / 2**30:,.0f}: make the "
                "model or train.microbatch smaller, or take more ranks (launch/estimate.py shows the parts)"
            )


def check_weights(config: Config, width: int, room: int) -> None:
    """Raise UserError where a rank's weights of `width` bytes each, with the table of positions, are more than `room`."""
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
    """Bytes that one token of a microbatch leaves on one GPU for the backward pass, all layers together.

    With w bytes an element, N and K query and key/value heads of H dimensions, hidden size D and ffn size F:

    none:      L · w·(4D + (N + 2K)·H + N·H + 3F): both norms' inputs and outputs; q, k, v as one matrix; the mixer's
               output; gate, up and their product; and what the mixer keeps besides (`Mixer.kept_bytes`); without
               torch.compile w·F more
    selective: L · w·(2D + (2N + 2K)·H + 2F): the block's input, matrix products and mixing only (which includes what the
               mixer keeps), and one block of `none`; without torch.compile w·D more, the last product
    full:      L · w·D: the blocks' inputs, and one block of `none`

    Tensor parallelism splits heads and F, sequence parallelism also D.
    """
    model, parallel = config.model, config.parallel
    w, tensor = weight_bytes(config), parallel.tensor
    d = model.hidden_size / (tensor if parallel.sequence else 1)
    q = model.num_heads * model.head_size / tensor
    kv = model.kv_heads * model.head_size / tensor
    f = model.ffn_hidden_size / tensor
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
    block = w * (4 * d + 2 * q + 2 * kv + 3 * f)
    if config.compile_on_gpu is Compile.none:
        block += w * f
    ends = 2 * w * d  # the last norm's input and output
    if config.train.recompute is Recompute.none:
        return model.num_layers * block + sum(mixed) + ends
    kept = w * d
    if config.train.recompute is Recompute.selective:
        products = 3 if config.compile_on_gpu is Compile.none else 2
        kept = w * (products * d + 2 * q + 2 * kv + 2 * f)
    again = sum(mixed) if config.train.recompute is Recompute.selective else 0.0
    return model.num_layers * kept + again + block + max(mixed) + ends


def logit_bytes(config: Config) -> float:
    """Bytes an entry of [tokens, vocabulary / TP] at the peak: the logits and their gradient in w bytes each.

    The vocabulary-parallel cross entropy keeps exp(logits) in fp32 beside them; without torch.compile an fp32 copy of
    the logits and their log-softmax live too.
    """
    fp32 = 4 if config.parallel.tensor > 1 else 8 if config.compile_on_gpu is Compile.none else 0
    return 2 * weight_bytes(config) + fp32
