"""The studies: which jobs each of them has.

ssmax      arXiv:2501.19399, Figures 2 and 4 to 8: softmax (a), ssmax (b), ssmax_fixed (c), ssmax_bias (d), ssmax_after (e),
           ssmax_during (f), ssmax_pn
           METHOD@RATE: at another rate than the chosen one (whole.py)
positions  arXiv:2410.17980, Figure 5: sb, sb_rem, rope (also with NTK scaling and with a window of 2,048, which changes
           nothing in training on 2,048 tokens), alibi, fire, nope, window512, window1024, rope_8k (the control), METHOD@RATE
why        what decides between stick-breaking, ALiBi, a window and RoPE: METHOD+tokens (four times as many), METHOD+width
           (32 heads of 32 as in the paper, at two rates), METHOD+heads (8 of 64), METHOD+books (trained on nothing else)
mqrar      arXiv:2410.17980, Figure 3: CORE_PAIRS without short sequences first, curriculum_CORE_PAIRS with them

Jobs whose name begins with rate- try learning rates.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.papers.study import measure, steps
from eval.papers.study.jobs import TRAIN_GIB, WIDE_GIB, Job, Place, Step
from eval.papers.study.rates import FEWEST, FILE, chosen, to_try
from eval.papers.study.sizes import Size, Training
from eval.papers.study.whole import at, lowest_of, method_of
from ssscale.errors import UserError
from ssscale.json_object import read_json

# ssmax_after follows softmax, whose model it takes.
SSMAX = ("softmax", "ssmax_after", "ssmax", "ssmax_bias", "ssmax_fixed", "ssmax_during", "ssmax_pn")
POSITIONS = ("sb", "sb_rem", "rope", "alibi", "fire", "nope", "window512", "window1024", "rope_8k")
WHY = ("sb", "alibi", "window512", "rope")
VARIED = ("tokens", "width", "heads", "books")
CORES = ("softmax", "stickbreaking")
SHORT_FIRST = "curriculum_"  # begins the names of MQRAR's jobs that train on short sequences first
FROM_SOFTMAX = ("ssmax_after", "ssmax_during")  # which have softmax's learning rate
AT_TWO_RATES = {"ssmax": ("softmax", "ssmax", "ssmax_bias", "ssmax_fixed"), "positions": WHY}
THREE_SEEDS = [("ssmax", "softmax"), ("ssmax", "ssmax"), ("ssmax", "ssmax_bias")]
SPEEDS = {"fire": 2e5}  # FIRE reads its bias from a table


def tried_as(method: str) -> str:
    """Return the method whose learning rate `method` has."""
    return "softmax" if method in FROM_SOFTMAX else method


def rates_of(study: str) -> str:
    """Return the study that chooses the learning rates of `study`."""
    return "positions" if study == "why" else study


def most_rates(study: str, size: Size) -> int:
    """Return how many learning rates of a method are tried at most. MQRAR tries all of its own in one job."""
    return FEWEST + (0 if study == "mqrar" else size.further)


class Study:
    """The jobs of one study. `rates` has the learning rates that are on file. seeds: of all jobs, or None for `seeds_of`."""

    def __init__(self, name: str, place: Place, size: Size, seeds: list[int] | None = None) -> None:
        self.name, self.place, self.size, self.seeds = name, place, size, seeds
        self.folder, self.work = place.out / name, place.work / name
        self.rates_folder = place.out / rates_of(name)
        self.rates = chosen(self.rates_folder)

    def seeds_of(self, method: str) -> Sequence[int]:
        if self.seeds is not None:
            return self.seeds
        return range(3) if (self.name, method) in THREE_SEEDS else range(1)

    def whole(self, method: str) -> dict[str, float]:
        """Return {job: learning rate} of the whole trainings of a method."""
        jobs = {method: self.rate(tried_as(method))}
        if method in AT_TWO_RATES.get(self.name, ()) and method in self.rates:
            jobs |= {at(method, rate): rate for rate in self.size.compared if rate != self.rates[method]}
        return jobs

    def best(self, method: str) -> str:
        """Return the whole training that stands for a method, or the one at the chosen rate until all have ended."""
        return lowest_of(self.folder, list(self.whole(method))) or method

    def compared(self, method: str) -> tuple[Path, ...]:
        """Return the results from which `best` follows, if there is a choice."""
        jobs = self.whole(method)
        return tuple(self.file(job, 0) for job in jobs) if len(jobs) > 1 else ()

    def trainings(self, method: str) -> list[tuple[str, float, list[int]]]:
        """Return (job, learning rate, seeds) of the whole trainings of a method. Further seeds are of the best one."""
        seeds, best = self.seeds_of(method), self.best(method)
        return [(job, rate, [x for x in seeds if not x or job == best]) for job, rate in self.whole(method).items()]

    def rate(self, method: str) -> float:
        """Return the chosen learning rate, or NaN, with which a job can be printed but not run."""
        return self.rates.get(method, math.nan)

    def check(self, job: Job) -> None:
        """Raise UserError if the job's learning rate has not been chosen."""
        if not job.has_rate:
            raise UserError(
                f"{self.rates_folder / FILE} has no learning rate for {job.name}: run --jobs 'rate-*', then --choose, "
                "before a test set is read"
            )

    def file(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-s{seed}.json"

    def job(
        self,
        name: str,
        seed: int,
        every: list[Step],
        measured: Callable[[], dict[str, Any]],
        gib: float = TRAIN_GIB,
        **rest: Any,
    ) -> Job:
        if rest.get("group"):
            rest["group"] = f"{self.name}/{rest['group']}"
        if seed:
            rest["after"] = self.compared(method_of(name))
        return Job(self.name, name, seed, tuple(every), gib, rest.pop("file", self.file(name, seed)), measured, **rest)

    def rate_jobs(self, method: str, config: str, form: Training, *changes: str, gib: float = TRAIN_GIB) -> list[Job]:
        """One job per learning rate that is to be tried."""
        rates = to_try(self.rates_folder, method, self.size.rates, most_rates(self.name, self.size))
        return [self._rate_job(method, config, form, rate, *changes, gib=gib) for rate in rates]

    def _rate_job(
        self, method: str, config: str, form: Training, rate: float, *changes: str, gib: float = TRAIN_GIB
    ) -> Job:
        """Trains a short time at one learning rate and keeps the validation loss. No test set is read."""
        name = f"rate-{method}-{rate:g}"
        run = self.work / name
        step = steps.train(
            self.place,
            self.size,
            form,
            config,
            run,
            rate,
            0,
            *changes,
            tokens=form.rate_tokens,
            speed=SPEEDS.get(method),
            codes=(0, 77),  # 77: the loss stayed NaN
        )
        return self.job(
            name,
            0,
            [steps.pack(self.place, form.length), step],
            partial(_rate, run, method, rate),
            gib,
            file=self.folder / "rates" / f"{method}-{rate:g}.json",
            rate=rate,
            method=method,
        )


def _rate(run: Path, method: str, rate: float) -> dict[str, Any]:
    found = measure.training(run)
    loss = found["valid"][-1][1] if found["valid"] and found["last_tenth"] is not None else None
    return {"method": method, "losses": {f"{rate:g}": loss}, "training": found}


def ssmax(study: Study) -> list[Job]:
    """The jobs of arXiv:2501.19399."""
    form = study.size.ssmax
    methods = [method for method in SSMAX if method not in FROM_SOFTMAX]
    jobs = [job for method in methods for job in study.rate_jobs(method, f"50m_{method}", form)]
    for method in SSMAX:
        for name, rate, seeds in study.trainings(method):
            jobs += [_ssmax_job(study, name, method, rate, seed) for seed in seeds]
    return jobs


def _ssmax_job(study: Study, name: str, method: str, rate: float, seed: int) -> Job:
    place, size, form = study.place, study.size, study.size.ssmax
    run, tried = study.work / f"{name}-s{seed}", tried_as(method)
    every = [steps.pack(place, form.length)]
    if method == "ssmax_after":
        softmax = study.work / f"softmax-s{seed}"
        every.append(steps.train(place, size, form, "50m_softmax", softmax, rate, seed))
        every.append(steps.switch(place, size, "50m_ssmax_after", softmax, run, form.length))
    else:
        every.append(steps.train(place, size, form, f"50m_{method}", run, rate, seed))
    if method == "ssmax_pn":
        file = run / "pn.json"
        every.append(Step("fit", ("-m", "eval.papers.pn_fit", str(run), "--json", str(file)), 0.3, run))
        return study.job(
            name,
            seed,
            every,
            lambda: {"training": measure.training(run), "pn": read_json(file)},
            rate=rate,
            method=tried,
        )
    every += [
        steps.positions(place, size, run),
        steps.fine_tune(place, size, run, seed),
        *steps.needle(place, size, run),
    ]

    def measured() -> dict[str, Any]:
        trained = {} if method == "ssmax_after" else {"training": measure.training(run)}
        tuned = run.with_name(f"{run.name}_qa")
        return trained | {"by_position": measure.by_position(run), "needle": measure.needle(tuned)}

    group = f"softmax-s{seed}" if name in ("softmax", "ssmax_after") else None  # one training
    return study.job(name, seed, every, measured, rate=rate, method=tried, reads_test=True, group=group)


def _form(study: Study, method: str) -> Training:
    """Rows of the method, with as many tokens per step as the others have."""
    form, control = study.size.positions, study.size.control
    if method != "rope_8k":
        return form
    share = control // form.length
    return Training(control, form.rows // share, max(1, form.microbatch // share), *_rest(form), speed=0.8 * form.speed)


def _rest(form: Training) -> tuple[int, int, float]:
    return form.tokens, form.rate_tokens, form.warmup


def positions(study: Study) -> list[Job]:
    """The jobs of arXiv:2410.17980, Figure 5."""
    jobs = [job for method in POSITIONS for job in study.rate_jobs(method, f"50m_{method}", _form(study, method))]
    for method in POSITIONS:
        for name, rate, seeds in study.trainings(method):
            jobs += [_positions_job(study, name, method, rate, seed) for seed in seeds]
    return jobs


def _positions_job(study: Study, name: str, method: str, rate: float, seed: int, *changes: str, **training: Any) -> Job:
    """Trains a method and measures it at all lengths. changes, training: what `why` varies."""
    place, size, form = study.place, study.size, _form(study, method)
    run = study.work / f"{name}-s{seed}"
    only = training.pop("only", ())
    packed = steps.pack(place, form.length, only)
    data = packed.name.removeprefix("pack-")
    speed, gib = training.pop("speed", SPEEDS.get(method, form.speed)), training.pop("gib", TRAIN_GIB)
    every = [
        packed,
        steps.train(place, size, form, f"50m_{method}", run, rate, seed, *changes, data=data, speed=speed, **training),
    ]
    slow = 5.0 if method == "fire" else 1.0  # its bias is computed per pair of tokens, as no table of 65,536² fits
    every += steps.contexts(place, size, run, [], slow)
    if method in ("rope", "rope_8k") and study.name == "positions":
        scaled = [f"model.position.rope.{key}" for key in ("scaling=dynamic_ntk", f"train_length={form.length}")]
        every += steps.contexts(place, size, run, scaled, slow, "-ntk")
    if method == "rope" and study.name == "positions":
        every += steps.contexts(place, size, run, [f"model.position.window={form.length}"], slow, "-window")

    def measured() -> dict[str, Any]:
        articles = {} if place.wikitext is None else {"articles": measure.by_length(run, "articles")}
        return {
            "train_length": form.length,
            "training": measure.training(run),
            "books": measure.by_length(run, "long_context"),
            **articles,
        }

    return study.job(name, seed, every, measured, gib, rate=rate, method=method, reads_test=True)


def why(study: Study) -> list[Job]:
    """One change at a time of the position study, at the better learning rate of its whole trainings."""
    size, form = study.size, study.size.positions
    base = Study("positions", study.place, size)
    varied: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "tokens": ((), {"tokens": 4 * form.tokens}),
        "width": (size.widths, {"speed": 0.4 * form.speed, "gib": WIDE_GIB}),
        "heads": ((size.heads,), {}),
        "books": ((), {"only": (study.place.test.name.split(".")[1],)}),
    }
    jobs = []
    for kind, method in itertools.product(VARIED, WHY):
        changes, training = varied[kind]
        name, rate = f"{method}+{kind}", base.whole(method)[base.best(method)]
        rates = {name: rate}
        if kind == "width":  # A wider model may want a smaller rate. Adam's falls by the width in arXiv:2203.03466.
            rates[at(name, rate / 2)] = rate / 2
        for (job_name, job_rate), seed in itertools.product(rates.items(), study.seeds_of(method)):
            job = _positions_job(study, job_name, method, job_rate, seed, *changes, **training)
            jobs.append(replace(job, after=base.compared(method)))
    return jobs


def mqrar(study: Study) -> list[Job]:
    """The jobs of arXiv:2410.17980, Section 5.1."""
    size = study.size.mqrar
    jobs = []
    for core in CORES:
        few = ["--plain", "--batch", str(size.rate_batch), "--steps", str(size.rate_steps)]
        few += ["--test-every", str(max(1, size.rate_steps // 12)), "--minutes", "60"]
        # Of few pairs, because with many no rate leaves chance within so few steps.
        jobs.append(_recall_job(study, f"rate-{core}", core, min(size.pairs), 0, few, 2.7, rates=True))
    runs = [(core, pairs, seed) for pairs in size.pairs for core in CORES for seed in study.seeds_of(core)]
    for core, pairs, seed in runs:
        rate = study.rate(core)
        many = ["--plain", "--batch", str(size.batch), "--steps", str(size.steps)]
        many += ["--lrs", f"{rate:g}", "--minutes", "60"]
        job = _recall_job(study, f"{core}_{pairs}", core, pairs, seed, many, size.minutes + 0.7)
        jobs.append(replace(job, rate=rate, method=core))
    for core, pairs, seed in runs:
        name = f"{SHORT_FIRST}{core}_{pairs}"
        jobs.append(_recall_job(study, name, core, pairs, seed, ["--minutes", "60"], 1.5))
    return jobs


def _recall_job(
    study: Study, name: str, core: str, pairs: int, seed: int, options: list[str], minutes: float, rates: bool = False
) -> Job:
    size, run = study.size.mqrar, study.work / f"{name}-s{seed}"
    shape = [word for key in ("length", "keys", "values", "width") for word in (f"--{key}", str(getattr(size, key)))]
    command = ("-m", "eval.papers.mqrar", "curve", "--out", str(run), "--cores", core, "--pairs", str(pairs))
    step = Step("train", (*command, "--seed", str(seed), *shape, *options), minutes, run, trains=True)
    result = run / f"{core}-{pairs:03d}.json"

    def measured() -> dict[str, Any]:
        found = measure.mqrar(result)
        if not rates:
            return {"mqrar": found}
        losses: list[float] = found["history"][-1][2]
        # The number of a rate among the paper's is what --lrs takes.
        return {"method": core, "losses": {str(number): loss for number, loss in enumerate(losses, 1)}, "mqrar": found}

    file = study.folder / "rates" / f"{core}.json" if rates else study.file(name, seed)
    return study.job(name, seed, [step], measured, file=file, method=core)


STUDIES: dict[str, Callable[[Study], list[Job]]] = {
    "ssmax": ssmax,
    "positions": positions,
    "why": why,
    "mqrar": mqrar,
}
