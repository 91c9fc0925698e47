"""Decides whether the blocks of a run are launched as CUDA graphs (`train.cuda_graphs`), and says what prevents it."""

from ssscale.config.choices import Auto, Compile, Fp8, Precision, Recompute
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.model.weight import projection_weights


def obstacle(config: Config, gpu: bool) -> str | None:
    """Returns why the blocks of a run cannot be launched as graphs, to follow on the key, or None if they can."""
    train, parallel = config.train, config.parallel
    compiled = config.compiled(gpu)
    if not gpu:
        return "needs GPUs: leave it out on a CPU"
    if compiled is not Compile.block:
        return f"records compiled blocks: use train.compile=block, not {compiled.value}"
    if parallel.zero_stage != 1 or train.precision is Precision.fp32:
        return (
            "needs parallel.zero_stage=1 and bf16, where each gradient is added up before its memory is written again: not "
            f"parallel.zero_stage={parallel.zero_stage} with train.precision={train.precision.value}"
        )
    if parallel.context > 1:
        return "does not go with parallel.ulysses and parallel.ring, whose exchanges graphs cannot hold"
    if parallel.tensor > 1 and not config.copies_tokens(gpu):
        return (
            f"with parallel.tensor={parallel.tensor} needs parallel.copy_engines=true, because graphs cannot hold exchanges of "
            "NCCL"
        )
    if train.recompute is Recompute.full:
        return "does not go with train.recompute=full, which runs each block twice: use selective or none"
    if train.fp8 is not Fp8.none:
        return "does not go with train.fp8, whose casts of the weights are elsewhere in memory at each step"
    return _obstacle_in(config)


def _obstacle_in(config: Config) -> str | None:
    """Returns what prevents it in the model."""
    model = config.model
    for mixer in model.used.values():
        if mixer.terms:
            return f"does not go with the mixer {mixer.name}, whose blocks return terms of the loss"
        if mixer.shared_weights(model, config.data.length):
            return f"does not go with weights that all layers share, which {mixer.name} has as configured"
    if model.place.adds_bias:
        return f"does not go with model.position.method={model.place.name}, which makes a mask for each batch"
    declared = projection_weights(model) | model.place.weights(model)
    for mixer in model.used.values():
        declared |= mixer.weights(model)
    whole = [name for name, weight in declared.items() if weight.split is None]
    if config.parallel.tensor > 1 and whole:
        return (
            f"with parallel.tensor={config.parallel.tensor} does not go with the weights {', '.join(whole)}: NCCL sums their "
            "gradients over the ranks within each block"
        )
    return None


def records_blocks(config: Config, gpu: bool = True) -> bool:
    """Whether blocks are launched as graphs. `auto`: if they can be, where it was measured.

    That is tensor parallelism, where the host is late, with one document in each row.
    """
    asked = config.train.cuda_graphs
    if not isinstance(asked, Auto):
        return asked
    return config.parallel.tensor > 1 and config.data.one_document and obstacle(config, gpu) is None


def check_graphs(config: Config, gpu: bool) -> None:
    """Raises UserError if `train.cuda_graphs=true` asks for graphs that cannot be."""
    found = obstacle(config, gpu)
    if config.train.cuda_graphs is True and found is not None:
        raise UserError(f"train.cuda_graphs=true {found}")
