"""What users of transformers do with exported models: docs/reference/transformers.md is what the runs give."""

import os
from pathlib import Path

import pytest

from ssscale.parallel.groups import Groups
from tests.hf.table import FIVE, MIXERS, PAGE, make_subjects, read_page, run_uses, write_page


def test_most_uses_with_the_installed_transformers(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each use with one of the mixers, in turn; one forward pass with all of them."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
    ):  # DeepSpeed sets them in tests before; Trainer would look for peers
        monkeypatch.delenv(name, raising=False)
    found = run_uses(make_subjects(tmp_path, groups), tmp_path, "", slow=False)
    page = read_page(PAGE.read_text(encoding="utf-8"))[found["version"]]
    assert sorted(found["names"]) == sorted(page)
    assert len(found["cells"]) > 90
    for use, row in found["cells"].items():
        for mixer, cell in row.items():
            assert (use, mixer, cell) == (use, mixer, page.get(use, {}).get(mixer))


def test_the_page_reads_as_it_was_written() -> None:
    """So that the other tests compare cells, and not their places."""
    text = PAGE.read_text(encoding="utf-8")
    cells = read_page(text)
    assert len(cells) == 2
    for rows in cells.values():
        assert len(rows) >= 50
        assert all(row.keys() == MIXERS.keys() for row in rows.values())
        assert all(
            cell and "FAILED" not in cell and "note" not in cell[:4] for row in rows.values() for cell in row.values()
        )
    made = {"groups": dict.fromkeys(next(iter(cells.values())), "loading")}
    again = write_page([{"version": version, "cells": rows} | made for version, rows in cells.items()])
    assert read_page(again) == cells


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_uses_with_transformers_4_and_transformers_5(groups: Groups, tmp_path: Path) -> None:
    packages = os.environ.get(FIVE, "")
    if not packages:
        pytest.skip(f"{FIVE} names no folder of `pip install --target` with transformers 5")
    subjects = make_subjects(tmp_path, groups)
    results = [run_uses(subjects, tmp_path, where, slow=True) for where in ("", packages)]
    assert results[1]["version"].startswith("5.")
    assert write_page(results) == PAGE.read_text(encoding="utf-8")
