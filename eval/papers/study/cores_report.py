"""The claims of the study `cores` with their verdicts, and its tables."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from eval.checkpoint.chance import against_chance, interval
from eval.papers.figures.cores import CORES, reached, target_of
from eval.papers.figures.ruler import by_length
from eval.papers.study.claims import Claim, Measure, training_loss, values
from eval.papers.study.whole import Results

TIMES = (1, 4, 10)  # the training length
PANELS = (("all", "all tasks"), ("needles", "needles"), ("tracking", "variable tracking"))


def positions_at(times: int, kind: str = "base") -> Measure:
    """Return the mean loss of the last tenth of `times` training lengths. kind: as trained, or with RoPE's other base.

    A core without RoPE has one kind.
    """

    def measure(result: dict[str, Any]) -> float | None:
        if "positions" not in result:
            return None
        found = result["positions"].get(kind, result["positions"]["plain"])
        ends = (np.arange(len(found["mean"])) + 1) * found["bin"]
        last = times * found["train_length"]
        within = (ends > 0.9 * last) & (ends <= last)
        return float(np.mean(np.array(found["mean"])[within])) if within.any() else None

    return measure


def found_at(index: int) -> Measure:
    """Return the share of numbers found at the length of this index, all depths."""

    def measure(result: dict[str, Any]) -> float | None:
        if "needle" not in result:
            return None
        cells = result["needle"]["cells"]
        lengths = sorted({cell["length"] for cell in cells})
        some = [cell for cell in cells if cell["length"] == lengths[min(index, len(lengths) - 1)]]
        return float(sum(cell["correct"] for cell in some) / sum(cell["samples"] for cell in some))

    return measure


def ruler_at(panel: str, length: int | None) -> Measure:
    """Return RULER's mean score of a panel of Figure 6 at a length, or over all lengths beyond the shortest."""

    def measure(result: dict[str, Any]) -> float | None:
        found = {n: mean for n, (mean, _) in by_length(cells_in(result), panel).items()} if "ruler" in result else {}
        if length is not None:
            return found.get(length)
        return fmean(found[n] for n in sorted(found)[1:]) if len(found) > 1 else None

    return measure


