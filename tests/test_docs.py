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
    links = LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    assert [link for link in links if "://" not in link and not leads_somewhere(document, link)] == []


def leads_somewhere(document: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (document.parent / name).resolve() if name else document
    if not target.exists() or ROOT not in [target, *target.parents]:
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target.read_text(encoding="utf-8"))


def test_anchors_are_githubs() -> None:
    assert anchors("# `make test`, and why\n## A [link](b.md) × 2\n```\n# no\n```\n") == {
        "make-test-and-why",
        "a-link--2",
    }
