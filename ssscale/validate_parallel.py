"""Refuses parallel layouts that cannot run, and says what would."""

import math
from dataclasses import replace

from ssscale.config.choices import Auto, Compile, Precision, Recompute, ShardWithin
from ssscale.config.schema import Config, TrainConfig
from ssscale.errors import UserError
from ssscale.validate_fp8 import check_fp8
from ssscale.validate_graphs import check_graphs


def check_parallel(config: Config, gpu: bool) -> None:
    """Raises UserError if the parallel settings do not fit the model, the row length or each other.

    gpu: whether the run uses GPUs, which decides what `train.precision=auto` means.
    """
    model, train, parallel = config.model, config.train, config.parallel
    tensor = parallel.tensor
    for key in ("num_heads", "kv_heads", "ffn_hidden_size"):
        size = getattr(model, key)
        if size % tensor:
            name = "num_kv_heads" if key == "kv_heads" else key
            raise UserError(
                f"parallel.tensor={tensor} does not divide model.{name}={size}: use {near_divisors(size, tensor)}"
            )
    _check_context(config)
    automatic = isinstance(train.microbatch, Auto)  # the number chosen later is one that tensor divides
    tokens = 0 if automatic else train.microbatch_rows * config.data.length // parallel.context
    if tensor > 1 and parallel.sequence and tokens % tensor:
        share = f", of which a context rank has {tokens}," if parallel.context > 1 else ""
        raise UserError(
            f"parallel.sequence splits a microbatch of {train.microbatch} × {config.data.length} tokens{share} over "
            f"parallel.tensor={tensor} ranks, which does not divide it: set parallel.sequence=false or another "
            "train.microbatch"
        )
    _check_compile(config, gpu)
    check_fp8(config, gpu)
    check_graphs(config, gpu)
    _check_overlap(config)
    _check_copy_engines(config, gpu)
    bf16 = train.precision is Precision.bf16 or (train.precision is Precision.auto and gpu)
    if parallel.zero_stage == 0 and bf16:
        raise UserError(
            "parallel.zero_stage=0 cannot train in bf16: DeepSpeed refuses to accumulate its gradients in fp32 and "
            "returns no gradient norm; use parallel.zero_stage=1 or train.precision=fp32"
        )


def _check_overlap(config: Config) -> None:
    train, parallel = config.train, config.parallel
    if parallel.overlap_bf16 and not parallel.overlap:
        raise UserError(
            "parallel.overlap_bf16=true has no effect without parallel.overlap=true: set both, or leave it out (without "
            "overlap, bf16 runs sum in bf16 anyway)"
        )
    if parallel.shard_within is not ShardWithin.all and not parallel.overlap:
        raise UserError(
            f"parallel.shard_within={parallel.shard_within} needs parallel.overlap=true, because DeepSpeed's own exchange "
            "divides the optimizer's state over all ranks: set both, or use parallel.shard_within=all"
        )
    if parallel.overlap and parallel.zero_stage != 1:
        raise UserError(
            f"parallel.overlap=true needs parallel.zero_stage=1, not {parallel.zero_stage}, which exchanges other things at "
            "other times: use parallel.zero_stage=1 or parallel.overlap=false"
        )
    if parallel.overlap and train.compile is Compile.model:
        raise UserError(
            "parallel.overlap=true does not go with train.compile=model, whose one graph returns all gradients at its end: "
            "use train.compile=block"
        )


def _check_copy_engines(config: Config, gpu: bool) -> None:
    parallel = config.parallel
    if parallel.copy_engines is not True:
        return
    if not config.copies_tokens(gpu) and not parallel.overlap:
        raise UserError(
            "parallel.copy_engines=true has no effect here: it needs parallel.overlap=true, or parallel.tensor > 1 with "
            "parallel.sequence=true and train.compile_exchanges=true"
        )
    if config.copies_tokens(gpu) and parallel.overlap_gathers:
        raise UserError(
            "parallel.copy_engines=true overlaps gathers in its own way: leave parallel.overlap_gathers=true out"
        )


