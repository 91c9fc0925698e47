"""Decides whether the blocks of a run are launched as CUDA graphs (`train.cuda_graphs`), and says what prevents it."""

from ssscale.config.choices import Auto, Compile, Fp8, Precision, Recompute
from ssscale.config.schema import Config
from ssscale.errors import UserError


def obstacle(config: Config, gpu: bool) -> str | None:
    """Returns why the blocks of a run cannot be launched as graphs, to follow on the key, or None if they can."""
    train, parallel = config.train, config.parallel
    compiled = config.compiled(gpu)
    with_terms = [name for name, mixer in config.model.used.items() if mixer.terms]
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
    if with_terms:
        return f"does not go with the mixer {with_terms[0]}, whose blocks return terms of the loss"
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
