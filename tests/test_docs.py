"""Links in the documents lead somewhere, and measured figures say with what they were measured."""

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

PICTURE = re.compile(r"!\[[^\]\n]*\]\((?!\w+://)[^)\s]+\.(?:png|jpe?g|webp)\)")
UNITS = re.compile(r"tokens/s|MFU|TFLOP|GiB|\bnats\b|\bms\b|µs|÷|of plain torch")
LOSSES = re.compile(r"loss.*\|.*\d\.\d\d", re.DOTALL)
# docs/results/README.md explains the line that follows each measured table or picture.
RECORD = re.compile(
    r"Command: (?P<command>.+?) · Commit: (?P<commit>.+?) · Machine: (?P<machine>.+?) · Date: (?P<date>.+?)"
    r"(?: · Code since: (?:un)?changed)?"
)
VALUES = {
    "command": re.compile(r"`.+|the (first block|block (above|below|of the README))\b.*"),
    "commit": re.compile(r".*\b[0-9a-f]{7,40}\b.*"),
    "machine": re.compile(r"(?!not recorded).+"),
    "date": re.compile(r"20\d\d-\d\d-\d\d\b.*"),
}
COMMITS_SINCE = "2026-11-24"  # from then on "recorded in" does not do: the measured commit is named
RESULTS = ROOT / "docs" / "results"
MEASURED = [ROOT / "README.md", *sorted(ROOT.glob("kernels/**/README.md")), *sorted(RESULTS.glob("*.md"))]
KNOWN = (ROOT / "tests" / "known_unrecorded.txt").read_text(encoding="utf-8").splitlines()


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


def is_table(block: str) -> bool:
    return any(line.lstrip().startswith("|") for line in block.splitlines())


def is_measured(block: str) -> bool:
    """A picture of this repository, or a table that gives a measured quantity."""
    return bool(PICTURE.search(block) or (is_table(block) and (UNITS.search(block) or LOSSES.search(block))))


def missing(record: str) -> list[str]:
    """What a line leaves open of Command, Commit, Machine and Date; `the line` where it is no such line."""
    match = RECORD.fullmatch(" ".join(record.split()))
    if match is None:
        return ["the line"]
    open_fields = [field for field, form in VALUES.items() if not form.fullmatch(match[field])]
    if match["date"] >= COMMITS_SINCE and "recorded in" in match["commit"]:
        open_fields.append("commit")
    return open_fields


def first_line(block: str) -> str:
    """Without the targets of its links, which move."""
    return re.sub(r"\]\([^)]*\)", "]", block.lstrip().splitlines()[0])


def unrecorded(text: str, all_figures: bool) -> list[str]:
    """First lines of the tables and pictures that no whole line follows.

    Tables and pictures in a row share the line after the last. With all_figures false only measured ones need it, and a
    paragraph with tokens/s needs a link to docs/results."""
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", FENCE.sub("\n\n```\n\n", text)) if block.strip()]
    found = []
    for i, block in enumerate(blocks):
        if is_measured(block) or (all_figures and (is_table(block) or PICTURE.search(block))):
            after = next((b for b in blocks[i + 1 :] if not is_table(b) and not PICTURE.search(b)), "")
            found += [f"{what} of {first_line(block)}" for what in missing(after)]
        elif not all_figures and re.search(r"\d tokens/s", block) and missing(block) and "docs/results/" not in block:
            found.append(f"a link of {first_line(block)}")
    return found


@pytest.mark.parametrize("document", MEASURED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_measured_figures_are_recorded(document: Path) -> None:
    name = document.relative_to(ROOT).as_posix()
    text = document.read_text(encoding="utf-8")
    found = {f"{name}: {offence}" for offence in unrecorded(text, all_figures=document.parent == RESULTS)}
    known = {line for line in KNOWN if line.startswith(f"{name}: ")}
    assert not found - known, "docs/results/README.md has the form:\n" + "\n".join(sorted(found - known))
    assert not known - found, "repaired, to be deleted from known_unrecorded.txt:\n" + "\n".join(sorted(known - found))


def test_known_unrecorded_are_of_documents() -> None:
    assert {line.split(": ")[0] for line in KNOWN} <= {path.relative_to(ROOT).as_posix() for path in MEASURED}
    assert len(KNOWN) <= 1


RECORDED = "Command: `make a` · Commit: 1a2b3c4 · Machine: one H200 · Date: 2026-11-24"


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (RECORDED, []),
        (RECORDED.replace(" · Machine", "\n· Machine") + " · Code since: changed", []),
        ("", ["the line"]),
        ("Some text.\n\n" + RECORDED, ["the line"]),
        (RECORDED.replace(" · Date: 2026-11-24", ""), ["the line"]),
        (RECORDED.replace("`make a`", "not recorded"), ["command"]),
        (RECORDED.replace("1a2b3c4", "main"), ["commit"]),
        (RECORDED.replace("1a2b3c4", "recorded in 1a2b3c4"), ["commit"]),
        (RECORDED.replace("1a2b3c4", "recorded in 1a2b3c4").replace("-24", "-23"), []),
        (RECORDED.replace("one H200", "not recorded"), ["machine"]),
        (RECORDED.replace("2026-11-24", "today"), ["date"]),
    ],
)
def test_what_a_record_lacks(after: str, found: list[str]) -> None:
    text = f"# Page\n\n![A](a.png)\n\n| run | tokens/s |\n|---|---|\n| a | 5 |\n\n{after}\n"
    assert unrecorded(text, True) == [f"{what} of {of}" for of in ("![A]", "| run | tokens/s |") for what in found]


def test_only_measured_figures_need_a_record_in_a_readme() -> None:
    files = "| file | what |\n|---|---|\n| `loss.png` | training loss |\n"
    assert unrecorded(f"![CI](https://a/b.png)\n\n{files}", False) == []
    assert unrecorded("| run | loss |\n|---|---|\n| a | 3.50 |\n", False) == ["the line of | run | loss |"]
    assert unrecorded("It trains 5 tokens/s.", False) == ["a link of It trains 5 tokens/s."]
    assert unrecorded("It trains 5 tokens/s ([more](docs/results/a.md)).", False) == []
