"""Links in the documents lead somewhere: files of this repository, and headings in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!`)!?\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "kernels/**/*.md", "eval/**/*.md", "slurm/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_link_is_dead(document: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or ROOT not in [target, *target.parents]:
            dead.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            dead.append(link)
    assert not dead


def test_anchors_are_githubs() -> None:
    assert anchors("# `make test`, and why\n## A [link](b.md) × 2\n```\n# no\n```\n") == {"make-test-and-why", "a-link--2"}
