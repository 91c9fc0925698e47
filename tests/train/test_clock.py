"""The seconds of the phases of a step."""

import pytest

from ssscale.train import clock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    return now


def step(phases: clock.Phases, now: list[float], forward: float) -> None:
    for phase, length in (("agreement", 1.0), ("forward", forward), ("hooks", 0.0)):
        phases.mark(phase)
        now[0] += length


def test_a_lap_has_the_steps_before_the_newest(seconds: list[float]) -> None:
    phases = clock.Phases(False, 7)
    step(phases, seconds, 2.0)
    assert phases.lap(8) == {}
    seconds[0] += 3.0  # other hooks
    step(phases, seconds, 4.0)
    step(phases, seconds, 100.0)
    assert phases.lap(10) == {"seconds/agreement": 1.0, "seconds/forward": 3.0, "seconds/hooks": 1.5}
    step(phases, seconds, 5.0)
    assert phases.lap(11) == {"seconds/agreement": 1.0, "seconds/forward": 100.0, "seconds/hooks": 0.0}