def _check_compile(config: Config, gpu: bool) -> None:
    train, parallel = config.train, config.parallel
    if parallel.tensor > 1 and train.compile is Compile.model:
        raise UserError(
            f"train.compile=model needs parallel.tensor=1, not {parallel.tensor}: tensor parallelism breaks the graph between "
            "blocks; use train.compile=block"
        )
    broken_by = config.breaks_in_blocks(gpu)
    if broken_by and train.recompute is Recompute.selective and train.compile is Compile.block:
        whole = replace(config, train=replace(train, compile_exchanges=True))
        also = "" if whole.breaks_in_blocks(gpu) else ", train.compile_exchanges=true"
        raise UserError(
            f"train.compile=block does not go with train.recompute=selective and {broken_by[0]}: recomputation needs "
            f"each block in one graph, and that breaks it; use train.compile=auto{also} or train.recompute=full"
        )
    for key in ("keep_gathered", "overlap_gathers"):
        if getattr(parallel, key) is True and not config.whole_blocks(gpu):
            raise UserError(
                f"parallel.{key}=true needs train.compile_exchanges=true: otherwise Megatron-core's layers run, which do not "
                "have this option"
            )
        if getattr(parallel, key) is True and parallel.tensor > 1 and not parallel.sequence:
            raise UserError(
                f"parallel.{key}=true has no effect with parallel.sequence=false, which gathers no tokens: use "
                "parallel.sequence=true, or leave it out"
            )


def _check_context(config: Config) -> None:
    model, parallel, length = config.model, config.parallel, config.data.length
    ulysses, ring, position = parallel.ulysses, parallel.ring, config.model.position
    if parallel.context == 1:
        return
    heads = model.kv_heads // parallel.tensor
    if heads % ulysses:
        each = f", {heads} on each of parallel.tensor={parallel.tensor} ranks" if parallel.tensor > 1 else ""
        raise UserError(
            f"parallel.ulysses={ulysses} does not divide the {model.kv_heads} key/value heads of the model{each}: use "
            f"parallel.ulysses={near_divisors(heads, ulysses)}, and parallel.ring for further ranks"
        )
    if length % ulysses:
        raise UserError(
            f"parallel.ulysses={ulysses} does not divide the rows of data.length={length} tokens: use "
            f"{near_divisors(math.gcd(length, heads), ulysses)}"
        )
    if ring > 1 and length % (2 * ring * ulysses):
        half = length // (2 * ulysses) if length % (2 * ulysses) == 0 else 1
        divides = f"use parallel.ring={near_divisors(half, ring)}" if half > 1 else "use parallel.ring=1"
        raise UserError(
            f"parallel.ring={ring} divides each row into {2 * ring} chunks{_among(ulysses)}, and data.length={length} is not "
            f"a multiple of {2 * ring * ulysses}: {divides}, or rows of another length"
        )
    for mixer in config.model.used.values():
        for name, size in (("ulysses", ulysses), ("ring", ring)):
            if size > 1 and not getattr(mixer, name):
                raise mixer.lacks(name, f"parallel.{name}={size} cannot share its tokens out")
    refusal = config.model.place.refuses_ring() if ring > 1 else None
    if refusal is not None:
        raise UserError(refusal)
    if position.window is not None and ring > 1:
        raise UserError(
            f"model.position.window={position.window} does not go with parallel.ring={ring}, which passes all keys to all "
            "ranks: use parallel.ulysses instead"
        )
    if config.train.compile is Compile.model:
        raise UserError(
            f"train.compile=model needs parallel.ulysses=1 and parallel.ring=1, not {ulysses} and {ring}: their "
            "communication breaks the graph in every block; use train.compile=block"
        )


def _among(ulysses: int) -> str:
    return f", shared by {ulysses} Ulysses ranks" if ulysses > 1 else ""


