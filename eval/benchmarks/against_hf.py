"""Compares our harness with lm-eval's `hf` backend on one device: values and speed of the same requests.

The checkpoint is exported, and transformers loads it in plain torch. Seconds are the time of lm-eval's calls into a
backend, tokenization included. Short calls are repeated, and the median of three counts. Seconds do not include
loading, nor lm-eval's work on requests and metrics, which is the same code for both. Nor do they include a first run
of each backend on a sample, which compiles kernels and tries batch sizes. In bfloat16, the hf backend also computes
the sample in float32. `off float32` is the mean distance of each backend from these values, in nats per request.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

from eval.checkpoint.environment import prepare
from eval.checkpoint.task_names import check_tasks
from ssscale.errors import UserError
from ssscale.options import Command, Option
from ssscale.train.checkpoint_folder import find_checkpoint

TASKS = "hellaswag,piqa,winogrande,arc_easy,mmlu,mmlu_5shot,lambada_openai,wikitext,gsm8k"
COMMAND = Command(
    about=__doc__,
    usage="python -m eval.benchmarks.against_hf checkpoint=RUN [key=value ...]",
    example="python -m eval.benchmarks.against_hf checkpoint=runs/1b_sb tasks=hellaswag,piqa limit=200",
    options=(
        Option("checkpoint", str, "a run folder or a checkpoint folder", metavar="RUN", required=True),
        Option("eval_data", str, "folder with local copies of the tasks' data", default="data/eval", metavar="FOLDER"),
        Option("tasks", str, "lm-eval tasks by name", default=TASKS, metavar="NAME,..."),
        Option("limit", int, "examples per task; generation tasks use half as many", default=1000, at_least=1),
        Option(
            "batch_sizes",
            str,
            "batch sizes of the hf backend; the fastest on a sample of each task is used (auto: lm-eval's own search)",
            default="8,32,64,128,auto",
            metavar="N,...",
        ),
        Option(
            "dtype",
            str,
            "dtype of both models and all their computations (in float32, stick-breaking skips nothing)",
            default="bfloat16",
            choices=("bfloat16", "float32"),
        ),
        Option("length", int, "maximum tokens of a text, by default the training length", at_least=1),
        Option("out", str, "JSON file for the results", metavar="FILE"),
    ),
)
SAMPLE = 512  # requests in the sample that compiles kernels and tries batch sizes
SAMPLE_PAGES = 4  # whole texts in the sample
SAMPLE_NEW_TOKENS = 32
REPEATS = 3
REPEATED_SECONDS = 4.0  # a call is not repeated once its runs have taken this long in total

Result = Any  # (log-likelihood, greedy), a log-likelihood or a text


@dataclass(frozen=True)
class Comparison:
    """The comparison of one task.

    our_seconds, hf_seconds: time of all requests. hf_batch_size: the fastest one. hf_rates: requests per second on the
    sample, by batch size. runs: seconds of every call, ours first, then those of the hf backend.
    difference: the largest difference in nats per request, for whole texts per word. None for generated texts.
    same: share of requests with the same greedy flag or text. metric: name, our value, their value.
    off_float32: mean distances of both backends from float32 on the sample, in nats per request.
    """

    task: str
    examples: int
    requests: int
    our_seconds: float
    hf_seconds: float
    hf_batch_size: str
    hf_rates: dict[str, float]
    runs: list[list[float]]
    difference: float | None
    same: float
    metric: tuple[str, float, float]
    off_float32: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        return self.hf_seconds / self.our_seconds


class Backends:
    """Our backend and the hf backend of one checkpoint."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str, length: int | None) -> None:
        import torch

        from eval.checkpoint.harness import PackedLM
        from eval.checkpoint.text import TextTokenizer
        from ssscale.config.choices import Precision
        from ssscale.hf import register
        from ssscale.hf.convert import export_checkpoint
        from ssscale.parallel.groups import initialize
        from ssscale.train.build import load_model
        from ssscale.train.reading import reading

        register()
        self.dtype, self.folder = dtype, folder
        precision, changes = Precision.bf16, list[str]()
        if dtype == "float32":
            precision, changes = Precision.fp32, ["model.mixer.stickbreaking.skip_below=0"]
        groups = initialize()
        with reading(checkpoint, groups):
            model, config = load_model(checkpoint, groups, precision, changes)
            tokenizer = TextTokenizer.of_checkpoint(checkpoint)
            export_checkpoint(checkpoint, folder, tokenizer.bos_id, tokenizer.eos_id)
        self.device, self.length = torch.device(groups.device), length or config.data.length
        self.ours = PackedLM(model, tokenizer, self.length)
        self.name = f"{config.name}, {model.num_parameters():,} parameters"
        self._models: dict[str, Any] = {}

    def hf(self, batch_size: str, largest: int, rolling: bool, dtype: str | None = None) -> Any:
        """Return lm-eval's hf backend. rolling: lm-eval adds BOS itself, so the tokenizer must not add a second one."""
        from lm_eval.models.huggingface import HFLM
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = dtype or self.dtype
        if dtype not in self._models:
            loaded = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, use_safetensors=True)
            loaded = loaded.to(self.device).eval()
            self._models[dtype] = (loaded, AutoTokenizer.from_pretrained(self.folder))
        model, tokenizer = self._models[dtype]
        return HFLM(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_batch_size=largest,
            device=str(self.device),
            max_length=self.length,
            add_bos_token=not rolling,
        )

    def seconds(self, work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        """Return the seconds until the device has finished `work`, and the result of `work`."""
        import torch

        self._wait()
        began = time.perf_counter()
        said = io.StringIO()  # hides progress bars and the batch size that lm-eval finds
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), torch.no_grad():
            result = work(*arguments)
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    sizes = options["batch_sizes"].split(",")
    numbers = [int(size) for size in sizes if size.isdecimal() and int(size)]
    if len(numbers) + ("auto" in sizes) != len(sizes) or not numbers:
        raise UserError(f"batch_sizes must be comma-separated integers, optionally with auto, not {','.join(sizes)!r}")
    dtype, limit = options["dtype"], options["limit"]
    checkpoint = find_checkpoint(Path(options["checkpoint"]))
    names = options["tasks"].split(",")
    check_tasks(names, options["eval_data"])
    prepare()

    import torch

    from eval.checkpoint.command import write
    from eval.checkpoint.suite import find_tasks

    if dtype == "bfloat16" and not torch.cuda.is_available():
        raise UserError("dtype=bfloat16 needs a GPU; use dtype=float32 on this machine")
    manager = find_tasks(names, {"eval_data": options["eval_data"]})
    with tempfile.TemporaryDirectory() as temporary:
        began = time.perf_counter()
        backends = Backends(checkpoint, Path(temporary) / "hf", dtype, options.get("length"))
        where = torch.cuda.get_device_name() if backends.device.type == "cuda" else "cpu"
        print(f"{checkpoint}: {backends.name}, {dtype} on {where}, at most {backends.length:,} tokens", flush=True)
        print(heading(), flush=True)
        results = []
        for name in names:
            results.append(compare(backends, manager, name, limit, sizes))
            print(line(results[-1]), flush=True)
            if options.get("out"):
                write(
                    Path(options["out"]),
                    {"checkpoint": str(checkpoint), "device": where, "dtype": dtype} | report(results),
                    1,
                )
    ours, hf = sum(r.our_seconds for r in results), sum(r.hf_seconds for r in results)
    print(
        f"all tasks: ours {ours:.1f} s, hf {hf:.1f} s, ratio {hf / ours:.2f}; {time.perf_counter() - began:.0f} s in total"
    )


