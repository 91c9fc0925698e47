"""docs/reference/config.md is what the schema says now, and every key has a meaning."""

import re

from ssscale.config.reference import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m ssscale.config.reference"


def test_every_key_has_a_meaning() -> None:
    rows = [row for row in page().splitlines() if row.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []
