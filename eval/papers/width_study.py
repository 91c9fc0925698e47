"""Tests whether one learning rate suits every width, with and without width transfer.

    python -m eval.papers.width_study DATA [--widths 256,512,1024] [--lrs 9,8,7,6,5] [--tokens 20000000]
        [--out runs/width_study] [key=value ...]
    python -m eval.papers.width_study DATA --config 50m_ssmax --widths 512 --lrs 7
        --variant "s=1" --variant "s=0.17 model.mixer.ssmax.scale=0.17"

DATA is a folder made by data_prep. Each run trains `--config` (8 layers, heads of 64) with launch/pretrain.py at one
width and one peak learning rate of 2^-N. The learning rate warms up over a sixth of the tokens and decays to a tenth
as a cosine. A --variant is a name followed by keys, which are applied after those of the width transfer. The default
variants are `transfer` and `none`. --jobs runs share each GPU. Without a GPU, the runs follow one another.

The command prints a table and writes OUT/results.json, OUT/width.png and OUT/width.pdf. results.json has one record
per run, and a second call does not repeat these runs. It is refused if it has other data, settings or keys than these.
"""

import argparse
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from eval.checkpoint.command import Parser, begun, sentences, whole_numbers, write
from eval.checkpoint.gpus import visible_gpus
from ssscale.config import load_config
from ssscale.data import manifest as manifests
from ssscale.errors import UserError
from ssscale.json_object import read_json
from ssscale.launcher import LAUNCHER
from ssscale.options import check_once, last_of_each
from ssscale.train.early import check_data
from ssscale.validate import validate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 64
FFN_RATIO = 2.75  # as in the 50m models
LAST = 0.05  # the result is the mean loss over this last share of the steps
LOST = 2.6  # nats. The figure omits runs that are this far above the best run.
NO_TRANSFER = ("model.init_std=0.02",)


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    variant: str
    width: int
    lr_log2: int
    keys: tuple[str, ...]

    @property
    def place(self) -> tuple[str, int, int]:
        return self.variant, self.width, self.lr_log2

    @property
    def name(self) -> str:
        return f"{self.variant.replace(' ', '_').replace('/', '_')}_{self.width}_2^{self.lr_log2}"


def transfer_keys() -> tuple[str, ...]:
    """Return the settings of configs/model/power_width.yaml as arguments."""
    model = load_config(["config=1b_softmax"]).model
    width = {key: value for key, value in asdict(model.width).items() if value is not None}
    own = {"init_std": model.init_std, "depth_scaled_init": model.depth_scaled_init}
    return (*(f"model.{k}={v}" for k, v in own.items()), *(f"model.width.{k}={v}" for k, v in width.items()))


