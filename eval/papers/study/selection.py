"""Which jobs a command asks for: those of one study, or of several in one queue."""

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DataError
from data_prep.tokenize import load, vocab_size
from eval.papers.study.cores import check_files as check_cores
from eval.papers.study.cores import cores
from eval.papers.study.jobs import Job, Place
from eval.papers.study.rates import choose, choose_new
from eval.papers.study.schedule import tries_rates
from eval.papers.study.sizes import Size
from eval.papers.study.studies import STUDIES, Study, most_rates, rates_of
from ssscale.config.load import load_config
from ssscale.errors import UserError

EVERY = STUDIES | {"cores": cores}


def names_of(text: str) -> list[str]:
    """Return the studies of a comma-separated list. Raises UserError for others."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EVERY]:
        raise UserError(f"there is no study {unknown[0] or 'without a name'}; use {', '.join(EVERY)}")
    return names


def check_files(study: str, place: Place, size: Size) -> None:
    """Raise UserError for files that the jobs need and that are missing, and for a tokenizer too large for the models."""
    if study == "mqrar":
        return
    needed = [place.text / name for name in ("split.json", "tokenizer.json")]
    needed += [*place.questions, *([place.wikitext] if place.wikitext else [])]
    if missing := [file for file in needed if not file.is_file()]:
        raise UserError(f"there is no file {missing[0]}")
    if study == "ssmax" and not place.questions:
        raise UserError("--questions is needed: files in SQuAD's form for fine-tuning")
    if study == "cores":
        check_cores(place)
    _check_tokenizer(study, place.text / "tokenizer.json", size)


def _check_tokenizer(study: str, file: Path, size: Size) -> None:
    """Raise UserError if the tokenizer has more entries than the models' vocabulary, at which every job would fail."""
    name, keys = ("162m_softmax", size.cores.keys) if study == "cores" else ("50m_softmax", ())
    most = load_config([f"config={name}", *size.keys, *keys]).model.vocab_size
    try:
        entries = vocab_size(load(str(file)))
    except DataError as error:
        raise UserError(str(error)) from error
    if entries > most:
        raise UserError(f"{file} has {entries:,} entries, but the models of {study} have {most:,}: give a smaller one")


def with_rates(names: list[str]) -> list[str]:
    """Return the studies that choose the learning rates of `names`."""
    return list(dict.fromkeys(map(rates_of, names)))


def choose_rates(names: list[str], out: Path, size: Size) -> list[str]:
    """Choose the learning rates of studies from the results in `out`. Returns one sentence per method."""
    return [line for name in with_rates(names) for line in choose(out / name, most_rates(name, size))]


@dataclass(frozen=True)
class Selection:
    """The jobs of `names` that match a pattern, or those that try no learning rates. seeds: as for `Study`."""

    names: list[str]
    place: Place
    size: Size
    seeds: list[int] | None = None
    patterns: str | None = None

    def _of(self, name: str) -> list[Job]:
        jobs = EVERY[name](Study(name, self.place, self.size, self.seeds))
        return sorted(jobs, key=lambda job: job.seed)  # the first seed of all comes before the second of any

    def jobs(self) -> list[Job]:
        """Raise UserError if a pattern matches no job by its name, with or without its study and seed."""
        every = [job for name in self.names for job in self._of(name)]
        if self.patterns is None:
            return [job for job in every if not tries_rates(job)]
        found: list[Job] = []
        for pattern in self.patterns.split(","):
            some = [job for job in every if any(fnmatch.fnmatch(name, pattern) for name in job.names)]
            if not some:
                names = " ".join(dict.fromkeys(job.name for job in every))
                raise UserError(f"--jobs: there is no job {pattern}; use {names}")
            found += [job for job in some if job not in found]
        return found

    def rates(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs that try the learning rates which `jobs` lack."""
        lacking = {(rates_of(job.study), job.method) for job in jobs if not job.has_rate}
        every = [job for name in with_rates(self.names) for job in self._of(name)]
        return [job for job in every if tries_rates(job) and (job.study, job.method) in lacking and job not in jobs]

    def ready(self, rates: bool) -> list[Job]:
        """Return the jobs that can start, and those that have ended.

        rates: whether to choose the learning rates whose trials have ended, which is printed, and to try those that are
            lacking.
        """
        for name in with_rates(self.names) if rates else ():
            for line in choose_new(self.place.out / name, most_rates(name, self.size)):
                print(line, flush=True)
        jobs = self.jobs()
        coming = {job.file for job in jobs if not job.file.is_file()}
        able = [job for job in jobs if job.has_rate and not coming.intersection(job.after)]
        return [*self.rates(jobs), *able] if rates else able

    def check(self, jobs: list[Job]) -> None:
        """Raise UserError if a job lacks its learning rate."""
        for job in jobs:
            Study(job.study, self.place, self.size).check(job)
