"""A mistake is said before torch, transformers and lm-eval are imported: one sentence, exit code 2, in under two seconds.

The seconds are processor time, which other processes on the machine do not stretch: of the child, and of a start with the
imports that it shares with other children.
"""

import json
import os
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ssscale.config import load_config, save
from ssscale.train.files import checksum

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2.0
COMMANDS = sorted(
    f"launch/{path.name}" for path in (ROOT / "launch").glob("*.py") if "COMMAND = Command(" in path.read_text()
)
HEAVY = ("torch", "transformers", "lm_eval", "streaming", "deepspeed", "megatron", "datasets", "matplotlib")

CASES = [
    ("launch/pretrain.py config=3b_sb train.micobatch=2", "there is no key 'train.micobatch'; did you mean train.mic"),
    ("launch/pretrain.py config=3b_bs", "config=3b_bs: there is no configs/3b_bs.yaml; did you mean 3b_sb"),
    (
        "launch/pretrain.py config=tiny_sb train.seed=1 train.seed=2",
        "train.seed is given twice, as train.seed=1 and as train.seed=2: leave one of them out",
    ),
    ("launch/pretrain.py config=tiny_sb config=3b_sb", "config is given twice, as config=tiny_sb and as config=3b_sb"),
    ("launch/pretrain.py config=tiny_sb processes=1 processes=2", "processes is given twice, as processes=1 and as"),
    ("launch/evaluate.py checkpoint=RUN checkpoint=b", "and as checkpoint=b: leave one of them out"),
    ("slurm/submit.py config=3b_sb nodes=2 nodes=3", "nodes is given twice, as nodes=2 and as nodes=3"),
    ("launch/pretrain.py config=tiny_sb train.max_steps=many", "train.max_steps must be a whole number, not 'many'"),
    ("launch/pretrain.py config=tiny_sb train.seed=99999999999999", "train.seed must be less than 2^43, not 999"),
    ("launch/pretrain.py config=tiny_sb data.path=nowhere", "data folder nowhere does not exist: make it with"),
    ("launch/pretrain.py config=tiny_sb model.num_heads=7", "model.num_heads=7 does not divide"),
    ("launch/pretrain.py config=tiny_sb processes=3", "train.batch_size=16 is not a multiple of the 24 rows"),
    ("launch/pretrain.py config=tiny_sb --processes 2", "'--processes' is not of the form key=value: write processes="),
    ("launch/pretrain.py config=tiny_sb --prnt", "unknown argument '--prnt': did you mean --print?"),
    ("launch/pretrain.py tiny_sb", "'tiny_sb' is not of the form key=value: write config=tiny_sb"),
    ("launch/evaluate.py checkpoint=nowhere", "checkpoint=nowhere: there is no such folder"),
    ("launch/evaluate.py checkpoint=RUN tasks=hellaswagg valid=false", "there is no such task; did you mean hellaswag"),
    ("launch/evaluate.py checkpoint=RUN suite=rulr", "suite must be stickbreaking_paper or ruler, not 'rulr'; did you"),
    ("launch/evaluate.py checkpoint=RUN tsks=cloze", "unknown argument 'tsks=cloze': did you mean tasks="),
    (
        "launch/evaluate.py checkpoint=RUN tasks=none data=nowhere",
        "data folder nowhere does not exist: name the folder",
    ),
    ("launch/evaluate.py checkpoint=RUN suite=ruler tensor=2", "tensor=2 does not divide the number of proc"),
    (
        "launch/evaluate.py checkpoint=RUN tasks=none valid=false",
        "there is nothing to evaluate: tasks=none names no task, and valid=false leaves out the loss",
    ),
    (
        "launch/evaluate.py checkpoint=RUN tasks=,,",
        "tasks=,, names no task: write tasks=none to measure the loss alone",
    ),
    (
        "launch/pretrain.py config=tiny_sb name=a/../../b",
        "name=a/../../b must be like run or sweep/run, without ..: run_dir= takes any folder",
    ),
    (
        "launch/evaluate.py checkpoint=RUN tasks=none suite=ruler",
        "tasks=none names no task, and suite=ruler leaves out",
    ),
    ("launch/estimate.py config=3b_sb gpus=3", "train.batch_size=1024 is not a multiple of the 6 rows"),
    ("slurm/submit.py config=3b_sb dry_run=true", "unknown argument 'dry_run=true': did you mean --dry-run?"),
    ("slurm/submit.py config=3b_sb nods=2", "there is no key 'nods'; did you mean nodes?"),
    ("launch/report.py nowhere", "nowhere is not a run folder: it has no config.yaml"),
    (
        "launch/export.py checkpoint=Makefile out=new",
        "checkpoint=Makefile: this is a file, neither a checkpoint nor a run",
    ),
    ("launch/export.py checkpoint=RUN out=configs", "out=configs exists and is not empty"),
    (
        "launch/export.py checkpoint=RUN out=Makefile",
        "out=Makefile is a file, not a folder: name a folder that is empty",
    ),
    ("launch/export.py checkpoint=RUN out=new format=llama", "format=llama has no layers of stickbreaking"),
    ("launch/import_hf.py from=nowhere out=new", "from=nowhere: there is no config.json"),
    ("launch/import_hf.py from=HF/bert out=new", "is of a model_type 'bert', not 'ssscale', 'llama'"),
    ("launch/import_hf.py from=HF/bare out=new", "HF/bare has no tokenizer.json"),
    ("launch/import_hf.py from=HF/bin out=new", "HF/bin has neither model.safetensors nor model.safetensors.index"),
    ("launch/finetune.py from=RUN questions=nowhere.json run_dir=new", "questions=nowhere.json: there is no such file"),
    ("launch/benchmark.py configs=1b_sbb data=configs", "there is no configs/1b_sbb.yaml; did you mean 1b_sb"),
    (
        "launch/benchmark.py configs=1b_sb+model.mixer.stickbreaking.skip_belw=0 data=configs",
        "did you mean model.mixer.stickbreaking.skip_below",
    ),
    (
        "launch/benchmark_parallel.py part=sped gpus=2 data=configs",
        "part must be losses, speed, long, weak, exchange, tensor, zero or skip",
    ),
    ("launch/benchmark_links.py larges=5", "unknown argument 'larges=5': did you mean largest="),
    ("launch/costs.py of=saves config=tiny_sb data=nowhere", "data folder nowhere does not exist"),
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, as far as a mistake is looked for."""
    checkpoint = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for name, text in (("state.json", '{"ranks": 1}'), ("rank-00000.json", "{}"), ("rank-00000.safetensors", "")):
        (checkpoint / name).write_text(text)
    save(load_config(["config=tiny_sb"]), checkpoint / "config.yaml")
    entries = {file.name: {"bytes": file.stat().st_size, "xxh3": checksum(file)} for file in checkpoint.iterdir()}
    (checkpoint / "checksums.json").write_text(json.dumps(entries))
    return checkpoint.parents[1]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that are not models which can be imported: of another kind, without a tokenizer, without safetensors."""
    root = tmp_path_factory.mktemp("hf")
    for name, kind in (("bert", "bert"), ("bare", "llama"), ("bin", "llama")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({"model_type": kind}))
    (root / "bin" / "tokenizer.json").write_text("{}")
    (root / "bin" / "pytorch_model.bin").write_text("")
    return root


class Ended(NamedTuple):
    """How a command ended (`tests/config/at_once.py`)."""

    code: int
    output: str
    errors: str
    packages: list[str]
    seconds: float


Call = Callable[[str], Ended]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Runs a command. Only site-packages is on the path: no installation of ours."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(site.getsitepackages())}
    server = [sys.executable, "-S", "tests/config/at_once.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(server, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, found = process.stdin, process.stdout

        def ended(command: str) -> Ended:
            print(command, file=given, flush=True)
            return Ended(**json.loads(found.readline()))

        yield ended
        given.close()


@pytest.mark.parametrize(("command", "sentence"), CASES)
def test_a_mistake_is_said_at_once(
    command: str, sentence: str, run_folder: Path, model_folders: Path, call: Call
) -> None:
    command = command.replace("RUN", str(run_folder)).replace("HF", str(model_folders))
    code, output, errors, packages, seconds = call(command)
    for _ in range(2):  # files that are read for the first time take processor time, too
        seconds = min(seconds, call(command).seconds) if seconds >= SECONDS else seconds
    sentence = sentence.replace("HF", str(model_folders))
    assert (code, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert sentence in errors
    assert len(errors.splitlines()) == 1
    assert seconds < SECONDS
    assert not set(packages) & set(HEAVY)


def helped(command: str, call: Call) -> Ended:
    """A command with --help, which imports none of the large packages."""
    ended = call(f"{command} --help")
    assert ended.code == 0, ended.errors
    assert f"usage: python {command} " in ended.output
    assert not set(ended.packages) & set(HEAVY)
    return ended


@pytest.mark.parametrize("command", [*COMMANDS, "slurm/submit.py"])
def test_help_needs_none_of_the_large_packages(command: str, call: Call) -> None:
    ended = helped(command, call)
    assert "ssscale" in ended.packages
    assert "\nexample: python " in ended.output


MODULES = (
    "data_prep",
    "eval.benchmarks.deterministic",
    "eval.benchmarks.forward_skipping",
    "eval.benchmarks.one_tensor_rank",
    "eval.benchmarks.suite_tokens",
    "eval.benchmarks.stickbreaking_before",
    "eval.benchmarks.stickbreaking_trained",
    "eval.evidence",
    "eval.papers.long_context",
    "eval.papers.mqrar",
    "eval.papers.needle",
    "eval.papers.pn_fit",
    "eval.papers.repeats",
    "eval.papers.ruler_questions",
    "eval.papers.study",
    "eval.papers.study.split",
    "eval.papers.width_study",
)


@pytest.mark.parametrize("module", MODULES)
def test_help_of_a_module_needs_none_of_the_large_packages(module: str, call: Call) -> None:
    """That of eval.papers.study and of eval.papers.ruler_questions took 13 seconds."""
    helped(f"-m {module}", call)
