"""The table of imported families: `python -m tests.hf.import_table` writes docs/reference/import.md.

SSSCALE_TRANSFORMERS_5 must name a folder with transformers 5 (`make test-transformers5` makes it). Each version makes and
saves the models in a process of its own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from eval.checkpoint.environment import prepare

prepare()

import torch
from safetensors.torch import load_file

from ssscale.hf.convert import export_checkpoint, import_checkpoint
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups, initialize
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import CheckpointReader
from tests.hf.families import MODELS, TEXT
from tests.hf.jobs import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "import.md"
FIVE = "SSSCALE_TRANSFORMERS_5"
HEAD = """# Which models can be imported

`python -m tests.hf.import_table` makes this page. It saves a small random model of each kind with the two pinned
versions of transformers, imports it with `launch/import_hf.py`, and compares the logits of {tokens} tokens in float32.
The columns of the versions hold the largest difference, divided by the largest logit. The model is then exported in the
format of the last column. The weights that come back are bit-identical. In the formats of transformers itself, so are
its logits.

`make test` repeats this with transformers {four}; `make test-transformers5` repeats it with both versions. Everything
ran on a CPU. [Import](../guide/export.md#import) says what is refused.
"""


def run_families(what: str, folder: Path, packages: str, *more: str) -> None:
    """Runs tests/hf/families.py. packages: a folder whose transformers comes before the installed one, or empty."""
    paths = [packages, str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.hf.families", what, str(folder), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def our_logits(folder: Path, groups: Groups) -> torch.Tensor:
    decoder, _ = load_for_inference(folder, groups)
    with torch.no_grad():
        return decoder(torch.tensor(TEXT), PackedLayout.from_lengths([len(TEXT)]))


def there_and_back(name: str, folder: Path, expected: torch.Tensor, groups: Groups, out: Path) -> float:
    """Imports the model as out/run, exports it as out/again, and imports that.

    expected: its logits. Returns the largest difference of our logits, divided by the largest logit.
    """
    form = MODELS[name][2]
    checkpoint = import_checkpoint(folder, out / "run", groups)
    found = our_logits(checkpoint, groups)
    export_checkpoint(checkpoint, out / "again", 1, 2, form=form)
    if form != "ssscale":
        before, after = (load_file(place / "model.safetensors") for place in (folder, out / "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    twice = import_checkpoint(out / "again", out / "twice", groups)
    once, again = CheckpointReader(checkpoint), CheckpointReader(twice)
    assert once.weights == again.weights
    assert all(torch.equal(once.whole(key, "weight"), again.whole(key, "weight")) for key in once.weights)
    assert torch.equal(our_logits(twice, groups), found)
    return float((found - expected).abs().max() / expected.abs().max())


def of_version(packages: str, groups: Groups, scratch: Path, tokenizer: Path) -> dict[str, float]:
    """Makes all models with a version of transformers, and takes them there and back. Returns `there_and_back` by name."""
    run_families("make", scratch / "theirs", packages, str(tokenizer))
    found, plain = {}, scratch / "plain"
    plain.mkdir()
    for name, (_, _, form) in MODELS.items():
        folder = scratch / "theirs" / name
        found[name] = there_and_back(name, folder, torch.load(folder / "logits.pt"), groups, scratch / "ours" / name)
        if form != "ssscale":
            (plain / name).symlink_to(scratch / "ours" / name / "again")
    run_families("load", plain, packages)
    for path in plain.iterdir():
        assert torch.equal(*(torch.load(place / path.name / "logits.pt") for place in (scratch / "theirs", plain)))
    return found


def write_page(versions: dict[str, dict[str, float]]) -> str:
    """versions: the results of `of_version` by the version's number."""
    lines = [f"| model | `model_type` | {' | '.join(versions)} | way back |", "|---" * (len(versions) + 3) + "|"]
    for name, (kind, _, form) in MODELS.items():
        cells = [f"{found[name]:.0e}" for found in versions.values()]
        lines.append(f"| {name} | `{kind}` | {' | '.join(cells)} | `format={form}` |")
    return HEAD.format(tokens=len(TEXT), four=min(versions)) + "\n" + "\n".join(lines) + "\n"


def read_page() -> dict[str, dict[str, float]]:
    """The argument of `write_page`, as rounded."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    return {
        version: {row[0]: float(row[column]) for row in rows[1:]} for column, version in enumerate(rows[0][2:-1], 2)
    }


def main() -> None:
    import transformers

    packages, versions = os.environ.get(FIVE, ""), {}
    if not packages:
        sys.exit(f"error: {FIVE} names no folder with transformers 5: run `make test-transformers5`")
    five = (Path(packages) / "installed.txt").read_text().split("transformers==")[1].split()[0]
    for version, where in ((transformers.__version__, ""), (five, packages)):
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = make_tokenizer(Path(scratch) / "tokenizer.json")
            versions[version] = of_version(where, initialize(), Path(scratch), tokenizer)
    PAGE.write_text(write_page(versions), encoding="utf-8")


if __name__ == "__main__":
    main()
