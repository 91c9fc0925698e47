"""A cluster as users meet it: nodes of two CPUs and two GPUs that bind tasks, a site's environment, data as job arrays."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.process import first_host
from tests.conftest import ROOT
from tests.promises import promises
from tests.slurm.jobs import Job, job_field, losses, started, submit
from tests.train.ranks import SMALL

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
PATTERNS = {"web": "docs/**/*.md", "code": "ssscale/**/*.py", "high_quality": "kernels/**/*.py"}
# In python's place: what a rank is given.
PROBE = """#!/usr/bin/env -S {python} -S
import json, os, sys
seen = {{"cpus": sorted(os.sched_getaffinity(0)), "arguments": sys.argv[1:], "environment": dict(os.environ)}}
open(f"{folder}/rank-{{os.environ['SLURM_PROCID']}}.json", "w").write(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two CPUs are needed to see a binding")
    with started(tmp_path_factory, SLURM_CPUS="2", SLURM_GPUS="2", SLURM_TASK_PLUGIN="task/affinity"):
        yield


def wait_for_end(number: str, timeout: float = 400.0) -> str:
    """The state in which a job, or all of an array, ends."""
    end = time.monotonic() + timeout
    command = ["squeue", "--noheader", f"--job={number}", "--states=PD,R,CF,CG"]
    while subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
        assert time.monotonic() < end, job_field(number, "Reason")
        time.sleep(0.2)
    return job_field(number, "JobState")


class Probe:
    """A job of submit.py on two nodes whose ranks only say what they were given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        python = folder / "python"
        python.write_text(PROBE.format(python=sys.executable, folder=folder))
        python.chmod(0o755)
        monkeypatch.setenv("SSSCALE_PYTHON", str(python))
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"):  # the latter is torch's, which the tests import
            monkeypatch.delenv(name, raising=False)
        self.run = folder / "run"
        where = [f"run_dir={self.run}", "nodes=2", "train.batch_size=4"]
        result = submit(*SMALL, *where, *options)
        assert result.returncode == 0, result.stderr
        self.number = re.findall(r"^job (\d+)", result.stdout)[0]
        assert wait_for_end(self.number) == "COMPLETED", self.log()
        files = sorted(folder.glob("rank-*.json"))
        self.ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]

    def log(self) -> str:
        file = self.run / f"slurm-{self.number}.log"
        return file.read_text() if file.is_file() else ""

    def every(self, name: str) -> set[str | None]:
        return {rank["environment"].get(name) for rank in self.ranks}


@pytest.mark.parametrize(
    ("options", "cpus", "threads", "exclusive"),
    [
        (["gpus=1", "cpus=1"], [1, 1], "1", False),
        (["gpus=1", "cpus=2"], [2, 2], "2", False),
        (["gpus=1"], [1, 1], "1", False),  # one of two GPUs: half of the CPUs
        (["gpus=2"], [1, 1, 1, 1], "1", True),  # all GPUs: the whole nodes
        (["gpus=1", "exclusive=true"], [2, 2], "2", True),
        (["gpus=1", "exclusive=true", "cpus=1"], [1, 1], "1", True),  # of the two that the job has: srun was told
    ],
)
def test_cpus_reach_the_ranks(
    slurm: None,
    options: list[str],
    cpus: list[int],
    threads: str,
    exclusive: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    probe = Probe(tmp_path, monkeypatch, *options)
    assert [len(rank["cpus"]) for rank in probe.ranks] == cpus  # os.sched_getaffinity
    for node in probe.every("SLURM_NODEID"):  # ranks of one node have CPUs of their own
        bound = [cpu for rank in probe.ranks if rank["environment"]["SLURM_NODEID"] == node for cpu in rank["cpus"]]
        assert len(set(bound)) == len(bound)
    assert probe.every("SLURM_CPUS_PER_TASK") == probe.every("OMP_NUM_THREADS") == {threads}
    assert (job_field(probe.number, "OverSubscribe") == "NO") is exclusive
    assert (job_field(probe.number, "MinMemoryNode") == "0") is exclusive or not exclusive
    assert f"{threads} CPUs per rank" in probe.log()


def test_a_site_environment_interfaces_and_caches(slurm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text('export SITE="from env.sh"\nexport WHERE=$SLURM_JOB_ID\ncd /\n')
    flags = 'srun=--export="ALL,MARK=two words" --label'
    monkeypatch.setenv("MASTER_ADDR", "left.by.another.job")
    probe = Probe(tmp_path, monkeypatch, "gpus=1", f"env={site}", "interface=eth0", flags)
    scratch = f"/tmp/ssscale-{probe.number}"
    for name, value in {
        "SITE": "from env.sh",
        "WHERE": probe.number,
        "MARK": "two words",
        "MASTER_ADDR": "node1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "SSSCALE_SCRATCH": scratch,
        "TRITON_CACHE_DIR": f"{scratch}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
    }.items():
        assert probe.every(name) == {value}, name
    assert all(rank["arguments"][:2] == ["launch/pretrain.py", "config=tiny_sb"] for rank in probe.ranks)
    assert not any(argument.startswith(("env=", "srun=")) for argument in probe.ranks[0]["arguments"])
    assert not Path(scratch).exists()
    assert json.loads((probe.run / f"slurm-{probe.number}.json").read_text())["env"]["file"] == str(site)


def queued() -> str:
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout


@promises(
    "Slurm",
    "`env.sh` fails",
    seen="no job is queued: ``slurm/env.sh, line 2: `module load cuda` ended with code 127``",
    code="2",
    do="follow the message",
)
def test_an_environment_that_fails_is_said_before_anything_waits(slurm: None, tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("export A=1\nmodule load cuda\n")
    result = submit(*SMALL, f"run_dir={tmp_path / 'run'}", "nodes=2", "gpus=1", f"env={site}")
    assert result.returncode == 2
    sentence = (
        f"error: {site}, line 2: `module load cuda` ended with code 127 ({site}: line 2: module: command not found)"
    )
    assert result.stderr == f"{sentence}; nothing was submitted\n"
    assert queued() == ""
    assert not (tmp_path / "run").exists()


@promises(
    "Slurm",
    "`interface=` names an interface that the node does not have",
    seen="the job ends: `interface=ib0: node1 has only lo eth0`",
    code="2",
    do="follow the message",
)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("env", "error: .*site.sh, line 2: `module load gpu` ended with code 127"),
        ("interface=ib0", "error: interface=ib0: node1 has only lo eth0"),
    ],
)
def test_what_fails_on_the_node_ends_the_job_with_a_sentence(
    slurm: None, options: str, sentence: str, tmp_path: Path
) -> None:
    site = tmp_path / "site.sh"
    site.write_text('if [ -n "${SLURM_JOB_ID:-}" ]; then\nmodule load gpu\nfi\n')
    given = f"env={site}" if options == "env" else options
    result = submit(*SMALL, f"run_dir={tmp_path / 'run'}", "nodes=2", "gpus=1", given)
    assert result.returncode == 0, result.stderr
    number = re.findall(r"^job (\d+)", result.stdout)[0]
    assert wait_for_end(number) == "FAILED"
    assert re.search(sentence, (tmp_path / f"run/slurm-{number}.log").read_text())
    assert job_field(number, "Restarts") == "0"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[7,9]", "n7"), ("a1,b2", "a1"), ("x[01-02]y[3-4]", "x01y3")],
)
def test_first_host(slurm: None, nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def write_corpus(folder: Path) -> None:
    """The repository's texts as the three sources of two_stage.yaml's mixes, several files each."""
    for source, pattern in PATTERNS.items():
        (folder / source).mkdir(parents=True)
        texts = [path.read_text() for path in sorted(ROOT.glob(pattern))]
        for part in range(3):
            lines = [json.dumps({"text": text}) + "\n" for text in texts[part::3]]
            (folder / source / f"{part}.jsonl").write_text("".join(lines))


def data_job(folder: Path, *arguments: str) -> str:
    command = ["sbatch", "--parsable", "--cpus-per-task=2", f"--output={folder}/%A_%a.log", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_data_from_a_corpus_to_a_training_step(slurm: None, tmp_path: Path) -> None:
    """docs/guide/slurm.md's commands, with a smaller tokenizer and shorter rows; then 1b_sb's own mix, on a small model."""
    write_corpus(tmp_path / "corpus")
    settings = yaml.safe_load((ROOT / "configs/corpus/pretrain.yaml").read_text())
    settings |= {"sources": {source: str(tmp_path / f"corpus/{source}") for source in settings["sources"]}}
    config, tokenizer, out = tmp_path / "corpus.yaml", tmp_path / "tokenizer.json", tmp_path / "data"
    config.write_text(yaml.safe_dump(settings | {"length": 256, "valid_fraction": 0.2}))
    script, dependency = "slurm/data_prep.sbatch", "--kill-on-invalid-dep=yes"
    first = data_job(
        tmp_path, script, "train-tokenizer", "--vocab-size=1024", f"--out={tokenizer}", f"--config={config}"
    )
    pack = [script, "pack", "--out", str(out), "--config", str(config), "--tokenizer", str(tokenizer)]
    array = data_job(tmp_path, f"--dependency=afterok:{first}", dependency, "--array=0-1", *pack)
    merge = data_job(tmp_path, f"--dependency=afterok:{array}", dependency, script, "merge", "--out", str(out))
    logs = lambda: "".join(f"\n{file.name}: {file.read_text()}" for file in sorted(tmp_path.glob("*.log")))  # noqa: E731
    assert wait_for_end(merge) == "COMPLETED", logs()
    assert "is ready" in logs()
    documents = sum(len(list(ROOT.glob(pattern))) for pattern in PATTERNS.values())
    splits = json.loads((out / "manifest.json").read_text())["splits"].values()
    counts = [source for split in splits for source in split.values()]
    assert sum(source["documents"] + sum(source["documents_dropped"].values()) for source in counts) == documents
    run = tmp_path / "run"
    small = [argument for argument in SMALL if not argument.startswith("config=")]
    more = ["config=1b_sb", "model.num_kv_heads=1", "model.head_dim=32", "model.vocab_size=1024", "data.length=256"]
    more += ["train.max_steps=2", "data.num_workers=0", "train.stages.0.mix.high_quality=0.1"]
    result = submit(*small, *more, f"data.path={out}", f"run_dir={run}", "nodes=2", "gpus=1", "interface=eth0")
    assert result.returncode == 0, result.stderr
    number = re.findall(r"^job (\d+)", result.stdout)[0]
    assert wait_for_end(number) == "COMPLETED", (run / f"slurm-{number}.log").read_text()[-3000:]
    assert len(losses(run)) == 2
    again = data_job(tmp_path, "--array=0-1", *pack)  # as after a preemption: finished tasks end at once
    assert wait_for_end(again) == "COMPLETED", logs()
    assert logs().count("exists already, made from the same settings and input: kept") == 2


def test_auto_finds_a_microbatch_on_the_nodes(slurm: None, corpus: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", corpus, "train.microbatch=auto", "train.save_every=0", steps=2)
    job.finish()
    assert "train.microbatch=auto: 2 of the 2 rows per rank and step" in job.log()
    assert len(losses(job.run)) == 2
