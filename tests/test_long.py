"""`tests/long.txt` names what there is."""

import ast

import pytest

from tests.conftest import ROOT, long_tests


@pytest.mark.parametrize("entry", long_tests())
def test_an_entry_names_a_test(entry: str) -> None:
    file, _, function = entry.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert function in ["", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))]
