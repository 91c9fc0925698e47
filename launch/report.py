"""Report on runs: figures, a sample and a summary of each run, and a comparison of several. Needs no GPU.

Each run folder gets loss.png (losses over tokens, learning rate, stages, and the bigram if launch/evaluate.py has
computed it), sample.txt (the newest checkpoint continues held-out text), for SSMax runs ssmax.csv (s and b by layer and
head) and pn.csv, and summary.txt. Several runs also get a common figure, compare.png in the folder of the first.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from launch import boot
from launch.boot import Command, Option
from launch.evaluate import open_data
from ssscale.errors import UserError
from ssscale.model.flops import count_parameters
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.files import replacing

if TYPE_CHECKING:
    from eval.checkpoint.run import Run

COMMAND = Command(
    about=__doc__,
    usage="python launch/report.py RUN [RUN ...] [sample=false] [data=FOLDER]",
    example="python launch/report.py runs/1b_softmax runs/1b_sb",
    options=(
        Option("sample", bool, "write sample.txt", default=True),
        Option("data", str, "the data folder, if it differs from that of the training", metavar="FOLDER"),
    ),
    words="run folders",
)


def main(argv: list[str]) -> None:
    options, folders = COMMAND.parse(argv)
    if not folders:
        raise UserError("no run folder is given: python launch/report.py RUN [RUN ...]")
    from eval.checkpoint.run import Run

    if options.get("data") == "":
        raise UserError("data= is empty: name a folder or leave it out")
    runs = [Run.open(Path(folder)) for folder in folders]
    from eval.checkpoint.environment import prepare

    prepare()
    boot.log(logging.WARNING, force=False)

    from eval.checkpoint.loss_curves import draw_run, draw_runs
    from eval.checkpoint.scales import write_scales
    from ssscale.parallel.groups import initialize
    from ssscale.train.reading import reading

    texts = []
    for run in runs:
        draw_run(run, run.folder / "loss.png")
        if run.checkpoint is not None:
            with reading(run.folder, initialize()) as checkpoint:
                run = replace(run, checkpoint=checkpoint)
                if options["sample"]:
                    sample(run, options.get("data"))
                write_scales(checkpoint, saved_config(checkpoint), run.folder)
        text = summary(run)
        with replacing(run.folder / "summary.txt") as temporary:
            temporary.write_text(text, encoding="utf-8")
        texts.append(text)
    if len(runs) == 1:
        print(texts[0], end="")
        return
    figure = runs[0].folder / "compare.png"
    draw_runs(runs, figure)
    compare(runs, Console(markup=False, emoji=False))
    print(f"figure of all: {figure}\nof each run: loss.png, sample.txt, summary.txt in its folder")


def sample(run: "Run", data_path: str | None) -> None:
    """Writes sample.txt with the newest checkpoint."""
    from eval.checkpoint.sample import write_sample
    from eval.checkpoint.text import TextTokenizer
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_model

    assert run.checkpoint is not None
    uncached = [name for name, mixer in run.config.model.used.items() if not mixer.cached]
    if uncached:
        print(
            f"no sample.txt: {uncached[0]} does not define `cached`, so that no text can be generated", file=sys.stderr
        )
        return
    model, config = load_model(run.checkpoint, initialize())
    try:
        data = open_data(config, "valid", data_path)
    except UserError as error:
        if data_path:
            raise
        print(f"sample.txt begins from nothing: {error}", file=sys.stderr)
        data = None
    tokenizer = TextTokenizer.of_checkpoint(run.checkpoint, data)
    title = f"{run.name}, {run.checkpoint.name}: {model.num_parameters():,} parameters"
    write_sample(model, tokenizer, data, config.data.length, title, run.folder / "sample.txt")


def summary(run: "Run") -> str:
    """Returns one screen of text, which ends with the validation loss next to the bigram's."""
    model = run.config.model
    shape = (
        f"{model.num_layers} layers of {model.hidden_size:,}, {model.num_heads} heads, vocabulary {model.vocab_size:,}"
    )
    placed = any(model.position.method in mixer.positions for mixer in model.used.values() if mixer.takes_positions)
    position = f", positions {model.position.method}" if placed else ""
    present = [
        name
        for name in ("loss.png", "sample.txt", *sorted(file.name for file in run.folder.glob("*.csv")), "summary.txt")
        if name == "summary.txt" or _has(run, name)
    ]
    rows = [
        ("model", f"{', '.join(model.mixers)} attention{position}; {shape}"),
        ("parameters", f"{count_parameters(model, run.config.data.length):,}"),
        ("trained", f"{run.tokens:,} tokens, {run.training[-1]['step']:,} steps of {run.config.tokens_per_step:,}"),
        ("stages", " → ".join(_stages(run))),
        ("speed", f"{run.tokens_per_second:,.0f} tokens/s"),
        ("training loss", f"{run.training_loss:.4f} nats per token (mean of the last records)"),
        *_tasks(run),
        ("", ""),
        ("folder", str(run.folder)),
        ("to look at", ", ".join(present)),
        ("newest checkpoint", str(run.checkpoint.relative_to(run.folder)) if run.checkpoint else "none"),
        ("", ""),
        *_losses(run),
    ]
    lines = [run.name, "=" * len(run.name)]
    lines += [f"{label:<20}{text}".rstrip() for label, text in rows]
    return "\n".join(lines) + "\n"