def quiet() -> None:
    """Silence lm-eval and transformers, which warn about every text that is cut or padded."""
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def compare(backends: Backends, manager: Any, name: str, limit: int, sizes: list[str]) -> Comparison:
    """Run one task on both backends."""
    from lm_eval import simple_evaluate

    from eval.checkpoint.lm_eval_patches import without_environment

    ((_, task),) = manager.load([name])["tasks"].items()
    kind = {"multiple_choice": "loglikelihood"}.get(task.OUTPUT_TYPE, task.OUTPUT_TYPE)
    if kind == "generate_until":
        limit = -(-limit // 2)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    sample = sampled(task.instances, kind)
    largest = max(int(size) for size in sizes if size != "auto")

    def asked(lm: Any, requests: list[Any]) -> list[Result]:
        return list(getattr(lm, kind)(requests, disable_tqdm=True))

    rolling = kind == "loglikelihood_rolling"
    warm = backends.seconds(asked, backends.ours, sample)[1]
    rates = measured_rates(backends, asked, sample, sizes, kind)
    best = max(rates, key=lambda size: rates[size])

    runs: list[list[float]] = []

    def evaluated(lm: Any) -> tuple[float, dict[str, Any]]:
        spent: list[float] = []
        with mock.patch.object(lm, kind, repeated(backends, getattr(lm, kind), spent, runs)), without_environment():
            output = simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0, limit=limit)
        return sum(spent), output

    our_seconds, ours = evaluated(backends.ours)
    hf_seconds, theirs = evaluated(backends.hf(best, largest, rolling))
    samples, differences, same = answers(ours["samples"][name], theirs["samples"][name])
    values = [output["results"][name] for output in (ours, theirs)]
    metric = next(key for key in values[0] if "," in key and "_stderr" not in key)
    found = [d for d in differences if d is not None]
    comparison = Comparison(
        task=name,
        examples=samples,
        requests=len(same),
        our_seconds=our_seconds,
        hf_seconds=hf_seconds,
        hf_batch_size=best,
        hf_rates=rates,
        runs=runs,
        difference=max(found) if found else None,
        same=fmean(same),
        metric=(metric.split(",")[0], float(values[0][metric]), float(values[1][metric])),
    )
    if backends.dtype == "float32" or kind == "generate_until":
        return comparison
    exact = backends.seconds(asked, backends.hf("8", 8, rolling, "float32"), sample)[1]
    near = backends.seconds(asked, backends.hf(best, largest, rolling), sample)[1]
    off = [fmean(abs(value(x) - value(y)) for x, y in zip(some, exact, strict=True)) for some in (warm, near)]
    return replace(comparison, off_float32=(off[0], off[1]))


