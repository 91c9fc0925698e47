"""A run whose stages change core, RoPE base, length, data and batch, stopped inside any of them."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from ssscale.parallel.groups import Groups
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint_folder import saved_config
from tests.conftest import ROOT
from tests.train.ranks import Ranks, state_of
from tests.train.same import compare


@pytest.fixture(scope="module")
def short_rows(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus's documents under the same tokenizer, packed to rows of 128."""
    out = tmp_path_factory.mktemp("short") / "data"
    source = f"--source=code={corpus.parent / 'code'}"
    options = ["--tokenizer", str(corpus / "tokenizer.json"), "--length=128", "--valid-fraction=0.2"]
    command = [sys.executable, "-m", "data_prep", "pack", "--out", str(out), *options, source]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out


def test_stages_change_the_model_the_data_and_the_batch(
    corpus: Path, short_rows: Path, tmp_path: Path, groups: Groups
) -> None:
    constant = {"kind": "constant", "lr": 1e-3}
    stages = [
        {
            "name": "softmax",
            "tokens": 4096,
            "schedule": constant,
            "batch_warmup": [{"batch_size": 2, "tokens": 1024}],
            "model": {"mixers": ["softmax"]},
        },
        {"name": "ssmax", "tokens": 4096, "schedule": constant, "model": {"mixers": ["ssmax"]}, "mix": {"docs": 1.0}},
        {
            "name": "short",
            "tokens": 4096,
            "schedule": constant,
            "data_path": str(short_rows),
            "length": 128,
            "model": {"position": {"rope": {"base": 5e5}}, "mixer": {"ssmax": {"scale": 0.5}}},
            "batch_size": 8,
            "microbatch": 2,
        },
    ]
    run = {
        "include": [f"{ROOT}/configs/{name}.yaml" for name in ("model/tiny", "model/softmax", "data/stdlib")],
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_heads": 1},
        "train": {"batch_size": 4, "microbatch": 1, "stages": stages, "log_every": 1, "eval_every": 5},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    arguments = [f"config={file}", f"data.path={corpus}", "train.eval_rows=4", "train.keep=20"]
    whole = Ranks([*arguments, "train.save_every=1"], tmp_path / "whole", small=False)
    whole.finish()
    records = [record for record in whole.records() if "loss" in record]
    assert [record["stage"] for record in records] == ["softmax"] * 5 + ["ssmax"] * 4 + ["short"] * 4
    assert [record["tokens"] for record in records] == [512, *range(1024, 12289, 1024)]
    states = [state_of(path) for path in sorted((tmp_path / "whole/checkpoints").glob("step-*"))]
    assert [state["samples"] for state in states] == [2, 4, 8, 12, 16, 20, 24, 28, 32, 8, 16, 24, 32]
    # Stopped in the first stage, at the end of it, inside the second, and at the end of that.
    for step in (1, 5, 7, 9, 13):
        Ranks(
            [*arguments, "train.save_every=1000", f"train.max_steps={step}"], tmp_path / "parts", small=False
        ).finish()
    compare(tmp_path / "whole", tmp_path / "parts")
    # Every checkpoint can be evaluated, though its stages cannot be trained from its own configuration.
    models = [load_for_inference(path, groups)[0] for path in sorted((tmp_path / "whole/checkpoints").glob("step-*"))]
    s = [dict(model.named_parameters()).get("blocks.0.attention.weights.s", torch.zeros(1)).item() for model in models]
    begun = 256 / math.lgamma(257)  # 1 / mean(ln n)
    assert s == pytest.approx([0] * 5 + [begun] * 4 + [0.5] * 4, abs=5e-3)  # the last stage replaces what was trained


def test_what_is_trained_is_saved_before_a_stage_begins(corpus: Path, tmp_path: Path) -> None:
    """With the configuration by which it was trained. And the same stages are needed to go on."""
    tokens = 4 * 256 * 2
    stages = [
        {"name": "softmax", "tokens": tokens},
        {"name": "ssmax", "tokens": tokens, "model": {"mixers": ["ssmax"]}},
        {"name": "elsewhere", "tokens": tokens, "data_path": str(tmp_path / "absent")},
    ]
    schedule = {"schedule": {"kind": "constant", "lr": 1e-3}}
    run = {
        "include": [f"{ROOT}/configs/{name}.yaml" for name in ("model/tiny", "model/softmax", "data/stdlib")],
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_heads": 1},
        "train": {
            "batch_size": 4,
            "microbatch": 1,
            "stages": [stage | schedule for stage in stages],
            "save_every": 100,
        },
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    arguments = [f"config={file}", f"data.path={corpus}", "train.eval_every=0"]
    stopped = Ranks(arguments, tmp_path / "run", size=1, small=False)
    assert stopped.wait() == [2]
    assert f"data folder {tmp_path / 'absent'} does not exist" in stopped.output()
    saved = {path.name: saved_config(path).model.mixers for path in (tmp_path / "run/checkpoints").iterdir()}
    assert saved == {"step-00000002": ["softmax"], "step-00000004": ["ssmax"]}

    changed = Ranks([*arguments, "train.stages.1.batch_size=2"], tmp_path / "run", size=1, small=False)
    assert changed.wait() == [2]
    assert "train.stages: step 4 of the run in" in changed.output()
    assert "has trained 4,096 tokens, and by the stages as given 3,072: give the stages" in changed.output()
    (tmp_path / "run/config.yaml").unlink()  # the checkpoint's copy takes its place
    again = Ranks(arguments, tmp_path / "run", size=1, small=False)
    assert again.wait() == [2]
    assert "holds something that is not a run" not in again.output()
    assert again.output().count("absent does not exist") == 2


def test_a_run_does_not_go_on_at_another_row_of_its_folder(corpus: Path, tmp_path: Path) -> None:
    """The first stage's folder was another one: the third would begin at its first row again, and say nothing."""
    tokens, schedule = 4 * 256 * 2, "schedule: {kind: constant, lr: 1e-3}"
    shutil.copytree(corpus, tmp_path / "other")

    def arguments(third: Path) -> list[str]:
        paths = ["null", tmp_path / "other", third]
        stages = [f"{{name: s{n}, tokens: {tokens}, {schedule}, data_path: {path}}}" for n, path in enumerate(paths)]
        return [f"train.stages=[{', '.join(stages)}]", "train.save_every=5", "data.num_workers=0"]

    keys = [*arguments(corpus), f"data.path={corpus}", "train.max_steps=5"]
    Ranks(keys, tmp_path / "run", size=1).finish()
    (tmp_path / "moved").symlink_to(corpus)
    keys = [*arguments(corpus), f"data.path={tmp_path / 'moved'}"]
    stopped = Ranks(keys, tmp_path / "run", size=1)
    assert stopped.wait() == [2]
    assert "step 5 of the run in" in stopped.output()
    assert "has read 12 rows of its data folder, and by the stages as given 4: give the stages" in stopped.output()
    keys = [*arguments(tmp_path / "moved"), f"data.path={tmp_path / 'moved'}"]
    moved = Ranks(keys, tmp_path / "run", size=1)  # one folder, wherever it is
    moved.finish()
    assert state_of(tmp_path / "run/checkpoints/step-00000006")["samples"] == 16