def _has(run: "Run", name: str) -> bool:
    return (run.folder / name).is_file()


def _stages(run: "Run") -> list[str]:
    """Describes the stages that the run has begun."""
    names = list(dict.fromkeys(str(record["stage"]) for record in run.training))
    return [f"{name} to {_last(run, name)['tokens']:,} tokens" for name in names]


def _last(run: "Run", stage: str) -> dict[str, Any]:
    return [record for record in run.training if record["stage"] == stage][-1]


def _tasks(run: "Run") -> list[tuple[str, str]]:
    rows = []
    ruler: dict[str, list[float]] = {}  # names of the form TASK@LENGTH are RULER's
    for name, task in run.results.get("tasks", {}).items():
        length = name.rpartition("@")[2]
        if "@" in name and length.isdecimal():
            ruler.setdefault(length, []).append(task["value"])
            continue
        error = "" if task["stderr"] is None else f" ± {task['stderr']:.3f}"
        chance = "" if task["chance"] is None else f", chance {task['chance']:.3f}"
        rows.append((f"{name} {task['metric']}", f"{task['value']:.3f}{error}{chance}, {task['items']:,} items"))
    for length, values in sorted(ruler.items(), key=lambda entry: int(entry[0])):
        rows.append((f"RULER at {int(length):,}", f"{fmean(values):.3f}, mean of {len(values)} tasks"))
    return rows


def _losses(run: "Run") -> list[tuple[str, str]]:
    valid, baseline = run.results.get("valid"), run.results.get("baseline")
    if valid is None:
        rows = [("not evaluated", f"python launch/evaluate.py checkpoint={run.folder}")]
        if run.validation:
            seen = f"{run.validation[-1]['valid_loss']:.4f} nats per token on up to {run.config.train.eval_rows} rows"
            rows.append(("validation loss", seen))
        return rows
    rows = []
    evaluated = Path(run.results["checkpoint"]).name
    if run.checkpoint is not None and evaluated != run.checkpoint.name:
        rows.append(("evaluated", f"{evaluated}, which is not the newest"))
    rows.append(("validation loss", _loss(valid)))
    if baseline is not None:
        rows.append(("bigram", _loss(baseline) + "   (Kneser–Ney, same training tokens)"))
        nats, bits = (valid[key] - baseline[key] for key in ("nats_per_token", "bits_per_byte"))
        verdict = "lower than the bigram" if nats < 0 else "NOT lower than the bigram"
        rows.append(("difference", f"{nats:+8.4f} nats per token   {bits:+8.4f} bits per byte   ({verdict})"))
    return rows


def _loss(loss: dict[str, float]) -> str:
    return f"{loss['nats_per_token']:8.4f} nats per token   {loss['bits_per_byte']:8.4f} bits per byte"


def compare(runs: "list[Run]", console: Console) -> None:
    """Prints the runs side by side."""
    table = Table(box=ASCII)
    table.add_column("run", overflow="fold", min_width=12)
    for column in ("tokens", "training", "valid", "bits/byte", "bigram", "cloze"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        valid = run.results.get("valid")
        cloze = run.results.get("tasks", {}).get("cloze")
        table.add_row(
            run.name,
            f"{run.tokens:,}",
            f"{run.training_loss:.4f}",
            f"{valid['nats_per_token']:.4f}" if valid else "-",
            f"{valid['bits_per_byte']:.4f}" if valid else "-",
            "-" if run.bigram is None else f"{run.bigram:.4f}",
            f"{cloze['value']:.3f}" if cloze else "-",
        )
    console.print(table)


if __name__ == "__main__":
    boot.run(COMMAND, main)
