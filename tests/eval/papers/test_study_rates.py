"""Learning rates: when one is chosen, and when another is tried first."""

import json
from typing import Any

import pytest

from eval.papers.study.rates import beyond, choose, choose_new, to_try
from ssscale.errors import UserError


def test_a_choice_needs_three_rates_and_stays(tmp_path):
    folder = tmp_path / "rates"
    folder.mkdir()

    def tried(rate: str, loss: float | None) -> None:
        (folder / f"sb-{rate}.json").write_text(json.dumps({"method": "sb", "losses": {rate: loss}}))

    with pytest.raises(UserError, match="has no results"):
        choose(tmp_path)
    tried("0.001", 3.0)
    tried("0.002", None)
    assert choose(tmp_path) == ["sb: not chosen, 2 of 3 rates are tried, 1 have a loss"]
    assert not (tmp_path / "rates.json").exists()
    tried("0.0005", 3.5)
    assert choose(tmp_path) == ["sb: 0.001"]
    found: dict[str, Any] = json.loads((tmp_path / "rates.json").read_text())
    assert found["sb"] == {"rate": 0.001, "losses": {"0.0005": 3.5, "0.001": 3.0, "0.002": None}}
    tried("0.004", 2.0)
    assert choose(tmp_path) == ["sb: 0.001, which stays although 0.004 is best now"]


@pytest.mark.parametrize(
    ("losses", "further"),
    [
        ({5e-4: 4.0, 1e-3: 3.0, 2e-3: 3.5}, None),
        ({5e-4: 4.0, 1e-3: 3.5, 2e-3: 3.0}, 4e-3),
        ({5e-4: 3.0, 1e-3: 3.5, 2e-3: 4.0}, 2.5e-4),
        ({5e-4: 4.0, 1e-3: 3.5, 2e-3: None}, None),
        ({5e-4: 3.0, 1e-3: None, 2e-3: None}, 2.5e-4),
        ({5e-4: None, 1e-3: None, 2e-3: None}, None),
        ({5e-4: 4.0, 2e-3: 3.0}, None),
        ({5e-4: 5.0, 1e-3: 4.0, 2e-3: 3.0, 4e-3: 2.0}, 8e-3),
        ({5e-4: 5.0, 1e-3: 4.0, 2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.0}, None),
    ],
)
def test_a_rate_beyond_the_edge_is_tried_before_the_choice(tmp_path, losses, further):
    first = (5e-4, 1e-3, 2e-3)
    (tmp_path / "rates").mkdir()
    for rate, loss in losses.items():
        result = {"method": "sb", "losses": {f"{rate:g}": loss}}
        (tmp_path / "rates" / f"sb-{rate:g}.json").write_text(json.dumps(result))
    assert beyond(losses, 5) == further
    tries = {*first, *losses} | ({further} if further else set())
    assert set(to_try(tmp_path, "sb", first, 5)) == tries
    said = choose(tmp_path, 5)[0]
    chosen = further is None and len(losses) >= 3 and any(losses.values())
    assert ("not chosen" in said) != chosen
    assert ("next" in said) == (further is not None)
    assert further is None or said.endswith(f"tries {further:g} next")
    if chosen:
        assert set(to_try(tmp_path, "sb", first, 9)) == {*first, *losses}  # what is on file stays


def test_new_choices_are_said_once(tmp_path):
    """While rates of another method are still tried, and before any is."""
    assert choose_new(tmp_path, 3) == []
    (tmp_path / "rates").mkdir()
    for method, rates in (("sb", (5e-4, 1e-3, 2e-3)), ("rope", (5e-4,))):
        for rate in rates:
            losses = {f"{rate:g}": abs(rate - 1e-3)}
            (tmp_path / "rates" / f"{method}-{rate:g}.json").write_text(
                json.dumps({"method": method, "losses": losses})
            )
    assert choose_new(tmp_path, 3) == ["sb: 0.001"]
    assert choose_new(tmp_path, 3) == []
    assert list(json.loads((tmp_path / "rates.json").read_text())) == ["sb"]
