"""What slurm/submit.py would submit, and what the job scripts run; no Slurm needed."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm.environment import check_environment
from slurm.nodes import Node, Request, count_gpus, sbatch_flags
from slurm.submit import ROOT, main
from slurm.times import seconds_of
from ssscale.data.shards import Place
from ssscale.errors import UserError
from tests.promises import promises


@pytest.fixture(autouse=True)
def off_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slurm.submit.nodes_of", lambda partition: []
    )  # a machine that has Slurm answers as one without
    monkeypatch.setenv("SSSCALE_PYTHON", sys.executable)


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
    own = "include=mytasks tasks=capitals num_fewshot=5 samples=true out=results"
    assert followers(capsys, run, f"evaluate={own}").endswith(f"checkpoint={run} {own}")


def test_a_dry_run_submits_and_writes_nothing(capsys, tmp_path, monkeypatch) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    main(["config=tiny_sb", f"run_dir={tmp_path}/run", "gpus=0", "nodes=2", "--dry-run"])
    command, script = capsys.readouterr().out.split("\n", 1)
    assert command.startswith("sbatch --parsable")
    assert "--nodes=2" in command
    assert script == (ROOT / "slurm/pretrain.sbatch").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["evaluate=suit=stickbreaking_paper"], "unknown argument 'suit=stickbreaking_paper': did you mean suite="),
        (["evaluate=limit=many tasks=piqa"], "limit must be a whole number"),
        (["evaluate=tasks=none valid=false"], "evaluate=tasks=none valid=false: there is nothing to evaluate"),
        (["evaluate=piqa", "evaluate_jobs=0"], "evaluate_jobs must be at least 1, not 0"),
        (["evaluate_jobs=2"], "evaluate_jobs=2 is of the job that evaluate= adds"),
        (["evaluate_gpus=2"], "evaluate_gpus=2 is of the job that evaluate= adds"),
        (["evaluate=piqa", "evaluate_gpus=-1"], "evaluate_gpus must be at least 0, not -1"),
        (["evaluate=piqa", "evaluate_exclusive=yes"], "evaluate_exclusive must be true or false, not 'yes'"),
        (["exclusive=1"], "exclusive must be true or false, not '1'"),
        (["cpus=0"], "cpus must be at least 1, not 0"),
        (["cpus=many"], "cpus must be a whole number, not 'many'"),
        (["srun=--container-image='a"], "srun=--container-image='a: no closing quotation"),
        (["sbatch=--qos='a"], "sbatch=--qos='a: no closing quotation"),
        (["env=nowhere.sh"], "nowhere.sh: there is no such file"),
        (["time=bad"], "time=bad is not a time limit of Slurm: write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
        (["time=1 day"], "time=1 day is not a time limit of Slurm"),
        (["evaluate=piqa", "evaluate_time=-5"], "evaluate_time=-5 is not a time limit of Slurm"),
        (["time=5:00"], "time=5:00 must be longer than early=300 s and 60 s, by which the early signal may come soo"),
        (["time=1-0", "early=86400"], "time=1-0 must be longer than early=86400 s and 60 s"),
        (["partition="], "partition= is empty: give it a value or leave it out"),
        (["evaluate="], "evaluate= is empty: give it a value or leave it out"),
        (["evaluate=clozze"], "evaluate=clozze: tasks=clozze: there is no such task; did you mean cloze"),
        (["evaluate=tasks=piqq limit=5"], "tasks=piqq: there is no such task; did you mean piqa"),
        (["evaluate=tasks=piqa checkpoint=runs/other"], "checkpoint= is the run that this command trains: leave it"),
    ],
)
def test_mistakes_are_said_before_the_training(options, words, capsys, tmp_path) -> None:
    with pytest.raises(UserError, match=words):
        followers(capsys, tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:30", 5430),
        ("2-3", 183_600),
        ("2-3:04", 183_840),
        ("2-3:04:05", 183_845),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_time_limits_as_slurm_reads_them(text, seconds) -> None:
    assert seconds_of("time", text) == seconds


def test_jobs_run_in_the_checkout_and_are_submitted_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"submit from {re.escape(str(ROOT))}: jobs run there"):
        main(["config=mine.yaml", "gpus=0", "--dry-run"])


def test_a_percent_sign_of_the_folder_is_none_of_slurms(capsys, tmp_path) -> None:
    assert f" --output={tmp_path}/a%%j b/slurm-evaluate-%j.log " in followers(
        capsys, tmp_path / "a%j b", "evaluate=cloze"
    )


def test_a_refusal_of_slurm_is_the_only_sentence(tmp_path) -> None:
    """It came after the note on sinfo."""
    environment = os.environ | {
        "PATH": str(Path(sys.executable).parent) + ":/nowhere",
        "SSSCALE_PYTHON": sys.executable,
    }
    (tmp_path / "bash").symlink_to("/bin/bash")
    environment["PATH"] += f":{tmp_path}"
    command = ["slurm/submit.py", "config=tiny_sb", f"run_dir={tmp_path}/run", "gpus=0"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    said = "error: there is no sbatch on this machine: submit from a login node of the cluster\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert not (tmp_path / "run").exists()


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


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A job script by itself; SSSCALE_PYTHON prints what it is given."""
    given = {"SLURM_SUBMIT_DIR": str(ROOT), "SSSCALE_PYTHON": "echo", "OMP_NUM_THREADS": ""} | environment
    command = ["bash", str(ROOT / "slurm" / name), *arguments]
    ours = {key: value for key, value in os.environ.items() if not key.endswith("_CACHE_DIR")}
    return subprocess.run(command, env=ours | given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("cpus", "tasks", "asked", "threads"),
    [
        ("72(x2),36", "4(x3)", None, "9"),  # the smallest node's share
        ("64", "8", None, "8"),
        ("2(x2)", "1(x2)", "1", "1"),
        ("1", "2", None, "1"),
    ],
)
def test_cpus_per_rank_are_the_share_of_the_smallest_node(
    cpus: str, tasks: str, asked: str | None, threads: str, tmp_path: Path
) -> None:
    probe = tmp_path / "python"
    probe.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR"\n')
    probe.chmod(0o755)
    environment = {"SLURM_JOB_CPUS_PER_NODE": cpus, "SLURM_TASKS_PER_NODE": tasks, "SSSCALE_PYTHON": str(probe)}
    environment |= {"SLURM_CPUS_PER_TASK": asked} if asked else {}
    environment |= {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    result = script("evaluate.sbatch", "checkpoint=RUN", **environment)
    own = tmp_path / "ssscale-7"
    assert result.stdout.split() == [threads, f"{own}/triton", f"{own}/inductor"], result.stderr
    assert not own.exists()  # the job is over


@pytest.mark.parametrize(
    ("request_", "nodes", "flags"),
    [
        (Request(8, 8), [Node(192, 8)], ["--exclusive", "--mem=0"]),
        (Request(2, 2), [Node(192, 8)], ["--cpus-per-task=24"]),
        (Request(4, 4), [Node(64, 4), Node(192, 8)], ["--cpus-per-task=16"]),  # may get a node that others use
        (Request(8, 8), [Node(64, 4), Node(192, 8)], ["--exclusive", "--mem=0"]),
        (Request(8, 8, cpus=6, mem="100G", exclusive=False), [Node(192, 8)], ["--mem=100G", "--cpus-per-task=6"]),
        (Request(1, 1, exclusive=True), [Node(192, 8)], ["--exclusive", "--mem=0"]),
        (Request(0, 1), [Node(32, 0)], ["--cpus-per-task=32"]),
        (Request(8, 8), [], []),  # nobody to ask
        (Request(8, 8, cpus=4), [], ["--cpus-per-task=4"]),
    ],
)
def test_what_a_job_asks_of_its_nodes(request_: Request, nodes: list[Node], flags: list[str]) -> None:
    assert sbatch_flags(request_, nodes) == flags


def test_more_gpus_than_a_node_has() -> None:
    with pytest.raises(UserError, match=r"gpus=8: the nodes of this partition have at most 4; use gpus=4"):
        sbatch_flags(Request(8, 8), [Node(32, 0), Node(64, 4)])
    with pytest.raises(UserError, match=r"^evaluate_gpus=8: .* use evaluate_gpus=4"):
        sbatch_flags(Request(8, 8, prefix="evaluate_"), [Node(64, 4)])


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("lscratch:900,gpu:a100:4", 4), ("gpu:a:2,gpu:b:1", 3)],
)
def test_gpus_in_slurms_words(gres: str, gpus: int) -> None:
    assert count_gpus(gres) == gpus


