"""The claims of the papers that the studies touch, and their verdicts from the results of several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from eval.papers.figures.studies import context_losses
from eval.papers.study.sizes import FULL
from eval.papers.study.studies import VARIED
from eval.papers.study.whole import Results, at, of_job

Values = dict[int, float]  # seed → value


@dataclass(frozen=True)
class Claim:
    """`lower` has the lower value of a measure than `higher`, or about the same with `equal`.

    source: the paper's figure or section. quantity: what is compared, with its unit.
    lower, higher: (job, measure).
    """

    source: str
    text: str
    quantity: str
    lower: tuple[str, "Measure"]
    higher: tuple[str, "Measure"]
    equal: bool = False

    def row(self, results: Results) -> str | None:
        """Return a row of the table, or None if one of both has no result."""
        a, b = (values(results, job, measure) for job, measure in (self.lower, self.higher))
        if not a or not b:
            return None
        sides = (f"{label(*side)}: {shown(found)}" for side, found in ((self.lower, a), (self.higher, b)))
        return f"| {self.text} ({self.source}) | {self.quantity} | {' | '.join(sides)} | {self.verdict(a, b)} |"

    def verdict(self, a: Values, b: Values) -> str:
        """Compare the ranges over seeds. The same seeds trained on the same rows."""
        overlap = min(a.values()) <= max(b.values()) and min(b.values()) <= max(a.values())
        few = " (one seed)" if min(len(a), len(b)) == 1 else ""
        if self.equal:
            if few:
                return "open: one seed has no range"
            return "holds: the ranges overlap" if overlap else "does not hold here: the ranges are apart"
        below = fmean(a.values()) < fmean(b.values())
        if overlap:
            return f"open: the ranges overlap, the mean is {'lower' if below else 'not lower'}{few}"
        return ("holds" if below else "does not hold here") + few


Measure = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Context:
    """Measures the loss in the longest or in the shortest context, with changed keys `kind`, such as -ntk."""

    key: str
    kind: str
    longest: bool

    def __call__(self, result: dict[str, Any]) -> float | None:
        found = context_losses({"": [result]}, self.key).get(self.kind)
        return found[0][max(found[0]) if self.longest else min(found[0])] if found else None


def label(job: str, measure: Measure) -> str:
    """Return the job with its changed keys, as in figures."""
    return job + measure.kind if isinstance(measure, Context) else job


def values(results: Results, job: str, measure: Measure) -> Values:
    """Return the value of every seed that has one."""
    found = {result["seed"]: measure(result) for result in of_job(results, job)}
    return {seed: value for seed, value in found.items() if value is not None}


def shown(found: Values) -> str:
    """Return mean, range and number of seeds."""
    every = list(found.values())
    if len(every) == 1:
        return f"{every[0]:.5g}"
    return f"{fmean(every):.5g} [{min(every):.5g}, {max(every):.5g}], {len(every)} seeds"


def training_loss(result: dict[str, Any]) -> float | None:
    return result["training"]["last_tenth"] if "training" in result else None


def between(first: int, last: int) -> Measure:
    """Return the mean loss of the positions from `first` to `last`, in bins that lie within."""

    def measure(result: dict[str, Any]) -> float | None:
        found = result.get("by_position")
        if found is None:
            return None
        begins = np.arange(len(found["mean"])) * found["bin"]
        within = (begins >= first) & (begins + found["bin"] <= last)
        return float(np.mean(np.array(found["mean"])[within])) if within.any() else None

    return measure


def found_share(result: dict[str, Any]) -> float | None:
    """Return the share of numbers found over all cells."""
    if "needle" not in result:
        return None
    cells = result["needle"]["cells"]
    return float(sum(cell["correct"] for cell in cells) / sum(cell["samples"] for cell in cells))


def top_score(result: dict[str, Any]) -> float | None:
    """Return the median over trials of the top head's attention to the number."""
    return median(top for top, _, _ in result["needle"]["trials"]) if "needle" in result else None


def solved_at(result: dict[str, Any]) -> float | None:
    """Return the step of the first test with 99 % of the answers, or infinity."""
    if "mqrar" not in result:
        return None
    step = result["mqrar"]["solved_at"]
    return float("inf") if step is None else float(step)


def _pairs(source: str, text: str, quantity: str, measure: Measure, pairs: Sequence[tuple[str, str]]) -> list[Claim]:
    """Return a claim for each (job with the lower value, job with the higher value)."""
    return [Claim(source, text.format(a=a, b=b), quantity, (a, measure), (b, measure)) for a, b in pairs]


