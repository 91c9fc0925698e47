"""The configuration of a run, as frozen dataclasses: the one list of keys, their types, defaults and units.

`ssscale.config` fills them from YAML files and `key=value` arguments and checks what no single key can say.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ssscale.config.registry import MIXERS, OPTIMIZERS, POSITIONS, Sectioned


class DecayShape(StrEnum):
    """The last part of a schedule, from 1 at its start to `floor` at its end."""

    exponential = "exponential"
    linear = "linear"
    sqrt = "sqrt"


class Precision(StrEnum):
    """`auto` is bf16 (with fp32 master weights) on a GPU and fp32 on a CPU."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Recompute(StrEnum):
    """Activations kept for the backward pass: all, all but the cheap ones, or each block's input only."""

    none = "none"
    selective = "selective"
    full = "full"


class Compile(StrEnum):
    """torch.compile: `auto` is `none` on a CPU, on a GPU `block` or `none` (`Config.compile_on_gpu`)."""

    auto = "auto"
    none = "none"
    block = "block"
    model = "model"


class Auto(StrEnum):
    """In place of a number that a run finds for itself."""

    auto = "auto"


@dataclass(frozen=True)
class MixerConfig(Sectioned):
    """A section of options for each mixer that is registered (ssscale/model/mixers), such as `model.mixer.ssmax.scale`."""

    registry = MIXERS


@dataclass(frozen=True)
class PositionConfig(Sectioned):
    """How a model tells positions apart, and a section of options for each method (ssscale/model/positions).

    Mixers that take no positions go without in a model where others have them.
    """

    registry = POSITIONS

    method: str = "rope"  # of ssscale/model/positions: rope, nope, alibi, fire
    window: int | None = None  # sliding window: keys that a query sees, itself included; None: all


def mixer_config(name: str | None = None, **options: object) -> Any:
    """`model.mixer` with these options of one mixer, the others as by default."""
    made = MIXERS.section(MixerConfig)()
    return made if name is None else replace(made, **{name: MIXERS[name](**options)})


def position_config(method: str = "rope", window: int | None = None, **options: object) -> Any:
    """`model.position` with these options of the method."""
    made = POSITIONS.section(PositionConfig)(method=method, window=window)
    return replace(made, **{method: POSITIONS[method](**options)}) if options else made


@dataclass(frozen=True)
class WidthConfig:
    """Width transfer (muP, arXiv:2203.03466, as the Power recipe uses it, arXiv:2408.13359).

    m_width = hidden_size / base_hidden_size. The three divisors follow from it unless they are given. Every default leaves
    the model as it is.
    """

    base_hidden_size: int | None = None  # the width at which the learning rate was tuned; None: m_width = 1
    embedding_multiplier: float = 1.0  # of the embedding's output
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    logits_divisor: float | None = None  # None: m_width
    matrix_lr_divisor: float | None = None  # of every matrix but embedding and head. None: m_width
    matrix_init_divisor: float | None = None  # of their init_std. None: sqrt(m_width)


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 12  # blocks of attention and MLP
    hidden_size: int = 768  # D, of the residual stream
    ffn_hidden_size: int = 2048  # of the SwiGLU
    num_heads: int = 12  # N query heads
    num_kv_heads: int | None = None  # None: as many as num_heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    vocab_size: int = 50_257  # at least the tokenizer's; tensor parallelism pads its own copy
    tie_embeddings: bool = False  # the head is the embedding
    norm_eps: float = 1e-5  # ε of RMSNorm
    init_std: float = 0.02  # of the initial weights
    depth_scaled_init: bool = True  # init_std / sqrt(2 · num_layers) where a matrix writes to the residual stream
    mixers: list[str] = field(default_factory=lambda: [MIXERS.default])  # a pattern that is repeated over the layers
    mixer: MixerConfig = field(default_factory=mixer_config)
    position: PositionConfig = field(default_factory=position_config)
    width: WidthConfig = field(default_factory=WidthConfig)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def used(self) -> dict[str, Any]:
        """The mixers of the pattern with their options, each once."""
        return {name: self.mixer_called(name) for name in self.mixers}

    def mixer_called(self, name: str) -> Any:
        """Raises UserError for a name that is not registered."""
        MIXERS[name]  # the sentence where it is not registered
        return getattr(self.mixer, name)

    def mixer_of(self, layer: int) -> Any:
        return self.mixer_called(self.mixers[layer % len(self.mixers)])

    @property
    def layer_mixers(self) -> list[Any]:
        return [self.mixer_of(layer) for layer in range(self.num_layers)]

    @property
    def place(self) -> Any:
        """The position method with its options. Raises UserError for a name that is not registered."""
        POSITIONS[self.position.method]  # the sentence where it is not registered
        return getattr(self.position, self.position.method)

    def place_of(self, mixer: Any) -> Any:
        """The position method in layers of this mixer: none where it takes none."""
        return self.place if self.position.method in mixer.positions else mixer.without_position()

    @property
    def m_width(self) -> float:
        base = self.width.base_hidden_size
        return 1.0 if base is None else self.hidden_size / base

    @property
    def logits_divisor(self) -> float:
        given = self.width.logits_divisor
        return self.m_width if given is None else given

    @property
    def matrix_lr_divisor(self) -> float:
        given = self.width.matrix_lr_divisor
        return self.m_width if given is None else given

    @property
    def matrix_init_divisor(self) -> float:
        given = self.width.matrix_init_divisor
        return self.m_width**0.5 if given is None else given