def cells_in(result: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    return {name: (value, stderr) for name, (value, stderr) in result["ruler"].items()}


def metric(task: str, name: str) -> Measure:
    def measure(result: dict[str, Any]) -> float | None:
        return result.get("tables", {}).get(task, {}).get("metrics", {}).get(name)

    return measure


def skipping(which: str, length: int = 16_384) -> Measure:
    """Return the seconds of an evaluation `with` or `without` skipping."""

    def measure(result: dict[str, Any]) -> float | None:
        return result.get("skipping", {}).get(str(length), {}).get("seconds", {}).get(which)

    return measure


def accuracy(result: dict[str, Any]) -> float | None:
    """Return the mean accuracy of the multiple-choice tasks of Table 2."""
    tasks = [task for task, found in result.get("tables", {}).items() if found["chance"] and "mmlu" not in task]
    found = {task: result["tables"][task] for task in tasks if task != "lambada_openai"}
    return fmean(task["metrics"].get("acc_norm,none", task["value"]) for task in found.values()) if found else None


def claims(results: Results) -> list[Claim]:
    """Return the claims that the study touches. The target loss is one that all trainings have reached."""
    ssmax, sb = "arXiv:2501.19399", "arXiv:2410.17980"

    def rate(result: dict[str, Any]) -> float | None:
        return result.get("training", {}).get("tokens_per_second")

    higher, ppl = "sb scores higher than softmax", metric("wikitext", "word_perplexity,none")
    beyond, far = "loss before 10 training lengths, nats", positions_at(10)
    exact = metric("gsm8k_cot", "exact_match,strict-match")
    zero, five = (metric(task, "acc,none") for task in ("mmlu", "mmlu_5shot"))
    found = [
        Claim(f"{ssmax}, Figure 4", "ssmax trains to a lower loss than softmax", "training loss, last 10 %, nats",
              ("ssmax", training_loss), ("softmax", training_loss)),
        Claim(f"{sb}, 5.3", "sb trains fewer tokens per second than softmax", "tokens/s", ("sb", rate), ("softmax", rate)),
        Claim(f"{sb}, Table 2", higher, "mean accuracy", ("softmax", accuracy), ("sb", accuracy)),
        Claim(f"{sb}, Table 2", "sb has a lower perplexity than softmax", "Wikitext, words", ("sb", ppl), ("softmax", ppl)),
        Claim(f"{sb}, Table 3", higher, "MMLU, 0-shot, accuracy", ("softmax", zero), ("sb", zero)),
        Claim(f"{sb}, Table 3", higher, "MMLU, 5-shot, accuracy", ("softmax", five), ("sb", five)),
        Claim(f"{sb}, Table 4", higher, "GSM8K, 8-shot, exact match", ("softmax", exact), ("sb", exact)),
        Claim(f"{sb}, Figure 5", "sb gains by longer contexts", "loss before 10 and 1 training lengths, nats",
              ("sb", far), ("sb", positions_at(1))),
        Claim(f"{ssmax}, Figure 5", "ssmax is below softmax in long contexts", beyond, ("ssmax", far), ("softmax", far)),
        Claim(f"{sb}, Figure 5", "sb is below softmax in long contexts", beyond, ("sb", far), ("softmax", far)),
        *(Claim(f"{ssmax}, Figure 6", "ssmax finds more numbers than softmax", f"share at {times} training lengths",
                ("softmax+ruler", found_at(i)), ("ssmax+ruler", found_at(i))) for i, times in enumerate(TIMES)),
        Claim(f"{sb}, 4", "skipping makes evaluation faster", "seconds for the same texts of 16,384 tokens",
              ("sb", skipping("with")), ("sb", skipping("without"))),
        *(Claim(f"{sb}, Figure 6", f"{higher} with NTK scaling", f"RULER, {what}, beyond the training length",
                ("softmax+ruler", ruler_at(panel, None)), ("sb+ruler", ruler_at(panel, None)))
          for panel, what in PANELS),
    ]  # fmt: skip
    if not any(result.get("to_loss") for some in results.values() for result in some):
        return found
    target = target_of(results)

    def seconds(result: dict[str, Any]) -> float | None:
        at = reached(result.get("to_loss", []), target)
        return None if at is None else at[1]

    quantity = f"seconds to a validation loss of {target:.3f}"
    return [
        *found,
        *(Claim("ours", f"{core} reaches the loss sooner than softmax", quantity, (core, seconds), ("softmax", seconds))
          for core in ("ssmax", "sb")),
    ]  # fmt: skip


def summary(results: Results) -> str:
    """Return the table for the README, means over seeds, and the table of the tasks."""
    parts = []
    if any("to_loss" in result for some in results.values() for result in some):
        parts.append(_overview(results, target_of(results)))
    lengths = sorted({int(n.partition("@")[2]) for some in results.values() for r in some for n in r.get("ruler", {})})
    if lengths:
        parts.append(_scores(results, lengths))
    if skipped := next((result["skipping"] for result in results.get("sb", []) if "skipping" in result), None):
        parts.append(_skipped(skipped))
    if tables := _tables(results):
        parts.append(tables)
    return "\n\n".join(parts)


def _mean(results: Results, job: str, measure: Measure, form: str = ".3f") -> str:
    found = values(results, job, measure)
    return format(fmean(found.values()), form) if found else "–"


def _overview(results: Results, target: float) -> str:
    head = [f"tokens (M) to {target:.3f}", f"seconds to {target:.3f}", "tokens/s", "validation loss"]
    head += [f"loss before {times} × length" for times in TIMES] + [f"numbers found at {times} ×" for times in TIMES]
    lines = [f"| core | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]

    def at(index: int, scale: float) -> Measure:
        def measure(result: dict[str, Any]) -> float | None:
            found = reached(result.get("to_loss", []), target)
            return None if found is None else found[index] / scale

        return measure

    def rate(result: dict[str, Any]) -> float | None:
        return result.get("training", {}).get("tokens_per_second")

    def last(result: dict[str, Any]) -> float | None:
        return result["to_loss"][-1][2] if result.get("to_loss") else None

    for core in (core for core in CORES if core in results):
        cells = [_mean(results, core, at(0, 1e6), ".0f"), _mean(results, core, at(1, 1.0), ".0f")]
        cells += [_mean(results, core, rate, ",.0f"), _mean(results, core, last)]
        cells += [_mean(results, core, positions_at(times)) for times in TIMES]
        cells += [_mean(results, f"{core}+ruler", found_at(index), ".2f") for index in range(len(TIMES))]
        lines.append(f"| {CORES[core]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _scores(results: Results, lengths: list[int]) -> str:
    every = [(panel, n) for panel, _ in PANELS for n in lengths]
    head = [f"{panel}, {n:,}" for panel, n in every]
    lines = [f"| RULER | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for core in (core for core in CORES if f"{core}+ruler" in results):
        cells = [
            _mean(results, f"{core}+ruler", ruler_at(panel, n))
            for panel in ("all", "needles", "tracking")
            for n in lengths
        ]
        lines.append(f"| {CORES[core]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _skipped(found: Mapping[str, Any]) -> str:
    lines = [
        "| evaluation of stick-breaking, text length | seconds with skipping | without | faster, percent |",
        "|---|---|---|---|",
    ]
    for length, entry in found.items():
        took = entry["seconds"]
        faster = 100 * (took["without"] / took["with"] - 1)
        lines.append(f"| {int(length):,} | {took['with']:.2f} | {took['without']:.2f} | {faster:.1f} |")
    return "\n".join(lines)


def _tables(results: Results) -> str:
    """Return a row per task, with the 95 % interval of each core's first seed, and whether it excludes chance."""
    of = {core: results[core][0]["tables"] for core in CORES if core in results and "tables" in results[core][0]}
    tasks = list(dict.fromkeys(task for tables in of.values() for task in tables))
    if not tasks:
        return ""
    lines = [f"| task | metric | chance | {' | '.join(CORES[core] for core in of)} |", "|---" * (len(of) + 3) + "|"]
    for task in tasks:
        first = next(tables[task] for tables in of.values() if task in tables)
        name = (
            "acc_norm"
            if "acc_norm,none" in first["metrics"]
            else "acc"
            if "acc,none" in first["metrics"]
            else first["metric"]
        )
        chance = "–" if first["chance"] is None else f"{first['chance']:.3f}"
        cells = [_cell(tables[task], name) if task in tables else "–" for tables in of.values()]
        lines.append(f"| {task} | {name} | {chance} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any], name: str) -> str:
    key = next((key for key in entry["metrics"] if key.startswith(f"{name},")), None)
    if key is None:
        return "–"
    value = entry["metrics"][key]
    bounds = interval(name, value, entry["metrics"].get(key.replace(",", "_stderr,")), entry["items"])
    if bounds is None:
        return f"{value:.4g}"
    said = against_chance(bounds, entry["chance"] if name != "word_perplexity" else None)
    place = {"above": ", above chance", "below": ", below chance", "no": ", at chance"}.get(said, "")
    return f"{value:.4g} [{bounds[0]:.4g}, {bounds[1]:.4g}]{place}"