def variants_of(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """Parse variants of the form `NAME [key=value ...]` into {name: keys}. Raises UserError for another form."""
    if not texts:
        return {"transfer": transfer_keys(), "none": NO_TRANSFER}
    found = {}
    for text in texts:
        name, *keys = text.split()
        if wrong := [key for key in keys if "=" not in key]:
            raise UserError(f"--variant {text!r}: {wrong[0]!r} is not of the form key=value")
        check_once(keys)
        found[name] = (*transfer_keys(), *keys)
    return found


def arguments_of(run: Run, options: argparse.Namespace) -> list[str]:
    """Return the arguments of launch/pretrain.py except the run folder."""
    step_tokens = options.rows * options.length
    steps = -(-options.tokens // step_tokens)
    keys: dict[str, Any] = {
        "config": options.config,
        "data.path": options.data,
        "data.length": options.length,
        "model.hidden_size": run.width,
        "model.num_heads": run.width // HEAD_DIM,
        "model.ffn_hidden_size": int(FFN_RATIO * run.width),
        "train.batch_size": options.rows,
        "train.microbatch": options.microbatch,
        "train.log_every": 1,
        "train.eval_every": steps,
        "train.save_every": 0,
        "train.observe_every": 0,
        "train.stages.0.tokens": steps * step_tokens,
        "train.stages.0.schedule.kind": "cosine",
        "train.stages.0.schedule.lr": 2.0**run.lr_log2,
        "train.stages.0.schedule.warmup_tokens": steps // 6 * step_tokens,
        "train.stages.0.schedule.floor": 0.1,
    }
    return last_of_each([*(f"{key}={value}" for key, value in keys.items()), *options.keys, *run.keys])


def execute(run: Run, options: argparse.Namespace, gpus: "queue.Queue[str]") -> dict[str, Any]:
    """Train on the next free GPU. Raises UserError with the end of the log if the run fails."""
    folder = options.out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{run.name}.log"
    gpu = gpus.get()
    began = time.perf_counter()
    try:
        with open(file, "w") as log:
            code = subprocess.run(
                [sys.executable, "launch/pretrain.py", *arguments_of(run, options), f"run_dir={folder}"],
                cwd=ROOT,
                env=os.environ | {LAUNCHER: str(os.getpid())} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
    finally:
        gpus.put(gpu)
    records = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if code in (0, 77) else []
    )
    training = [record for record in records if "loss" in record]
    if code not in (0, 77) or not training:  # 77: the loss stayed NaN, which is a valid result
        tail = " ".join(file.read_text().splitlines()[-5:])
        raise UserError(f"the run {run.name} failed with code {code}: {tail}")
    last = max(1, int(LAST * len(training)))
    valid = [record["valid_loss"] for record in records if "valid_loss" in record]
    result = {
        "variant": run.variant,
        "width": run.width,
        "lr_log2": run.lr_log2,
        "loss": fmean(record["loss"] for record in training[-last:]) if code == 0 else None,
        "valid_loss": valid[-1] if valid else None,
        "largest_grad_norm": max(record["grad_norm"] for record in training if record.get("grad_norm") is not None),
        "keys": list(run.keys),
        "seconds": round(time.perf_counter() - began, 1),
    }
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    print(f"# {run.name}: loss {result['loss']}, {result['seconds']:.0f} s", flush=True)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per variant and width, one column per learning rate, the best loss in bold."""
    rates = sorted({result["lr_log2"] for result in results})
    lines = [
        "| variant | width | " + " | ".join(f"2^{rate}" for rate in rates) + " | best |",
        "|---|---|" + "---|" * (len(rates) + 1),
    ]
    for (variant, width), group in grouped(results).items():
        losses = {result["lr_log2"]: result["loss"] for result in group}
        best = min(losses, key=lambda rate: losses[rate] or float("inf"))
        cells = [f"**{losses[r]:.3f}**" if r == best else _cell(losses, r) for r in rates]
        lines.append(f"| {variant} | {width} | " + " | ".join(cells) + f" | 2^{best} |")
    return "\n".join(lines)


def _cell(losses: dict[int, float | None], rate: int) -> str:
    if rate not in losses:
        return ""
    loss = losses[rate]
    return "NaN" if loss is None else f"{loss:.3f}"


def grouped(results: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Group results by (variant, width): variants in order of first appearance, widths ascending."""
    ordered = sorted(results, key=lambda result: result["width"])
    names = dict.fromkeys(result["variant"] for result in results)
    keys = [(name, width) for name in names for width in dict.fromkeys(r["width"] for r in ordered)]
    found = {key: [r for r in ordered if (r["variant"], r["width"]) == key] for key in keys}
    return {key: group for key, group in found.items() if group}


def draw(results: list[dict[str, Any]]) -> "Figure":
    """Draw one panel per variant and one curve per width."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    from eval.checkpoint.drawing import COLOURS, MARKERS, axes_of

    names = list(dict.fromkeys(result["variant"] for result in results))
    figure, every = plt.subplots(
        1, len(names), figsize=(4.2 * len(names) + 0.6, 4.2), sharey=True, layout="constrained"
    )
    panels: dict[str, Any] = dict(zip(names, [every] if len(names) == 1 else list(every), strict=True))
    lowest = min((result["loss"] for result in results if result["loss"] is not None), default=0.0)
    widths = sorted({result["width"] for result in results})
    for (name, width), group in grouped(results).items():
        index = widths.index(width)
        shown = sorted((r["lr_log2"], r["loss"]) for r in group if r["loss"] is not None and r["loss"] < lowest + LOST)
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes = panels[name]
        axes.plot([rate for rate, _ in shown], [loss for _, loss in shown], **style, label=f"{width} wide")
        if shown:
            axes.plot(
                *min(shown, key=lambda point: point[1]), "o", markersize=13, fillstyle="none", color=style["color"]
            )
    titles = {"transfer": "with width transfer", "none": "without"}
    for name, axes in panels.items():
        title = titles.get(name) or name
        axes_of(figure, axes, title, "log2 of the peak learning rate", "training loss (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=9, framealpha=1, edgecolor="none")
    return figure


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Return the runs that the options name, the widest first. Raises UserError for options that no run can have."""
    for name in ("tokens", "rows", "length", "microbatch", "jobs"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    check_once(options.keys)
    widths = whole_numbers(options.widths, "--widths", HEAD_DIM)
    rates = [-power for power in whole_numbers(options.lrs, "--lrs", 0, 30)]
    if odd := [width for width in widths if width % HEAD_DIM]:
        raise UserError(f"--widths {odd[0]}: each must be a multiple of the head dimension, {HEAD_DIM}")
    runs = [
        Run(name, width, rate, keys)
        for width, (name, keys), rate in itertools.product(
            sorted(widths, reverse=True), variants_of(options.variant).items(), rates
        )
    ]
    if not (Path(options.data) / manifests.NAME).is_file():
        raise UserError(f"{options.data} is not a data folder; python -m data_prep pack makes one")
    options.data = str(Path(options.data).resolve())
    for run in runs:  # a mistake of the last one would be found hours later
        config = load_config(arguments_of(run, options))
        validate(config, world_size=1)
        check_data(config)
    return runs


def continued(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Return what results.json has, or a new content for it. Raises UserError if it is of another study."""
    settings = {
        "data": manifests.read(Path(options.data) / manifests.NAME)["checksum"],
        "config": options.config,
        "tokens": options.tokens,
        "rows": options.rows,
        "length": options.length,
        "keys": options.keys,
    }
    file = options.out / "results.json"
    result = begun(file, settings)
    if file.is_file() and "runs" not in result:
        before = read_json(file)
        other = [key for key in settings if before.get(key) != settings[key]]
        raise UserError(f"{file} is of a study with other {' and '.join(other)}: choose another --out")
    keys = {run.place: list(run.keys) for run in runs}
    for found in result.setdefault("runs", []):
        if found["keys"] != keys.get(_place(found), found["keys"]):
            raise UserError(
                f"{file} has the variant {found['variant']} with other keys: choose another name or another --out"
            )
    return result


def _place(result: dict[str, Any]) -> tuple[str, int, int]:
    return result["variant"], result["width"], result["lr_log2"]


def study(options: argparse.Namespace) -> None:
    """Train the runs that results.json does not contain yet, then print and draw all results."""
    runs = runs_of(options)
    options.out = options.out.resolve()  # the runs have a working folder of their own
    file, result = options.out / "results.json", continued(runs, options)
    results: list[dict[str, Any]] = result["runs"]
    write(file, result, indent=1)  # a folder that cannot be written is found before the first run
    done = {_place(found) for found in results}
    gpus: queue.Queue[str] = queue.Queue()
    for name in visible_gpus() * options.jobs or [""]:
        gpus.put(name)
    left = [run for run in runs if run.place not in done]
    order = {run.place: index for index, run in enumerate(left)}
    failure: UserError | None = None
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        started = {pool.submit(execute, run, options, gpus): run for run in left}
        for future in as_completed(started):
            if future.cancelled():
                continue
            try:
                results.append(future.result())
            except UserError as error:  # what still runs ends and is kept
                failure = failure or error
                pool.shutdown(wait=False, cancel_futures=True)
            results.sort(key=lambda found: order.get(_place(found), -1))
            write(file, result, indent=1)
    if failure is not None:
        raise failure
    from eval.checkpoint.drawing import save

    print(table(results))
    print(*save(draw(results), options.out / "width"), sep="\n")


def main() -> None:
    parser = Parser(
        "python -m eval.papers.width_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", metavar="DATA", help="a folder made by data_prep")
    parser.add_argument("--config", default="50m_softmax", help="the run file (50m_softmax)")
    parser.add_argument("--widths", default="256,512,1024", help="comma-separated multiples of 64")
    parser.add_argument("--lrs", default="9,8,7,6,5", help="comma-separated N; the peak learning rate is 2^-N")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens of each run")
    parser.add_argument("--rows", type=int, default=64, help="rows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row, as DATA was packed")
    parser.add_argument("--microbatch", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time on each GPU")
    parser.add_argument("--variant", action="append", default=[], help="NAME [key=value ...]; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("runs/width_study"), help="folder of the results")
    parser.add_argument("keys", nargs="*", default=[], metavar="key=value", help="of the configuration, for every run")
    with sentences():
        study(parser.parse_intermixed_args())


if __name__ == "__main__":
    with sentences():
        main()
