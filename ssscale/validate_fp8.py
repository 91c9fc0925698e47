"""Refuses what `train.fp8` does not combine with, and says what would. The GPU is checked by `ssscale.parallel.fp8`."""

from ssscale.config.choices import Compile, Fp8, Precision
from ssscale.config.schema import Config, TrainConfig
from ssscale.errors import UserError

MULTIPLE = 16  # sizes of matrices, as in ssscale/parallel/fp8.py, which needs torch


def check_fp8(config: Config, gpu: bool) -> None:
    """Raises UserError if the linear layers of the model cannot run in fp8 as `config` asks. gpu: whether it runs on GPUs."""
    model, train, parallel = config.model, config.train, config.parallel
    fp8 = f"train.fp8={train.fp8.value}"
    if train.fp8 is Fp8.none:
        if train.fp8_bf16_blocks != TrainConfig().fp8_bf16_blocks:
            raise UserError(f"train.fp8_bf16_blocks={train.fp8_bf16_blocks} has no effect under train.fp8=none")
        return
    if train.precision is Precision.fp32:
        raise UserError(f"{fp8} needs bf16 weights: use train.precision=bf16 or train.fp8=none")
    if parallel.zero_stage == 3:
        raise UserError(
            f"{fp8} does not go with parallel.zero_stage=3, which frees weights between passes, so that they cannot be cast "
            "once per step: use parallel.zero_stage=1 or 2"
        )
    if train.compile is Compile.model:
        raise UserError(
            f"{fp8} does not go with train.compile=model: weights are cast between blocks; use train.compile=block"
        )
    if parallel.tensor > 1 and not config.whole_blocks(gpu):
        raise UserError(
            f"{fp8} with parallel.tensor={parallel.tensor} needs train.compile_exchanges=true: otherwise Megatron-core's "
            "layers run, which do not have this option"
        )
    if config.copies_tokens(gpu):
        raise UserError(
            f"{fp8} does not go with parallel.copy_engines=true, whose products are in bf16: use parallel.copy_engines=false"
        )
    if parallel.overlap_gathers:
        raise UserError(
            f"{fp8} does not go with parallel.overlap_gathers=true, which multiplies tokens before all are there to be scaled: "
            "use parallel.overlap_gathers=false"
        )
    _check_blocks(train, model.num_layers)
    _check_sizes(config)


def _check_blocks(train: TrainConfig, layers: int) -> None:
    for block in train.fp8_bf16_blocks:
        if not -layers <= block < layers:
            raise UserError(
                f"train.fp8_bf16_blocks={train.fp8_bf16_blocks}: there is no block {block} in model.num_layers={layers}"
            )
    if not train.fp8_blocks(layers):
        raise UserError(
            f"train.fp8_bf16_blocks={train.fp8_bf16_blocks} leaves no block of model.num_layers={layers} to "
            f"train.fp8={train.fp8.value}: name fewer blocks, or use train.fp8=none"
        )


def _check_sizes(config: Config) -> None:
    model, tensor = config.model, config.parallel.tensor
    heads = (model.num_heads + 2 * model.kv_heads) * model.head_size
    sizes = {
        "model.hidden_size": (model.hidden_size, 1),
        "model.ffn_hidden_size": (model.ffn_hidden_size, tensor),
        "model.num_heads × head dimension": (model.num_heads * model.head_size, tensor),
        "the rows of queries, keys and values": (heads, tensor),
    }
    for name, (size, ranks) in sizes.items():
        if size % (ranks * MULTIPLE):
            each = f" on each of parallel.tensor={ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"train.fp8={config.train.fp8.value} multiplies matrices whose sizes are multiples of {MULTIPLE}, and {name} "
                f"({size:,}) gives {size / ranks:g}{each}: change the size, or use train.fp8=none"
            )
