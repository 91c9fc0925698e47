"""The measurements behind README and docs/results: one job per figure or table, with its commands.

Commands are lines of bash, run in the checkout. They use TEXT (train.NAME.jsonl.zst, valid.NAME.jsonl.zst and
tokenizer.json), HERE (the folder of the job, which is kept) and WORK (data and models, which are not).
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDY = ("encyclopedic", "textbooks", "dialog_qa", "law_gov")  # the text of the width study and of the README's path
BOOKS = "valid.books.jsonl.zst"


@dataclass(frozen=True)
class Job:
    """One measurement.

    page: what it supports. minutes: on one H200, the start included. gpus: 0 for a job of the CPU.
    gib: memory, for a job that may share its GPU; None for a job whose time is a result, which has its GPU alone.
    after: jobs that must have ended well before.
    """

    name: str
    page: str
    commands: tuple[str, ...]
    minutes: float
    gpus: int = 1
    gib: float | None = None
    after: tuple[str, ...] = ()


def pack(name: str, length: int, sources: tuple[str, ...]) -> Job:
    """Packs sources of TEXT into WORK/NAME."""
    files = " ".join(
        f'--source {source}="$TEXT/train.{source}.jsonl.zst" --source {source}="$TEXT/valid.{source}.jsonl.zst:valid"'
        for source in sources
    )
    command = f'python -m data_prep pack --out "$WORK/{name}" --tokenizer "$TEXT/tokenizer.json" --length {length} '
    return Job(name, "data", (f"{command}--valid-fraction 0 {files}",), 0.5, gpus=0)


def run_file(config: str, steps: int, minutes: float, data: str = "rows4096", suffix: str = "") -> Job:
    """Trains a 1b or 3b run file as shipped, except for batch, warmup and vocabulary (docs/results/width.md)."""
    command = (
        f'python launch/pretrain.py config={config} run_dir="$HERE/run" data.path="$WORK/{data}" model.vocab_size=50304 '
        "train.batch_size=16 train.microbatch=4 train.stages.0.schedule.warmup_tokens=3300000 train.stages.0.mix=null "
        f"train.stages.1.mix=null train.max_steps={steps} train.log_every=1 train.eval_every=0 train.save_every=0"
    )
    return Job(
        config + suffix, "docs/results/width.md", (command, 'rm -rf "$HERE/run/checkpoints"'), minutes, after=(data,)
    )


def readme_block() -> tuple[str, ...]:
    """Returns the commands of the README's GPU path after its downloads, each with its seconds."""
    block = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## With a GPU and twenty minutes")[1].split("```")[1]
    )
    lines = block.split("\n\n", 1)[1].strip().splitlines()
    return tuple(
        line.replace("; do ", "; do time ", 1) if line.startswith("for ") else f"time {line}" for line in lines
    )


def readme() -> Job:
    """Runs the README's GPU path in a copy of the checkout, on text of TEXT in place of its downloads."""
    sources = " ".join(STUDY)
    prepare = (
        'mkdir -p "$WORK/readme" && tar --exclude="./.*" --exclude=./runs --exclude=./data -c . | tar -x -C "$WORK/readme"',
        'cd "$WORK/readme"',
        f'mkdir -p text gpt2 && for name in {sources}; do cp "$TEXT/train.$name.jsonl.zst" text/; done',
        f'cp "$TEXT/tokenizer.json" gpt2/ && python -m eval.evidence.books "$TEXT/{BOOKS}" book.txt',
        'export PYTHONPATH="$PWD:${PYTHONPATH-}" TIMEFORMAT="took %R s"',
    )
    keep = (
        'for run in 50m_sb 50m_rope; do mkdir -p "$HERE/$run"; '
        'cp -r runs/$run/{metrics.jsonl,config.yaml,eval} "$HERE/$run"; done'
    )
    return Job(
        "readme",
        "README.md and docs/results/gpu_path.md",
        (*prepare, *readme_block(), keep, 'cp runs/figures/extrapolation.png "$HERE"'),
        5.8,
    )


def jobs() -> dict[str, Job]:
    """Returns all jobs by name, the most important first."""
    width = 'python -m eval.papers.width_study "$WORK/rows1024" --out "$HERE/study" --jobs 4 --microbatch 64'
    stickbreaking = "python -m ssscale_kernels.stickbreaking."
    found = (
        pack("rows4096", 4096, STUDY[:3]),
        pack("rows1024", 1024, STUDY),
        Job("kernels", "kernels/stickbreaking", (f'{stickbreaking}sixteen.measure "$HERE" --workers 20',), 2.2),
        Job("width", "docs/results/width.md", (width,), 17.0, after=("rows1024",)),
        run_file("3b_sb", 120, 6.0),
        run_file("1b_sb", 260, 5.2),
        run_file("1b_softmax", 120, 3.2),
        run_file("1b_ssmax", 120, 3.1),
        run_file("1b_sb_rem", 120, 3.0),
        readme(),
        Job(
            "paged",
            "docs/guide/serving.md",
            (f'{stickbreaking}paged_benchmark --candidates --workers 20 --out "$HERE/paged.json"',),
            1.0,
        ),
        Job(
            "adamw",
            "kernels/adamw",
            ('python -m ssscale_kernels.adamw.benchmark --tilings | tee "$HERE/adamw.txt"',),
            0.8,
        ),
        Job(
            "ssmax_your_model",
            "docs/guide/ssmax_your_model.md",
            ('bash eval/papers/ssmax_your_model.sh "$TEXT" "$HERE/mine"', 'rm -rf "$HERE"/mine/{data,*/checkpoints}'),
            8.2,
            gib=40.0,
        ),
        Job(
            "tests",
            "tests marked gpu",
            ("python -m pytest -q -m gpu -p no:cacheprovider tests/gpu tests/kernels",),
            8.0,
            gib=40.0,
        ),
        Job(
            "exchange",
            "docs/results/several_gpus.md",
            (
                'python launch/benchmark_parallel.py gpus=2 part=exchange config=1b_softmax steps=24 data="$WORK/rows4096"'
                ' data.one_document=true folder="$WORK/exchange" | tee "$HERE/exchange.txt"',
            ),
            8.0,
            gpus=2,
            after=("rows4096",),
        ),
    )
    return {job.name: job for job in found}