def check_world(config: Config, world_size: int) -> None:
    """Raises UserError if the processes or the batch cannot be divided as `config` asks. world_size: processes."""
    train, tensor, context = config.train, config.parallel.tensor, config.parallel.context
    if world_size % tensor:
        raise UserError(
            f"parallel.tensor={tensor} does not divide the {world_size} processes of this run: "
            f"use {near_divisors(world_size, tensor)}, or a multiple of {tensor} processes"
        )
    ranks = world_size // (tensor * context)
    if world_size % (tensor * context):
        each = f"parallel.ulysses={config.parallel.ulysses} × parallel.ring={config.parallel.ring}"
        raise UserError(
            f"{each} = {context} context ranks do not divide the {world_size // tensor} processes that "
            f"parallel.tensor={tensor} leaves of {world_size}: use {near_divisors(world_size // tensor, context)} of them"
        )
    within = config.parallel.shard_within
    if not isinstance(within, ShardWithin):
        check_node(within, within, tensor, world_size)
    together = ranks if isinstance(train.microbatch, Auto) else train.microbatch * ranks
    if train.batch_size % together:
        below = train.batch_size // together * together
        near = alternatives([str(size) for size in (below, below + together) if size])
        if isinstance(train.microbatch, Auto):
            processes = near_divisors(train.batch_size, ranks, most=2, times=tensor * context)
            raise UserError(
                f"train.batch_size={train.batch_size} is not a multiple of the {ranks} data-parallel ranks of "
                f"{world_size} processes: use {processes} processes, or train.batch_size={near}{_ulysses_hint(config, ranks)}"
            )
        raise UserError(
            f"train.batch_size={train.batch_size} is not a multiple of the {together} rows that {ranks} data-parallel "
            f"ranks of train.microbatch={train.microbatch} take at once: "
            f"use train.batch_size={near}{_microbatch_hint(train, ranks)}"
        )


def check_node(within: int | ShardWithin, node: int, tensor: int, world_size: int) -> None:
    """Raises UserError unless nodes of `node` ranks can hold all shards of the optimizer's state (`parallel.shard_within`).

    within: the value of this key. tensor: `parallel.tensor`. world_size: ranks of the run.
    """
    if world_size % node:
        raise UserError(
            f"parallel.shard_within={within} does not divide the {world_size} ranks of this run into nodes of {node}: use "
            f"{near_divisors(world_size, node)}, or parallel.shard_within=all"
        )
    if node % tensor:
        raise UserError(
            f"parallel.shard_within={within} needs whole tensor-parallel groups on a node, and parallel.tensor={tensor} does "
            f"not divide its {node} ranks: use parallel.tensor={near_divisors(node, tensor)}, or parallel.shard_within=all"
        )


def check_copies_within_node(config: Config, shards: int, node: int) -> None:
    """Raises UserError if ranks of several nodes would exchange by copy engines (`parallel.copy_engines`).

    shards: ranks that divide the optimizer's state. node: ranks of a node.
    """
    parallel = config.parallel
    together = parallel.tensor * (shards if parallel.overlap else 1)
    if parallel.copy_engines is True and together > node:
        within = " or parallel.shard_within=node" if parallel.tensor <= node else ""
        raise UserError(
            f"parallel.copy_engines=true is for GPUs of one node, which has {node}, and here {together} exchange "
            f"with each other: use parallel.copy_engines=false{within}"
        )


def _microbatch_hint(train: TrainConfig, ranks: int) -> str:
    """Names values of train.microbatch that divide the batch, if there are any."""
    if train.batch_size % ranks:
        return ""
    return f", or train.microbatch={near_divisors(train.batch_size // ranks, train.microbatch_rows)}"


def _ulysses_hint(config: Config, ranks: int) -> str:
    """Suggests parallel.ulysses if there are more ranks than rows and the model allows ranks to share a row."""
    share = ranks // config.train.batch_size
    if share < 2 or ranks % config.train.batch_size or config.parallel.context > 1:
        return ""
    shared = replace(config, parallel=replace(config.parallel, ulysses=share))
    try:
        _check_context(shared)
    except UserError:
        return ""
    return f", or parallel.ulysses={share}, by which {share} ranks share a row"


def near_divisors(number: int, near: int, most: int = 6, times: int = 1) -> str:
    """Returns the divisors of `number` closest to `near`, each multiplied by `times`, as text. At most `most` of them."""
    lower = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*lower, *(number // n for n in lower)})
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - near))[:most])
    return alternatives([str(n * times) for n in nearest])


def alternatives(names: list[str]) -> str:
    """Joins the names as in `a, b or c`."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
