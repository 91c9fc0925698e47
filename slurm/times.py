"""Time limits as Slurm writes them."""

import re

from ssscale.errors import UserError

EARLY = 300  # seconds; as in slurm/pretrain.sbatch
SOONER = 60  # Slurm may send the early signal by so many seconds earlier
LIMIT = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?|(?P<short>\d+(?::\d+){0,2}))"
)
UNLIMITED = ("unlimited", "infinite")


def seconds_of(key: str, text: str) -> float:
    """Returns the seconds of a time limit, inf for none. Raises UserError naming the key if Slurm has no such form."""
    if text.lower() in UNLIMITED:
        return float("inf")
    match = LIMIT.fullmatch(text)
    if match is None:
        forms = "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
        raise UserError(f"{key}={text} is not a time limit of Slurm: write {forms}")
    if match["short"] is None:
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    else:
        numbers = [int(number) for number in text.split(":")]
        days, (hours, minutes, seconds) = 0, {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds) or float("inf")  # 0 is no limit


def check_times(time: str | None, early: int | None, evaluate_time: str | None) -> None:
    """Raises UserError for a limit that Slurm does not read, and for one at which a job could only requeue itself."""
    if evaluate_time is not None:
        seconds_of("evaluate_time", evaluate_time)
    if time is None:
        return
    before = EARLY if early is None else early
    if seconds_of("time", time) <= before + SOONER:
        raise UserError(
            f"time={time} must be longer than early={before} s and {SOONER} s, by which the early signal may come sooner: "
            "the job would requeue itself again and again without progress"
        )
