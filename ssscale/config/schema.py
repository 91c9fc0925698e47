"""The configuration of a run as frozen dataclasses. They define all keys with types, defaults and units.

`ssscale.config` fills them from YAML files and `key=value` arguments. `ssscale.validate` checks combinations of keys.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ssscale.config.choices import Auto, Compile, DecayShape, Fp8, Precision, Recompute, ShardWithin
from ssscale.config.registry import MIXERS, OPTIMIZERS, POSITIONS, Sectioned


@dataclass(frozen=True)
class MixerConfig(Sectioned):
    """One section of options per registered mixer (ssscale/model/mixers), such as `model.mixer.ssmax.scale`."""

    registry = MIXERS


@dataclass(frozen=True)
class PositionConfig(Sectioned):
    """The position method of a model, and one section of options per method (ssscale/model/positions).

    In a model with several mixers, those that take no positions go without.
    """

    registry = POSITIONS

    method: str = "rope"  # position method (ssscale/model/positions): rope, nope, alibi, fire
    window: int | None = None  # sliding window: number of keys that a query attends to, including its own; None: all


def mixer_config(name: str | None = None, **options: object) -> Any:
    """Returns `model.mixer` with the given options of one mixer and the defaults of all others."""
    made = MIXERS.section(MixerConfig)()
    return made if name is None else replace(made, **{name: MIXERS[name](**options)})


def position_config(method: str = "rope", window: int | None = None, **options: object) -> Any:
    """Returns `model.position` with the given method and its options."""
    made = POSITIONS.section(PositionConfig)(method=method, window=window)
    return replace(made, **{method: POSITIONS[method](**options)}) if options else made


@dataclass(frozen=True)
class WidthConfig:
    """Width transfer: muP (arXiv:2203.03466) in the form of the Power recipe (arXiv:2408.13359).

    m_width = hidden_size / base_hidden_size. Divisors that are not given follow from it. The defaults change nothing.
    """

    base_hidden_size: int | None = None  # the width at which the learning rate was tuned; None: m_width = 1
    embedding_multiplier: float = 1.0  # factor of the embedding's output
    residual_multiplier: float = 1.0  # factor of what attention and MLP add to the residual stream
    attention_scale: float | None = None  # factor of q·k; None: 1 / sqrt(head_dim)
    logits_divisor: float | None = None  # divides the logits; None: m_width
    matrix_lr_divisor: float | None = None  # divides the lr of inner matrices; None: m_width (for Muon its square root)
    matrix_init_divisor: float | None = None  # divides init_std of the same matrices; None: sqrt(m_width)


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 12  # number of blocks of attention and MLP
    hidden_size: int = 768  # D, width of the residual stream
    ffn_hidden_size: int = 2048  # inner width of SwiGLU
    num_heads: int = 12  # N, number of query heads
    num_kv_heads: int | None = None  # K, number of key/value heads; None: num_heads
    head_dim: int | None = None  # H, dimension of a head; None: hidden_size / num_heads
    vocab_size: int = 50_257  # at least the tokenizer's size; tensor parallelism pads its own copy
    tie_embeddings: bool = False  # the head shares the embedding's weight
    qkv_bias: bool = False  # biases of the query, key and value projections, as in Qwen2
    qk_norm: bool = False  # RMSNorm of each head of q and k, before they are rotated, as in Qwen3
    norm_eps: float = 1e-5  # ε of RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    depth_scaled_init: bool = True  # sqrt(2 · num_layers) divides init_std if a matrix writes to the residual stream
    mixers: list[str] = field(default_factory=lambda: [MIXERS.default])  # pattern that repeats over the layers
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
        """The mixers of the model with their options, by name."""
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
        """Returns the position method of layers with this mixer, which is none if the mixer takes none."""
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
    path: str = "data/pretrain"  # folder that `python -m data_prep` has made (it contains manifest.json)
    length: int = 4096  # tokens per row; the shards must have been packed to it
    one_document: bool = False  # treat every row as one document, whatever it contains (as in the SSMax study)
    shuffle_seed: int = 0  # seed of the order of rows
    num_workers: int = 2  # processes per rank that read rows ahead; 0: the rank reads by itself
    prefetch: int = 4  # microbatches that each worker prepares ahead
    timeout: float = 600.0  # seconds to wait for a worker's microbatch before the run stops
    cache: str | None = None  # local folder for remote (s3://, gs://) data; auto: on the disk of the node
    cache_gb: float | None = None  # limit for decompressed shards in `cache`; the oldest are dropped. None: no limit
    accept_changed: bool = False  # continue from a checkpoint with other data, of the same tokenizer


@dataclass(frozen=True)
class ScheduleConfig:
    kind: str = "constant"  # schedule (ssscale/train/schedules)
    lr: float = 6e-4  # peak learning rate; under `power` the cap η_max; `decay` does not read it
    warmup_tokens: int = 0  # tokens of warmup in this stage
    decay_tokens: int = 0  # tokens of decay at the end of this stage
    decay_shape: DecayShape = DecayShape.exponential  # shape of the decay
    floor: float = 0.0  # fraction of the learning rate that is left at the end of the decay
    power_a: float = 4.0  # a in η(n) = min(lr, batch · a · n^b) of `power`
    power_b: float = -0.51  # b of `power`


class ModelChanges(dict[str, Any]):
    """Keys of the section `model` as a tree of plain values. `ssscale.config.load` checks it against `ModelConfig`."""


@dataclass(frozen=True)
class BatchWarmup:
    batch_size: int = 1  # rows per step
    tokens: int = 1  # tokens to train with it, in whole steps


@dataclass(frozen=True)
class StageConfig:
    name: str = "train"  # name in the log and the metrics
    tokens: int = 1_000_000_000  # tokens of the stage
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mix: dict[str, float] | None = None  # source name → share of the rows; None: in proportion to their sizes
    # Changes from this stage on. None: as before.
    model: ModelChanges | None = None  # keys of `model` to change: mixers and their options, position
    length: int | None = None  # tokens per row; needs data_path, because rows are packed to one length
    data_path: str | None = None  # data folder
    batch_size: int | None = None  # rows per optimizer step
    microbatch: int | Auto | None = None  # as `train.microbatch`
    batch_warmup: list[BatchWarmup] = field(default_factory=list)  # smaller batches at the start of the stage


@dataclass(frozen=True)
class OptimizerConfig(Sectioned):
    """Options of every optimizer, and one section of options per optimizer (ssscale/optim)."""

    registry = OPTIMIZERS

    name: str = "adamw"  # optimizer (ssscale/optim)
    weight_decay: float = 0.1  # of parameters of rank 2 and more; a step subtracts lr · weight_decay · weight
    vector_lr_multiplier: float = 1.0  # scales the learning rate of rank-1 parameters: norms, SSMax's s, b and p_n
    clip: float = 1.0  # largest global gradient norm; 0 = no clipping

    @property
    def chosen(self) -> Any:
        """The optimizer with its options. Raises UserError for a name that is not registered."""
        OPTIMIZERS[self.name]  # the sentence where it is not registered
        return getattr(self, self.name)


def optimizer_config(name: str = "adamw", **options: object) -> Any:
    """Returns `optimizer` with the given options of the optimizer `name` and the defaults of all others."""
    return OPTIMIZERS.section(OptimizerConfig)(name=name, **{name: OPTIMIZERS[name](**options)})


@dataclass(frozen=True)
class TrainConfig:
    batch_size: int = 1024  # rows per optimizer step, over all ranks
    microbatch: int | Auto = (
        4  # rows per rank and forward pass; auto: as many as fit the GPU (ssscale/train/microbatch.py)
    )
    stages: list[StageConfig] = field(default_factory=lambda: [StageConfig()])
    max_steps: int | None = None  # stop after this many steps even within a stage; 0 only saves the initial checkpoint
    seed: int = 0  # seed of the initial weights
    precision: Precision = Precision.auto  # auto: bf16 with fp32 master weights on a GPU, fp32 on a CPU
    compile: Compile = Compile.auto  # auto: blocks on a GPU; nothing on a CPU (docs/guide/training.md)
    compile_exchanges: bool | Auto = (
        Auto.auto  # with tensor or Ulysses ranks, compile whole blocks (docs/guide/parallelism.md)
    )
    cuda_graphs: bool | Auto = (
        Auto.auto  # launch each compiled block at once; auto: tensor ranks, one document per row (docs/guide/training.md)
    )
    recompute: Recompute = Recompute.none  # what backward computes again: none, the cheap activations, whole blocks
    fp8: Fp8 = Fp8.none  # linear layers of blocks in fp8, on H100 and newer GPUs (docs/guide/training.md)
    fp8_bf16_blocks: list[int] = field(default_factory=lambda: [0, -1])  # blocks that fp8 leaves in bf16; -1: the last
    deterministic: bool = False  # the same bits in every run on GPUs, at a lower speed (docs/guide/training.md)
    z_loss: float = 0.0  # weight of ln²Z, the squared logsumexp of the logits (arXiv:2204.02311, Section 5)
    log_every: int = 10  # steps between records of metrics
    eval_every: int = 1000  # steps between validations (and after the last step); 0 = never
    eval_rows: int = 256  # validation rows, the same each time
    tasks: list[str] = field(default_factory=list)  # of lm-eval, evaluated during training (docs/guide/evaluation.md)
    task_every: int = 0  # steps between evaluations of `tasks` (and after the last step); 0 = never
    task_limit: int | None = None  # evaluate only this many examples of each task; None: all
    task_data: str = "data/eval"  # folder of local copies of the tasks' data
    task_include: list[str] = field(default_factory=list)  # folders with YAML files of your own tasks
    save_every: int = (
        1000  # steps between checkpoints (and after the last step); 0: only if the run is stopped or a stage
        # changes the model
    )
    save_background: bool = True  # write checkpoints while training continues
    observe_every: int = 1000  # steps between looks into attention (s by head, unspent stick, live tiles); 0 = never
    profile: int | None = None  # step whose torch profiler trace (and GPU memory snapshot) is written to profile/
    profile_ranks: int = 1  # ranks of which a trace is written, from the first on
    wandb: bool = False  # also send metrics to Weights & Biases, if its package is installed
    max_skipped: int = 10  # consecutive steps with NaN or Inf before the run returns to its last checkpoint
    spike_z: float = 8.0  # a loss this many robust deviations above the last 100 is logged with its rows; 0 = never
    watchdog: float = 1800.0  # seconds without progress after which the run ends and names the rank; 0 = never
    guard_every: int = 100  # steps between comparisons of weights that must be equal on several ranks; 0 = never
    straggler_every: int = (
        100  # steps between comparisons of the ranks' computing times, which name slow ranks; 0 = never
    )
    preflight: bool | Auto = Auto.auto  # measure and check all devices and links before the run; auto: under Slurm
    keep: int = 2  # number of newest checkpoints to keep
    keep_every: int = 0  # also keep checkpoints at multiples of this many steps; 0 = none
    keep_best: bool = (
        False  # also keep the checkpoint with the lowest validation loss, of those saved at steps that were evaluated
    )

    def fp8_blocks(self, num_layers: int) -> list[int]:
        """Returns the blocks whose linear layers multiply in fp8, of a model with `num_layers` blocks."""
        if self.fp8 is Fp8.none:
            return []
        left = {block % num_layers for block in self.fp8_bf16_blocks}
        return [block for block in range(num_layers) if block not in left]

    @property
    def microbatch_rows(self) -> int:
        """`microbatch` as a number. `auto` has been resolved before anything runs."""
        assert not isinstance(self.microbatch, Auto), "train.microbatch=auto is not resolved"
        return self.microbatch


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1  # tensor-parallel ranks, which split each matrix
    sequence: bool = True  # also split the residual stream over the tensor-parallel ranks
    keep_gathered: bool | Auto = (
        Auto.auto  # under `sequence`, keep gathered tokens for backward; else they are gathered again
    )
    overlap_gathers: bool = False  # under `sequence`, multiply a rank's own tokens while those of others are gathered
    copy_engines: bool | Auto = (
        Auto.auto  # under `sequence`, exchange tokens beside products by copy engines, on one host
    )
    ulysses: int = 1  # ranks that split a microbatch's tokens and exchange them for heads in attention
    ring: int = 1  # ranks that split them and pass keys and values around; with both, ulysses · ring ranks
    zero_stage: int = 1  # what data-parallel ranks split: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights
    overlap: bool = False  # hide the exchange of gradients and weights behind computation; for zero_stage=1
    overlap_bf16: bool = False  # with overlap, sum gradients over the ranks in bf16, half the bytes, instead of fp32
    shard_within: int | ShardWithin = (
        ShardWithin.all  # with overlap, which ranks split the optimizer's state: all, or those of a node, so that
        # each node holds all of it; N: as if every node had N ranks, for tests. Not run on a GPU yet
    )

    @property
    def context(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Config:
    name: str = "run"  # name of the run; default: the name of its file
    run_dir: str | None = None  # folder of the run; None: runs/<name>
    init_from: str | None = None  # run or checkpoint to take weights from; softmax's may become ssmax's
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

    def whole_blocks(self, gpu: bool = True) -> bool:
        """Whether tensor-parallel and Ulysses ranks compile whole blocks (`train.compile_exchanges`).

        `auto`: on GPUs, tensor-parallel ranks without context parallelism and ZeRO-3, the layouts that were measured.
        """
        train, parallel = self.train, self.parallel
        if not isinstance(train.compile_exchanges, Auto):
            return train.compile_exchanges
        measured = parallel.tensor > 1 and parallel.context == 1 and parallel.zero_stage < 3
        return gpu and measured and train.compile in (Compile.auto, Compile.block)

    def keeps_gathered(self, gpu: bool = True) -> bool:
        """Whether backward finds the gathered tokens kept (`parallel.keep_gathered`). `auto`: if it recomputes nothing."""
        parallel = self.parallel
        if not isinstance(parallel.keep_gathered, Auto):
            return parallel.keep_gathered
        return parallel.sequence and self.whole_blocks(gpu) and self.train.recompute is Recompute.none

    @property
    def copies_gradients(self) -> bool:
        """Whether `parallel.overlap` exchanges by copy engines. `parallel.copy_engines=auto` does not choose this."""
        return self.parallel.overlap and self.parallel.copy_engines is True

    def copies_tokens(self, gpu: bool = True) -> bool:
        """Whether tensor-parallel ranks exchange tokens by copy engines (`parallel.copy_engines`).

        `auto`: on GPUs, in bf16, unless `overlap_gathers` is asked for. `build_model` sees whether they can.
        """
        parallel = self.parallel
        shared = parallel.tensor > 1 and parallel.sequence and self.whole_blocks(gpu)
        if not isinstance(parallel.copy_engines, Auto):
            return parallel.copy_engines and shared
        return gpu and shared and not parallel.overlap_gathers and self.train.fp8 is Fp8.none

    def breaks_in_blocks(self, gpu: bool = True) -> list[str]:
        """The keys that prevent a block from compiling to one graph, because ranks communicate inside of it.

        With `train.compile_exchanges`, the graph holds the exchanges of tensor parallelism and Ulysses.
        """
        parallel = self.parallel
        sizes = {"tensor": parallel.tensor, "ulysses": parallel.ulysses, "ring": parallel.ring}
        if self.whole_blocks(gpu):
            sizes = {"ring": parallel.ring}
        return [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]

    def gathers_blocks(self, gpu: bool = True) -> bool:
        """Whether ZeRO-3 gathers all weights of a block before it runs, so that the block can be compiled."""
        return self.parallel.zero_stage == 3 and self.compiled(gpu) is Compile.block

    def compiled(self, gpu: bool = True) -> Compile:
        """What `train.compile` means. `auto` is `none` on a CPU, and on a GPU `block` with two exceptions.

        If a block does not compile to one graph, `auto` compiles neither selective recomputation nor under ZeRO-3.
        """
        train = self.train
        if train.compile != Compile.auto:
            return train.compile
        needs_whole = train.recompute is Recompute.selective or self.parallel.zero_stage == 3
        return Compile.block if gpu and not (needs_whole and self.breaks_in_blocks(gpu)) else Compile.none