@dataclass(frozen=True)
class DataConfig:
    path: str = "data/pretrain"  # a folder made by `python -m data_prep` (manifest.json lies in it)
    length: int = 4096  # tokens per row; the shards must have been packed to it
    one_document: bool = False  # a row counts as one document whatever lies in it (as the SSMax study trains)
    shuffle_seed: int = 0  # of the order of rows
    num_workers: int = 2  # processes per rank that read rows ahead; 0: the rank itself reads
    prefetch: int = 4  # microbatches a worker prepares ahead
    timeout: float = 600.0  # seconds to wait for a worker's microbatch before the run stops
    cache: str | None = None  # local folder for remote (s3://, gs://) data; auto: on this node's own disk
    cache_gb: float | None = None  # of decompressed shards in `cache`; older ones make room. None: all stay
    accept_changed: bool = False  # go on with a checkpoint though the data is not what it was trained on


@dataclass(frozen=True)
class ScheduleConfig:
    kind: str = "constant"  # of ssscale/train/schedules
    lr: float = 6e-4  # the peak; under `power` the cap η_max
    warmup_tokens: int = 0  # of this stage
    decay_tokens: int = 0  # the last tokens of this stage
    decay_shape: DecayShape = DecayShape.exponential  # of the decay
    floor: float = 0.0  # the fraction of the decay's first learning rate that is left at its end
    power_a: float = 4.0  # η(n) = min(lr, batch · a · n^b)
    power_b: float = -0.51  # the exponent of `power`


class ModelChanges(dict[str, Any]):
    """Part of the section `model`, as a tree of plain values; `ssscale.config.load` checks it against `ModelConfig`."""


@dataclass(frozen=True)
class BatchWarmup:
    batch_size: int = 1  # rows per step
    tokens: int = 1  # as long as this; whole steps


@dataclass(frozen=True)
class StageConfig:
    name: str = "train"  # for the log, and in the metrics
    tokens: int = 1_000_000_000  # of the stage
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mix: dict[str, float] | None = None  # source name → share of the rows; None: by the sources' sizes
    # Changes that hold from this stage on; None: as before.
    model: ModelChanges | None = None  # keys of `model`: mixers and their options, position
    length: int | None = None  # needs data_path: rows are packed to one length
    data_path: str | None = None  # another data folder
    batch_size: int | None = None  # rows per optimizer step
    microbatch: int | Auto | None = None  # as `train.microbatch`
    batch_warmup: list[BatchWarmup] = field(default_factory=list)  # smaller batches that the stage begins with, in turn


@dataclass(frozen=True)
class OptimizerConfig(Sectioned):
    """What holds for every optimizer, and a section of options for each one (ssscale/optim)."""

    registry = OPTIMIZERS

    name: str = "adamw"  # of ssscale/optim
    weight_decay: float = 0.1  # on parameters of rank 2 and more; each step subtracts lr · weight_decay of a weight
    vector_lr_multiplier: float = 1.0  # of the learning rate of parameters of rank 1: norms, SSMax's s, b and p_n
    clip: float = 1.0  # global gradient norm; 0 = no clipping

    @property
    def chosen(self) -> Any:
        """The optimizer with its options. Raises UserError for a name that is not registered."""
        OPTIMIZERS[self.name]  # the sentence where it is not registered
        return getattr(self, self.name)


def optimizer_config(name: str = "adamw", **options: object) -> Any:
    """`optimizer` with these options of the optimizer `name`, everything else as by default."""
    return OPTIMIZERS.section(OptimizerConfig)(name=name, **{name: OPTIMIZERS[name](**options)})