@pytest.mark.parametrize("name", ["162m_softmax", "162m_ssmax_during", "350m_sb", "350m_fire"])
@pytest.mark.parametrize("nodes", [8, 16, 32])
def test_the_studies_start_on_64_to_256_ranks(
    name: str, nodes: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main([f"config={name}", f"nodes={nodes}", f"run_dir={tmp_path / 'run'}", "--dry-run"])
    assert f"--nodes={nodes} --ntasks-per-node=8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "nodes"), [("162m_softmax", 12), ("350m_rope", 24), ("350m_rope_8k", 32), ("3b_sb", 65)]
)
def test_too_many_ranks_end_in_a_command_that_works(
    name: str, nodes: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        main([f"config={name}", f"nodes={nodes}", f"run_dir={tmp_path / 'run'}", "--dry-run"])
    _, offered = str(error.value).split("; or: python slurm/submit.py ")
    main([*shlex.split(offered), "--dry-run"])
    assert f"config={name}" in capsys.readouterr().out


def test_remote_data_is_cached_on_the_nodes_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["config=3b_sb", "gpus=1", f"run_dir={tmp_path / 'run'}", "data.path=s3://bucket/data", "--dry-run"]
    main(arguments)
    assert capsys.readouterr().out.splitlines()[0].endswith(" data.cache=auto")
    main([*arguments, "data.cache=/local"])
    assert "auto" not in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setenv("SSSCALE_SCRATCH", "/scratch/job-7")
    assert Place("s3://bucket/data", "auto").local.parent == Path("/scratch/job-7/data")
    with pytest.raises(UserError, match=r"data.cache must name a local folder for it, or auto"):
        Place("s3://bucket/data", None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("export A=1\nmodule load cuda\n", r"env.sh, line 2: `module load cuda` ended with code 127 \(.*not found\)"),
        ("exit 4\n", r"env.sh left the shell \(exit 4\)"),
        ("return 3\n", r"env.sh ended with code 3"),
        ("if true; then\n", r"env.sh ended with code 2 \(.*unexpected end of file\)"),
        ("sleep 60\n", r"env.sh does not end within 1 s"),
        ("export SSSCALE_PYTHON=/no/python\n", r"there is no /no/python: run make setup, or set SSSCALE_PYTHON"),
    ],
)
def test_an_environment_that_fails_is_said(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "env.sh"
    file.write_text(text)
    began = time.monotonic()
    with pytest.raises(UserError, match=sentence) as error:
        check_environment(ROOT, file, container=False, seconds=1 if "sleep" in text else 20)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 10


def test_what_an_environment_may_do(tmp_path: Path) -> None:
    file = tmp_path / "env.sh"
    file.write_text(
        'cd /\necho "$UNSET" loud\n[ -n "$UNSET" ] && exit 1\nf() { false; true; }\nf\nexport X=1\nset -e\n'
    )
    check_environment(ROOT, file, container=False)
    result = script("evaluate.sbatch", f"env={file}", "checkpoint=RUN")
    assert (result.returncode, result.stdout) == (0, " loud\nlaunch/evaluate.py checkpoint=RUN\n")
    file.write_text("export SSSCALE_PYTHON=/no/python\n")
    check_environment(ROOT, file, container=True)


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "sentence"),
    [
        ("evaluate.sbatch", ["interface=ib7"], {}, "error: interface=ib7: .* has only .*lo"),
        ("evaluate.sbatch", ["env=/nowhere"], {}, "error: env=/nowhere: .* has no such file"),
        ("evaluate.sbatch", [], {"SSSCALE_PYTHON": "/no/python"}, "error: .* has no /no/python: run make setup"),
        ("evaluate.sbatch", [], {"SSSCALE_SCRATCH": "/proc/no"}, "cannot make /proc/no: set SSSCALE_SCRATCH"),
        ("data_prep.sbatch", ["pack"], {}, "error: pack needs --out FOLDER"),
        ("data_prep.sbatch", ["merge"], {}, "error: merge needs --out FOLDER"),
        ("data_prep.sbatch", ["merge", "--out=/nowhere"], {}, "/nowhere.parts has no finished part: run pack as an array"),
        ("data_prep.sbatch", ["pack", "--out", "x", "--task=1/2"], {}, "error: --task is the array's"),
        (
            "data_prep.sbatch",
            ["pack", "--out", "x"],
            {f"SLURM_ARRAY_TASK_{key}": value for key, value in (("ID", "3"), ("COUNT", "2"), ("MIN", "3"), ("MAX", "4"))},
            "error: the array must count from 0 without gaps, such as --array=0-1",
        ),
    ],
)  # fmt: skip
def test_a_job_script_ends_with_a_sentence(
    name: str, arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    result = script(name, *arguments, **environment)
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(sentence, result.stderr), result.stderr


def test_pack_without_an_array_makes_the_folder() -> None:
    result = script("data_prep.sbatch", "pack", "--config=c.yaml", "--out", "x", SLURM_CPUS_PER_TASK="9")
    assert result.stdout.splitlines() == [
        "-m data_prep pack --out x --config=c.yaml --workers 8",
        "-m data_prep verify x",
    ]
    result = script("data_prep.sbatch", "stats", "x")
    assert result.stdout == "-m data_prep stats x\n"


@promises(
    "Slurm",
    "the job has started again `SSSCALE_MAX_RESTARTS` times without a new checkpoint",
    seen="`… not started again after 100 times without a new checkpoint`",
    code="that of the last start",
    do="read why the starts have ended, above in the log",
)
@pytest.mark.parametrize("given_as", ["run_dir", "name"])
def test_only_restarts_without_a_new_checkpoint_count(given_as: str, tmp_path: Path) -> None:
    """Each start loses a rank. Some have saved before."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", 'echo 76 >>"$SSSCALE_EXIT_CODES"; exit 76'), ("scontrol", "echo scontrol $*")):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    job = f"test-{os.getpid()}"
    run = ROOT / "runs" / job if given_as == "name" else tmp_path / "my run"
    name = job if given_as == "name" else str(run)
    environment = {
        "SLURM_JOB_ID": job,
        "SSSCALE_MAX_RESTARTS": "3",
        "MASTER_ADDR": "",
        "SLURM_JOB_NODELIST": "localhost",
    }
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "SSSCALE_SCRATCH": str(tmp_path / "scratch")}
    ends = []
    try:
        for start, saved in enumerate([None, 4, 4, 4, 8, 8, 8, 8]):
            if saved is not None:
                (run / f"checkpoints/step-{saved:08d}").mkdir(parents=True, exist_ok=True)
            given = environment | {"SLURM_RESTART_COUNT": str(start)}
            result = script("pretrain.sbatch", "config=tiny_sb", f"{given_as}={name}", **given)
            ends.append(f"scontrol requeue {job}" in result.stdout)
    finally:
        left = (ROOT / f".slurm-{job}.progress").exists()
        (ROOT / f".slurm-{job}.progress").unlink(missing_ok=True)
        shutil.rmtree(run)
    assert ends == [True] * 7 + [False], result.stdout + result.stderr
    assert (
        "a rank was lost or hung, or a GPU failed; not started again after 3 times without a new checkpoint"
        in result.stdout
    )
    assert not left