def _at_rates(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs at each learning rate of whole trainings."""
    return [(at(a, rate), at(b, rate)) for rate in FULL.compared for a, b in pairs]


def _ssmax() -> list[Claim]:
    loss, far = "training loss, last 10 %, nats", between(1024, 20_000)
    found, top = "numbers found, all cells", "median top score"
    higher = [("softmax", "ssmax"), ("ssmax_fixed", "ssmax"), ("ssmax_bias", "ssmax"), ("softmax", "ssmax_bias")]
    higher += [("softmax", "ssmax_after"), ("ssmax_after", "ssmax"), ("ssmax_after", "ssmax_during")]
    higher += [("ssmax_during", "ssmax")]
    lower = [("ssmax", "softmax"), ("ssmax_fixed", "softmax"), ("ssmax_bias", "softmax")]
    more = [("softmax", "ssmax"), ("ssmax_fixed", "ssmax"), ("softmax", "ssmax_bias")]
    return [
        *_pairs("Figure 4", "{a} trains to a lower loss than {b}", loss, training_loss,
                [*lower, ("ssmax_bias", "ssmax")]),
        Claim("Figure 4", "without s the training loss is about the same", loss,
              ("ssmax_fixed", training_loss), ("ssmax", training_loss), equal=True),
        *_pairs("Figure 5", "{a} has a lower loss beyond the training length than {b}", "loss, positions 1,025 – 20,000, nats",
                far, [*lower, ("ssmax", "ssmax_bias"), ("ssmax_during", "softmax"), ("ssmax", "ssmax_during")]),
        *_pairs("Figure 5", "{b} has a higher loss at short contexts than {a}", "loss, positions 1 – 1,024, nats",
                between(0, 1024), [("ssmax", "softmax"), ("ssmax", "ssmax_after")]),
        *_pairs("Figure 6", "{b} finds more numbers than {a}", found, found_share, higher),
        *_pairs("Figures 7, 8", "{b} gives the number more attention than {a}", top, top_score, higher),
        *_pairs("Figure 4", "{a} trains to a lower loss than {b}", loss, training_loss, _at_rates(lower)),
        *_pairs("Figure 5", "{a} has a lower loss beyond the training length than {b}", "loss, positions 1,025 – 20,000, nats",
                far, _at_rates(lower)),
        *_pairs("Figure 6", "{b} finds more numbers than {a}", found, found_share, _at_rates(more)),
    ]  # fmt: skip


def _positions() -> list[Claim]:
    claims = []
    for key in ("books", "articles"):
        nats = f"loss on {key} in the longest context, nats"
        last = Context(key, "", True)
        others = ("rope", "alibi", "fire", "nope", "window512", "window1024")
        pairs = [("sb", job) for job in others]
        claims += _pairs("Figure 5", "{a} is below {b} in long contexts", nats, last, pairs)
        ntk, window = Context(key, "-ntk", True), Context(key, "-window", True)
        claims += [
            Claim("Figure 5", "sb is below RoPE with NTK scaling", nats, ("sb", last), ("rope", ntk)),
            Claim("Figure 5", "sb is below a window of 2,048", nats, ("sb", last), ("rope", window)),
            Claim("Figure 5", "NTK scaling lowers RoPE's loss", nats, ("rope", ntk), ("rope", last)),
            Claim("Figure 5", "RoPE with NTK scaling is below ALiBi", nats, ("rope", ntk), ("alibi", last)),
            Claim("Figure 5", "ALiBi is below FIRE", nats, ("alibi", last), ("fire", last)),
            Claim("Figure 5", "a window of 1,024 is below one of 512", nats, ("window1024", last), ("window512", last)),
            Claim("Figure 5", "the control gains by NTK scaling", nats, ("rope_8k", ntk), ("rope_8k", last)),
        ]
        first = Context(key, "", False)
        change = f"loss on {key}, longest against shortest context, nats"
        claims += [
            Claim("Figure 5", "sb gains by longer contexts", change, ("sb", last), ("sb", first)),
            *(Claim("Figure 5", f"{job} loses by longer contexts", change, (job, first), (job, last))
              for job in ("rope", "nope")),
            Claim("Figure 5", "RoPE with NTK scaling loses by longer contexts", change, ("rope", first), ("rope", ntk)),
            Claim("Figure 5", "a window of 2,048 loses a little by them", change, ("rope", first), ("rope", window)),
            Claim("Figure 5", "a window of 1,024 gains by longer ones", change, ("window1024", last), ("window1024", first)),
        ]  # fmt: skip
        pairs = [("sb", job) for job in ("rope", "alibi", "window512")]
        claims += _pairs("Figure 5", "{a} is below {b} in long contexts", nats, last, _at_rates(pairs))
    return claims


def _why() -> list[Claim]:
    claims = []
    for kind in VARIED:
        for key in ("books", "articles"):
            quantity = f"loss on {key} in the longest context, nats"
            measure = Context(key, "", True)
            pairs = [(f"sb+{kind}", f"{job}+{kind}") for job in ("alibi", "window512", "rope")]
            claims += _pairs("Figure 5", "{a} is below {b}", quantity, measure, pairs)
    return claims


def _mqrar() -> list[Claim]:
    jobs = [(f"stickbreaking_{pairs}", f"softmax_{pairs}") for pairs in (32, 128, 192)]
    return _pairs("Figure 3", "{a} is solved in fewer steps than {b}", "steps to 99 %", solved_at, jobs)


CLAIMS: dict[str, Callable[[], list[Claim]]] = {
    "ssmax": _ssmax,
    "positions": _positions,
    "why": _why,
    "mqrar": _mqrar,
}
