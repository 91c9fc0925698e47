"""The embedded corpus: code without docstrings, and the docstrings and texts beside it."""

import ast
from pathlib import Path

import pytest

from data_prep import stdlib

MODULE = '''"""The module's words."""

import os


class Thing:
    """A thing.

        Indented further.
    """

    def method(self):
        "One line."
        text = """no docstring"""
        if text:
            def inner():
                """Inside an if."""
                return os
        return text
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text('"""Tests."""')
    (tmp_path / "b.py").write_text(MODULE)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "LICENSE.txt").write_text("Licence.\n\nNo warranty.")
    packages = tmp_path / "site-packages"
    for name, text in (("one", "Licence.\n\nOne's own."), ("two", "Licence.\n\nNo   warranty.\n\nTwo's own.")):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "LICENSE").write_text(text)
        (packages / f"{name}.dist-info" / "METADATA").write_text(
            f"Name: {name}\nVersion: 1\n\n# The README of {name}\n"
        )
    monkeypatch.setattr(stdlib, "_library", lambda: tmp_path)
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(packages))
    return tmp_path


def test_code_keeps_everything_but_docstrings(library):
    empty, code, broken = (document.decode() for document in stdlib.documents("stdlib:code"))
    assert empty == "x = 1\n"
    assert broken == ""
    for words in ("The module's words", "A thing", "One line", "Inside an if"):
        assert words not in code
    assert 'text = """no docstring"""' in code
    assert ast.parse(code.replace("class Thing:", "class Thing:\n    pass"))


def test_docs_are_docstrings_and_texts(library):
    documents = [document.decode() for document in stdlib.documents("stdlib:docs")]
    assert documents[1] == "The module's words.\n\nA thing.\n\nIndented further.\n\nOne line.\n\nInside an if."
    assert documents[-5:] == [
        "Licence.\n\nNo warranty.",
        "One's own.",
        "# The README of one\n",
        "Two's own.",
        "# The README of two\n",
    ]
    assert any("lambda" in document for document in documents[3:-5])  # help()'s topics


def test_this_machine_has_both():
    for name in stdlib.NAMES:
        assert len(stdlib.files(f"stdlib:{name}")) > 100
