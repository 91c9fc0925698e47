"""How much the studies train and measure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """Rows of `length` tokens. A step has `rows` rows, a forward pass `microbatch`.

    tokens: of a whole training. rate_tokens: of a training that tries a learning rate. warmup: share of the whole.
    speed: tokens per second alone on one H200, for the declared minutes.
    """

    length: int
    rows: int
    microbatch: int
    tokens: int
    rate_tokens: int
    warmup: float
    speed: float


@dataclass(frozen=True)
class Recall:
    """Of MQRAR: sequences, models, the batch and steps of a training, and those of trying the learning rates.

    12,000 steps of 512 sequences are as many as the 64 passes over 100,000 of arXiv:2312.04927, from which the task is
    taken.
    """

    length: int = 768
    keys: int = 4096
    values: int = 4096
    width: int = 256
    pairs: tuple[int, ...] = (128, 32, 192)
    batch: int = 512
    steps: int = 12_000
    rate_batch: int = 128
    rate_steps: int = 3_000
    minutes: float = 8.0  # of a training on an H200: a step takes 27 ms (softmax) or 36 ms


@dataclass(frozen=True)
class Cores:
    """Of the study of softmax, SSMax and stick-breaking at 162m.

    keys: arguments of every training. evals: validations of a training, on eval_rows rows. by_position, windows: of the
    loss by position. questions: of RULER's kinds, of up to tune_length tokens. ruler_tasks: "ruler" for all 13.
    table_length: tokens of the longest text of the tables.
    """

    form: Training = Training(2048, 64, 32, 262_144_000, 52_428_800, 1 / 20, 0.45e6)
    keys: tuple[str, ...] = (
        "model.vocab_size=50304",
        "train.stages.0.schedule.kind=cosine",
        "train.stages.0.schedule.floor=0.1",
    )
    evals: int = 40
    eval_rows: int = 512
    by_position: int = 20_480
    windows: int = 150
    questions: int = 6144
    tune_length: int = 2048
    tune_epochs: float = 4.0
    tune_rate: float = 3e-4
    tune_batch: int = 64
    tune_microbatch: int = 32
    needle_lengths: str = "2048,8192,20480"
    samples: int = 100
    skip_lengths: str = "4096,8192,16384,32768"
    ruler_tasks: str = "ruler"
    ruler_lengths: str = "2048,4096,8192,16384"
    ruler_samples: int = 100
    table_length: int = 2048


@dataclass(frozen=True)
class Size:
    """keys: arguments of every training. widths: arguments that double the width, with heads as wide as before.

    rates: learning rates to try. further: how many more at most, while the best is at the edge of those tried.
    compared: the learning rates of the whole trainings of some methods.
    lengths: context lengths of the position study.
    """

    keys: tuple[str, ...] = ()
    widths: tuple[str, ...] = ("model.hidden_size=1024", "model.ffn_hidden_size=2816", "model.num_heads=32")
    heads: str = "model.num_heads=8"
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    further: int = 2
    compared: tuple[float, ...] = (1e-3, 2e-3)
    eval_rows: int = 1024
    ssmax: Training = Training(1024, 128, 64, 209_715_200, 52_428_800, 1 / 16, 0.9e6)
    positions: Training = Training(2048, 64, 32, 78_643_200, 26_214_400, 1 / 12, 0.85e6)
    control: int = 8192
    by_position: int = 20_000
    windows: int = 300
    epochs: float = 10.0
    needle_lengths: str = "1000,2000,4000,6000,8000,10000"
    depths: str = "10,30,50,70,90"
    samples: int = 300
    score_length: int = 8000
    trials: int = 100
    lengths: str = "2048,4096,8192,16384,32768,65536"
    long_windows: int = 32
    mqrar: Recall = Recall()
    cores: Cores = Cores()


FULL = Size()
# The same commands in seconds on a CPU, for tests.
TINY = Size(
    keys=(
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.ffn_hidden_size=48",
        "model.num_heads=2",
        "model.vocab_size=400",
        "model.init_std=0.1",
        "data.num_workers=0",
    ),
    widths=("model.hidden_size=64", "model.num_heads=4"),
    heads="model.num_heads=1",
    further=0,
    eval_rows=4,
    ssmax=Training(64, 4, 4, 4 * 64 * 16, 4 * 64 * 4, 1 / 16, 1e4),
    positions=Training(64, 4, 4, 4 * 64 * 8, 4 * 64 * 4, 1 / 8, 1e4),
    control=128,
    by_position=128,
    windows=3,
    epochs=2,
    needle_lengths="150",
    depths="20,80",
    samples=2,
    score_length=150,
    trials=3,
    lengths="64,128",
    long_windows=3,
    mqrar=Recall(16, 8, 8, 16, (2,), 128, 2, 128, 2, 1.0),
    cores=Cores(
        Training(64, 4, 4, 4 * 64 * 24, 4 * 64 * 4, 1 / 8, 1e4),
        keys=("train.stages.0.schedule.kind=cosine", "train.stages.0.schedule.floor=0.1"),
        evals=4,
        eval_rows=4,
        by_position=256,
        windows=3,
        questions=8,
        tune_length=1536,
        tune_epochs=2,
        tune_batch=4,
        tune_microbatch=2,
        needle_lengths="150",
        samples=2,
        skip_lengths="64",
        ruler_tasks="niah_multikey_2",
        ruler_lengths="1280",
        ruler_samples=2,
        table_length=256,
    ),
)
SIZES = {"full": FULL, "tiny": TINY}
