"""The commands that jobs are made of."""

from collections.abc import Sequence
from pathlib import Path

from eval.papers.study.jobs import Place, Step
from eval.papers.study.sizes import Size, Training
from ssscale.options import last_of_each

START = 0.6  # minutes that a process takes to start, to compile and to save
NTK = "model.position.rope.scaling=dynamic_ntk"  # with the training length
BASE = "model.position.rope.base=500000"  # 50 times that of training
DURING = (7 / 8, 0.139, 1 / 25)  # of 50m_ssmax_during: tokens before the switch, rate at it, warmup after it


def pack(place: Place, length: int, only: Sequence[str] = ()) -> Step:
    """Packs the text to rows of `length` tokens. only: the sources to pack, or all."""
    name = "-".join([str(length), *only])
    folder = place.work / "data" / name
    command = ["-m", "data_prep", "pack", "--out", str(folder), "--length", str(length), "--valid-fraction", "0"]
    command += ["--tokenizer", str(place.text / "tokenizer.json")]
    for file in sorted(place.text.glob("train.*.jsonl.zst")):
        source = file.name.split(".")[1]
        if not only or source in only:
            valid = place.text / f"valid.{source}.jsonl.zst"
            command += ["--source", f"{source}={file}", "--source", f"{source}={valid}:valid"]
    return Step(f"pack-{name}", tuple(command), 0.5, place.work / "data")


def train(
    place: Place,
    size: Size,
    form: Training,
    config: str,
    run: Path,
    rate: float,
    seed: int,
    *changes: str,
    tokens: int | None = None,
    speed: float | None = None,
    data: str | None = None,
    codes: tuple[int, ...] = (0,),
    evals: int = 4,
    eval_rows: int | None = None,
    alone: bool = False,
) -> Step:
    """Trains a model. The seed chooses the weights and the order of the rows, which all methods share.

    tokens, speed, data: in place of those of `form`. changes: further arguments. evals: validations. alone: see `Step`.
    A shorter training than that of `form`, which tries a learning rate, warms up for as many tokens: with a quarter of them,
    SSMax prefers half the learning rate (docs/log/2026-11-28-warmup-of-tried-rates.md).
    """
    total = tokens or form.tokens
    step = form.rows * form.length
    steps = total // step
    before, at_switch, warmup = DURING
    during = config == "50m_ssmax_during"
    first = round(before * steps) * step if during else total
    stages = [
        f"0.tokens={first}",
        f"0.schedule.lr={rate:g}",
        f"0.schedule.warmup_tokens={round(form.warmup * max(total, form.tokens) / step) * step}",
    ]
    if during:
        again = round(warmup * (total - first) / step) * step
        stages += [
            f"1.tokens={total - first}",
            f"1.schedule.lr={at_switch * rate:g}",
            f"1.schedule.warmup_tokens={again}",
        ]
    command = ["launch/pretrain.py", f"config={config}", f"run_dir={run}"]
    command += [f"data.path={place.work}/data/{data or form.length}", f"data.length={form.length}"]
    command += [f"data.shuffle_seed={seed}", f"train.seed={seed}", f"train.batch_size={form.rows}"]
    command += [
        f"train.microbatch={form.microbatch}",
        "train.log_every=1",
        f"train.eval_every={max(1, steps // evals)}",
    ]
    command += [f"train.eval_rows={eval_rows or size.eval_rows}", f"train.save_every={steps}", "train.keep=1"]
    command += ["train.observe_every=0", *(f"train.stages.{stage}" for stage in stages)]
    script, *keys = command
    command = [script, *last_of_each([*keys, *size.keys, *changes])]
    return Step("train", tuple(command), START + total / (speed or form.speed) / 60, run, codes, alone, trains=True)


def switch(place: Place, size: Size, config: str, source: Path, run: Path, length: int) -> Step:
    """Saves the model of `source` with its attention replaced by SSMax, without training."""
    command = ["launch/pretrain.py", f"config={config}", f"run_dir={run}", f"init_from={source}"]
    command += [f"data.path={place.work}/data/{length}", f"data.length={length}", "train.max_steps=0"]
    command += ["train.save_every=1", *size.keys]
    return Step("train", tuple(command), 0.4, run)


def positions(place: Place, size: Size, run: Path) -> Step:
    """Measures the loss by position on test documents (arXiv:2501.19399, Figure 5)."""
    command = ["-m", "eval.papers.long_context", str(run), "--texts", str(place.test), "--processes", "1"]
    command += ["--lengths", str(size.by_position), "--windows", str(size.windows), BASE]
    return Step("positions", tuple(command), 1.2, run)


def fine_tune(place: Place, size: Size, run: Path, seed: int) -> Step:
    """Fine-tunes on questions. The run gets the name of its model with _qa."""
    tuned = run.with_name(f"{run.name}_qa")
    files = ",".join(map(str, place.questions))
    command = ["launch/finetune.py", f"from={run}", f"questions={files}", f"run_dir={tuned}", f"epochs={size.epochs:g}"]
    command += [f"train.seed={seed}", f"data.shuffle_seed={seed}"]
    command += ["microbatch=128", "train.save_every=1000000", "train.keep=1"]
    return Step("tune", tuple(command), 2.3, tuned)


def needle(place: Place, size: Size, run: Path) -> list[Step]:
    """Retrieval by length and depth, and needle scores (its Figures 6, 7 and 8)."""
    tuned = run.with_name(f"{run.name}_qa")
    base = ["-m", "eval.papers.needle", str(tuned), "--texts", str(place.test), "--processes", "1"]
    cells = ["--lengths", size.needle_lengths, "--depths", size.depths, "--samples", str(size.samples)]
    scores = ["--scores", "--lengths", str(size.score_length), "--trials", str(size.trials)]
    return [
        Step("needle", (*base, *cells, BASE), 2.5, tuned),
        Step("scores", (*base, *scores, BASE), 0.7, tuned),
    ]


def contexts(place: Place, size: Size, run: Path, changes: Sequence[str], slow: float, name: str = "") -> list[Step]:
    """Measures the loss by context length on test documents and on Wikitext's articles (arXiv:2410.17980, Figure 5).

    changes: keys of the model. slow: factor of the minutes. name: of the changes, for the markers.
    """
    base = ["-m", "eval.papers.long_context", str(run), "--processes", "1", "--lengths", size.lengths]
    books = ["--texts", str(place.test), "--windows", str(size.long_windows)]
    steps = [Step(f"books{name}", (*base, *books, *changes), 1.2 * slow, run)]
    if place.wikitext is not None:
        articles = ["--texts", str(place.wikitext), "--articles"]
        steps.append(Step(f"articles{name}", (*base, *articles, *changes), 0.6 * slow, run))
    return steps
