"""Shows the progress of long evaluations: a bar on a terminal, lines in a log file."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

FIRST, EVERY = 10.0, 30.0  # seconds before the first log line, and between log lines


def track(
    items: Iterable[T],
    name: str,
    total: int,
    show: bool = True,
    sizes: Sequence[int] | None = None,
    unit: str = "batches",
) -> Iterator[T]:
    """Yield the items and show progress on stderr.

    total: number of items.
    sizes: number of `unit` per item. The default is 1 each.

    The remaining time is estimated from the number of items, because items take similar times.
    """
    if not show:
        yield from items
    elif sys.stderr.isatty():
        yield from _bar(items, name, total)
    else:
        yield from _lines(items, name, total, sizes, unit)


def _bar(items: Iterable[T], name: str, total: int) -> Iterator[T]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    console = Console(stderr=True, markup=False, emoji=False)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        yield from progress.track(items, total=total, description=name)


def _lines(items: Iterable[T], name: str, total: int, sizes: Sequence[int] | None, unit: str) -> Iterator[T]:
    began = time.monotonic()
    due = began + FIRST
    done, whole = 0, total if sizes is None else sum(sizes)
    for number, item in enumerate(items, 1):
        yield item
        done += 1 if sizes is None else sizes[number - 1]
        now = time.monotonic()
        if now >= due and number < total:
            due = now + EVERY
            left = (now - began) / number * (total - number)
            print(
                f"{name}: {done:,} of {whole:,} {unit} ({done / whole:.0%}) in {clock(now - began)}, about {clock(left)} left",
                file=sys.stderr,
                flush=True,
            )


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, or as m:ss below one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
