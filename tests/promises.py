"""What is promised of a fault stands at the test that shows it; docs/faults.md is made of these by `tests/chaos/table.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Promise:
    """area: a heading of the table. code: exit code. identical: whether the result is that of a run without the fault."""

    area: str
    fault: str
    seen: str
    code: str
    identical: str
    do: str
    test: str


PROMISES: list[Promise] = []


def promises(
    area: str, fault: str, *, seen: str, code: str, identical: str = "", do: str = "nothing"
) -> Callable[[Test], Test]:
    def note(test: Test) -> Test:
        file = test.__module__.replace(".", "/") + ".py"
        PROMISES.append(Promise(area, fault, seen, code, identical, do, f"{file}::{test.__name__}"))
        return test

    return note
