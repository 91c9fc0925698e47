"""Keys of the configuration whose values are words, with what each word means."""

from enum import StrEnum


class DecayShape(StrEnum):
    """How the factor of the learning rate falls from 1 at the start of the decay to `floor` at its end."""

    exponential = "exponential"
    linear = "linear"
    sqrt = "sqrt"


class Precision(StrEnum):
    """Precision of training. `auto` is bf16 (with fp32 master weights) on a GPU and fp32 on a CPU."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Recompute(StrEnum):
    """Activations that backward computes again: `none`, the cheap ones (`selective`), or whole blocks (`full`)."""

    none = "none"
    selective = "selective"
    full = "full"


class Compile(StrEnum):
    """What torch.compile compiles. `auto` is `none` on a CPU; `Config.compiled` has the rule for GPUs."""

    auto = "auto"
    none = "none"
    block = "block"
    model = "model"


class Fp8(StrEnum):
    """The recipe of linear layers in fp8 (ssscale/parallel/fp8.py): scales per tensor or row, and dW in fp8 or bf16."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"
    rowwise_bf16_dw = "rowwise_bf16_dw"


class Auto(StrEnum):
    """Stands for a number that the run chooses by itself."""

    auto = "auto"


class ShardWithin(StrEnum):
    """Among which ranks ZeRO stage 1 divides the optimizer's state: all that hold the same weights, or those of a node."""

    all = "all"
    node = "node"
