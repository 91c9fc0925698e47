"""docs/guide/papers.md: its commands exist, its run files load with their keys, and its hours are those of the estimate."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ssscale.config import load_config, run_names
from ssscale.train.schedule import total_tokens

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guide" / "papers.md").read_text()
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "python " in line or "slurm/" in line
]


def loops(line: str) -> list[str]:
    """The run files that $c stands for: those of the loop before the line."""
    before = PAGE[: PAGE.index(line.split("  ")[0])]
    return re.findall(r"for c in ([^;]+);", before)[-1].split() if "$c" in line else [""]


@pytest.mark.parametrize("line", LINES)
def test_a_command_exists_and_takes_its_options(line: str) -> None:
    for module in re.findall(r"python -m ([\w.]+)", line):
        file = ROOT / module.replace(".", "/")
        source = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__main__.py"
        assert source.is_file()
        text = source.read_text()
        for flag in re.findall(r" (--[a-z-]+)", line):
            assert f'"{flag}"' in text, flag
    for script in re.findall(r"(?:launch|slurm)/\w+\.(?:py|sbatch)", line):
        assert (ROOT / script).is_file()
    for script in re.findall(r"python (launch/\w+\.py|slurm/submit\.py)", line):
        text = (ROOT / script).read_text() + (ROOT / "launch" / "workers.py").read_text()
        for key in re.findall(r" ([a-z_]+)=", re.sub(r'"[^"]*"', "", line)):
            assert f'"{key}"' in text or key == "config", key


def test_run_files_load_with_their_keys() -> None:
    seen = set()
    for line in LINES:
        if "config=" not in line:
            continue
        keys = [word for word in shlex.split(line) if re.match(r"(data|model|train)\.\w+", word)]
        for name in loops(line):
            words = [word.replace("$c", name) for word in shlex.split(line) if word.startswith("config=")]
            load_config([*words, *keys])
            seen.add(words[0].removeprefix("config="))
    assert {name for name in run_names() if name.startswith(("350m", "162m"))} - seen == {"162m_sb", "350m_rope_ntk"}
    assert {"1b_sb", "1b_sb_rem", "1b_softmax", "3b_sb", "3b_softmax"} <= seen


def test_every_figure_and_table_has_a_row() -> None:
    found: dict[str, set[int]] = {}
    for paper, tables, numbers in re.findall(
        r"^\| (SSMax|stick-breaking)(, Tables?)? (\d[\d, to]*)", PAGE, re.MULTILINE
    ):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
            kind = found.setdefault(paper + (" tables" if tables else ""), set())
            kind |= set(range(int(first), int(last or first) + 1))
    eight = set(range(1, 9))
    assert found == {
        "SSMax": eight,
        "SSMax tables": {1, 2, 3},
        "stick-breaking": eight,
        "stick-breaking tables": {1, 2, 3, 4, 5},
    }


@pytest.mark.parametrize(("codes", "calls"), [("75 75 0", 3), ("0", 1), ("75 1", 2), ("2", 1)])
def test_recall_continues_until_it_is_done(codes: str, calls: int) -> None:
    """It was given once, and stops with code 75 after nine minutes of at most ten hours."""
    recall = [line for line in LINES if "eval.papers.mqrar" in line]
    assert len(recall) == 2
    for line in recall:
        assert " --plain" in line
        fake = f"codes=({codes}); calls=0; python() {{ calls=$((calls + 1)); return ${{codes[calls - 1]}}; }}"
        done = subprocess.run(
            ["bash", "-c", f"{fake}; {line}; echo $calls"], capture_output=True, text=True, timeout=20
        )
        assert (done.stdout, done.stderr) == (f"{calls}\n", "")


@pytest.mark.parametrize(
    ("name", "hours"),
    [("162m_ssmax_pn", 0.5), ("162m_ssmax", 3.9), ("350m_sb", 0.4), ("1b_sb", 141), ("1b_sb_rem", 141), ("3b_sb", 351)],
)
def test_hours_are_those_of_the_estimate(name: str, hours: float) -> None:
    from ssscale.model.flops import PEAK_FLOPS, flops_per_token

    config = load_config([f"config={name}"])
    operations = flops_per_token(config.model, config.data.length, causal_half=False) * total_tokens(
        config.train.stages
    )
    estimate = operations / (0.4 * PEAK_FLOPS) / 3600 / 64
    assert hours == round(estimate, 1 if estimate < 10 else 0)
    assert f"{hours:g}" in PAGE


def test_usage_names_the_command() -> None:
    """And not `__main__.py`, which nobody can enter."""
    named = {}
    for file in sorted(ROOT.glob("eval/**/*.py")):
        for call in re.findall(r"= (?:argparse\.Argument)?Parser\(\s*(.*)", file.read_text()):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            named[module] = call.startswith(f'"python -m {module}"')
    assert len(named) > 10
    assert [module for module, right in named.items() if not right] == []
