"""What slurm/submit.py would submit, and what slurm/evaluate.sbatch runs; no Slurm needed."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from slurm.submit import ROOT, main
from ssscale.errors import UserError


def followers(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    """The second command of a dry run."""
    main(["config=tiny_sb", f"run_dir={run}", "gpus=0", "--dry-run", *options])
    return " ".join(shlex.split(capsys.readouterr().out.splitlines()[1]))


def test_an_evaluation_follows_as_one_job_or_several(capsys, tmp_path) -> None:
    run = tmp_path / "run"
    assert followers(capsys, run, "evaluate=cloze,piqa").endswith(
        f"--dependency=afterok:JOB slurm/evaluate.sbatch checkpoint={run} tasks=cloze,piqa"
    )
    several = followers(capsys, run, "evaluate=suite=stickbreaking_paper eval_data='my data'", "evaluate_jobs=4")
    assert " --array=0-3 --dependency=afterok:JOB slurm/evaluate.sbatch" in several
    assert several.endswith(f"checkpoint={run} suite=stickbreaking_paper eval_data=my data")
    assert "slurm-evaluate-%A_%a.log" in several


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["evaluate=suit=stickbreaking_paper"], "unknown argument 'suit=stickbreaking_paper': did you mean suite="),
        (["evaluate=limit=many tasks=piqa"], "limit must be a whole number"),
        (["evaluate=piqa", "evaluate_jobs=0"], "evaluate_jobs must be at least 1, not 0"),
        (["evaluate_jobs=2"], "evaluate_jobs=2: a number from 1 on of the jobs that do what evaluate= names"),
    ],
)
def test_mistakes_are_said_before_the_training(options, words, capsys, tmp_path) -> None:
    with pytest.raises(UserError, match=words):
        followers(capsys, tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "launch/evaluate.py checkpoint=RUN tasks=piqa"),
        (
            {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "5"},
            "launch/evaluate.py checkpoint=RUN tasks=piqa part=2/5",
        ),
    ],
)
def test_the_script_gives_a_task_of_an_array_its_part(environment, expected) -> None:
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(ROOT), "SSSCALE_PYTHON": "echo"} | environment
    command = ["bash", str(ROOT / "slurm/evaluate.sbatch"), "checkpoint=RUN", "tasks=piqa"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