def measured_rates(backends: Backends, asked: Any, sample: list[Any], sizes: list[str], kind: str) -> dict[str, float]:
    """Return requests per second of the hf backend on the sample, by batch sizes that fit into memory."""
    import torch

    largest = max(int(size) for size in sizes if size != "auto")
    rates: dict[str, float] = {}
    for size in sizes:
        lm = backends.hf(size, largest, kind == "loglikelihood_rolling")
        some = sample[: int(size)] if kind == "generate_until" and size != "auto" else sample
        with contextlib.suppress(torch.OutOfMemoryError):
            if not rates:
                backends.seconds(asked, lm, some)  # the first one warms up
            rates[size] = len(some) / backends.seconds(asked, lm, some)[0]
    return rates


def repeated(backends: Backends, call: Any, spent: list[float], runs: list[list[float]]) -> Any:
    """Wrap a backend's method to repeat each call. The median seconds go to `spent`, all seconds to `runs`."""

    def timed(requests: list[Any], **_: Any) -> list[Result]:
        taken: list[float] = []
        while len(taken) < REPEATS and sum(taken) < REPEATED_SECONDS:
            seconds, results = backends.seconds(call, requests, True)
            taken.append(seconds)
        spent.append(median(taken))
        runs.append(taken)
        return list(results)

    return timed


def answers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, list[float | None], list[bool]]:
    """Return the number of samples, and for each request the distance of the answers and whether they agree."""
    differences, same = [], []
    # A sample occurs once per filter of the task, with the same answers.
    once = [[sample for sample in found if sample["filter"] == found[0]["filter"]] for found in (ours, theirs)]
    for a, b in zip(*once, strict=True):
        if a["arguments"] != b["arguments"]:
            raise AssertionError("the backends got different requests")
        for x, y in zip(a["resps"], b["resps"], strict=True):
            differences.append(distance(x[0], y[0], a))
            same.append(agree(x[0], y[0]))
    return len(once[0]), differences, same


def sampled(requests: list[Any], kind: str) -> list[Any]:
    """Return all requests of evenly spread examples. Generated texts get fewer new tokens."""
    examples = list(dict.fromkeys(request.doc_id for request in requests))
    most = SAMPLE_PAGES if kind == "loglikelihood_rolling" else max(1, SAMPLE * len(examples) // len(requests))
    chosen = set(examples[:: max(1, -(-len(examples) // most))])
    some = [request for request in requests if request.doc_id in chosen]
    if kind != "generate_until":
        return some
    short = {"max_gen_toks": SAMPLE_NEW_TOKENS}
    return [replace(request, arguments=(request.args[0], request.args[1] | short)) for request in some]


def value(result: Result) -> float:
    return float(result[0] if isinstance(result, tuple | list) else result)


def distance(x: Result, y: Result, sample: dict[str, Any]) -> float | None:
    """Return the distance in nats per request, or per word for a whole text. None for generated texts."""
    if isinstance(x, str):
        return None
    page = sample["doc"].get("page") if isinstance(x, float) else None
    return abs(value(x) - value(y)) / (len(page.split()) if page else 1)


def agree(x: Result, y: Result) -> bool:
    return bool(x == y) if isinstance(x, str) else bool(isinstance(x, float) or x[1] == y[1])


COLUMNS = (
    ("task", -15),
    ("examples", 8),
    ("requests", 8),
    ("ours s", 8),
    ("hf s", 8),
    ("batch", 5),
    ("ratio", 6),
    ("largest", 8),
    ("same %", 7),
    ("off float32, ours hf", 20),
    ("metric", -16),
    ("ours", 12),
    ("hf", 12),
)


def row(cells: Iterator[str] | list[str]) -> str:
    parts = zip(cells, COLUMNS, strict=True)
    return "  ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, (_, width) in parts).rstrip()


def heading() -> str:
    return row([name for name, _ in COLUMNS])


def line(r: Comparison) -> str:
    """Format one row: seconds of all requests, largest difference in nats, share of equal greedy flags or texts."""
    off = "" if r.off_float32 is None else f"{r.off_float32[0]:.1e} {r.off_float32[1]:.1e}"
    name, ours, hf = r.metric
    cells = [
        r.task,
        f"{r.examples:,}",
        f"{r.requests:,}",
        f"{r.our_seconds:.2f}",
        f"{r.hf_seconds:.2f}",
        r.hf_batch_size,
    ]
    cells += [f"{r.ratio:.2f}", "" if r.difference is None else f"{r.difference:.1e}", f"{100 * r.same:.2f}", off]
    return row([*cells, name, f"{ours:.6g}", f"{hf:.6g}"])


def report(results: list[Comparison]) -> dict[str, Any]:
    return {"tasks": {r.task: {k: v for k, v in vars(r).items() if k != "task"} | {"ratio": r.ratio} for r in results}}


if __name__ == "__main__":
    from eval.checkpoint.command import sentences

    quiet()
    with sentences(COMMAND):
        main(sys.argv[1:])