@dataclass(frozen=True)
class TrainConfig:
    batch_size: int = 1024  # rows per optimizer step, over all ranks
    microbatch: int | Auto = (
        4  # rows per rank and forward pass; auto: as many as fit the GPU (ssscale/train/microbatch.py)
    )
    stages: list[StageConfig] = field(default_factory=lambda: [StageConfig()])
    max_steps: int | None = None  # stop after this many steps whatever the stages say; 0 saves what the run begins with
    seed: int = 0  # of the initial weights
    precision: Precision = Precision.auto  # auto: bf16 with fp32 master weights on a GPU, fp32 on a CPU
    compile: Compile = Compile.auto  # auto: blocks on a GPU, nothing on a CPU and under ZeRO-3
    recompute: Recompute = Recompute.none  # activations made again in backward: none, the cheap ones, whole blocks
    z_loss: float = 0.0  # weight of ln²Z, the squared logsumexp of the logits (arXiv:2204.02311, Section 5)
    log_every: int = 10  # steps between records of metrics
    eval_every: int = 1000  # steps; 0 = never. Else also after the last step
    eval_rows: int = 256  # rows of the validation split, the same each time
    tasks: list[str] = field(default_factory=list)  # of lm-eval, evaluated during training (docs/guide/evaluation.md)
    task_every: int = 0  # steps between their evaluations; 0 = never. Else also after the last step
    task_limit: int | None = None  # of the first examples of each
    task_data: str = "data/eval"  # the folder of local copies of their data
    task_include: list[str] = field(default_factory=list)  # folders of your own tasks' YAML files
    save_every: int = 1000  # steps; 0 = never. Else also after the last step
    save_background: bool = True  # write while training goes on
    observe_every: int = 1000  # steps between looks into attention: s by head, unspent stick, live tiles; 0 = never
    profile: int | None = None  # a step whose torch profiler trace (and GPU memory snapshot) goes to profile/
    wandb: bool = False  # metrics also go to Weights & Biases, where its package is installed
    max_skipped: int = 10  # steps in a row with NaN or Inf before the run goes back to its last checkpoint
    spike_z: float = 8.0  # a loss this many robust deviations above the last 100 is noted with its rows; 0 = never
    watchdog: float = 1800.0  # seconds without progress after which the run ends, naming the rank; 0 = never
    guard_every: int = 100  # steps between comparisons of the weights that ranks must hold alike; 0 = never
    keep: int = 2  # newest checkpoints that stay
    keep_every: int = 0  # and those at multiples of this many steps; 0 = none
    keep_best: bool = False  # and the one of lowest validation loss

    @property
    def microbatch_rows(self) -> int:
        """`microbatch` as a number; `auto` has been resolved before anything runs."""
        assert not isinstance(self.microbatch, Auto), "train.microbatch=auto is not resolved"
        return self.microbatch


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1  # ranks that share each matrix
    sequence: bool = True  # split the residual stream over the tensor-parallel ranks
    ulysses: int = 1  # ranks that share a microbatch's tokens and exchange them for heads in attention
    ring: int = 1  # ranks that share them and pass keys and values round; both: ulysses · ring ranks share
    zero_stage: int = 1  # what is divided over replicas: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights

    @property
    def context(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Config:
    name: str = "run"  # the run file's, unless it says otherwise
    run_dir: str | None = None  # None: runs/<name>
    init_from: str | None = None  # a run or checkpoint whose weights this one begins with; softmax's may become ssmax's
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=optimizer_config)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def folder(self) -> str:
        return self.run_dir or f"runs/{self.name}"

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.data.length

    @property
    def breaks_in_blocks(self) -> list[str]:
        """The keys by which a compiled block is not one graph: exchanges between ranks, and ZeRO-3's hooks at every weight."""
        parallel = self.parallel
        sizes = {"tensor": parallel.tensor, "ulysses": parallel.ulysses, "ring": parallel.ring}
        found = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        return [*found, "parallel.zero_stage=3"] if parallel.zero_stage == 3 else found

    @property
    def compile_on_gpu(self) -> Compile:
        """What `auto` is on a GPU: blocks, but under ZeRO-3, and where selective recomputation would need them in one graph."""
        train = self.train
        if train.compile != Compile.auto:
            return train.compile
        torn = train.recompute is Recompute.selective and self.breaks_in_blocks
        return Compile.none if torn or self.parallel.zero_stage == 3 else Compile.block
