"""The measurements behind README and docs/results: one job per figure or table, with its commands.

Commands are lines of bash, run in the checkout. They use TEXT (train.NAME.jsonl.zst, valid.NAME.jsonl.zst and
tokenizer.json), HERE (the folder of the job, which is kept) and WORK (data and models, which are not).
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDY = ("encyclopedic", "textbooks", "dialog_qa", "law_gov")  # the text of the width study and of the README's path
BOOKS = "valid.books.jsonl.zst"
# 16 channels of 4 connections for each pair of processes: one core sends 3 GB/s, and one channel waits for its slowest part
SOCKETS = (
    "NCCL_MIN_NCHANNELS=16 NCCL_NCHANNELS_PER_NET_PEER=16 NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=2 "
    "NCCL_BUFFSIZE=4194304"
)
TRACED = "train.profile=10 train.profile_ranks=2"  # one step, which medians leave out
VOCABULARY = "model.vocab_size=50304"  # of 1b's run files, for GPT-2's tokenizer


@dataclass(frozen=True)
class Job:
    """One measurement.

    page: what it supports. minutes: on one H200, the start included. gpus: 0 for a job of the CPU.
    gib: memory, for a job that may share its GPU; None for a job whose time is a result, which has its GPU alone.
    after: jobs that must have ended well before. busy: whether it keeps most cores of the machine busy.
    needs_cores: whether the result of a busy job depends on these cores, so that no other busy job may run beside it.
    """

    name: str
    page: str
    commands: tuple[str, ...]
    minutes: float
    gpus: int = 1
    gib: float | None = None
    after: tuple[str, ...] = ()
    busy: bool = False
    needs_cores: bool = False

    @property
    def needs_the_host(self) -> bool:
        """Whether its result is a time that depends on the host: beside busy jobs, 1b trained at 0.7 of its speed."""
        return self.gib is None and self.gpus > 0 and (self.needs_cores or not self.busy)


def pack(name: str, length: int, sources: tuple[str, ...]) -> Job:
    """Packs sources of TEXT into WORK/NAME."""
    files = " ".join(
        f'--source {source}="$TEXT/train.{source}.jsonl.zst" --source {source}="$TEXT/valid.{source}.jsonl.zst:valid"'
        for source in sources
    )
    command = f'python -m data_prep pack --out "$WORK/{name}" --tokenizer "$TEXT/tokenizer.json" --length {length} '
    return Job(name, "data", (f"{command}--valid-fraction 0 {files}",), 0.5, gpus=0, busy=True)


def run_file(config: str, steps: int, minutes: float, data: str = "rows4096", suffix: str = "") -> Job:
    """Trains a 1b or 3b run file as shipped, except for batch, warmup and vocabulary (docs/results/width.md)."""
    command = (
        f'python launch/pretrain.py config={config} run_dir="$HERE/run" data.path="$WORK/{data}" {VOCABULARY} '
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


def pack_all(name: str, length: int) -> Job:
    """Packs all text of TEXT into WORK/NAME."""
    sources = (
        'sources=(); for file in "$TEXT"/train.*.jsonl.zst; do name=${file##*/train.}; name=${name%.jsonl.zst}; '
        'sources+=(--source "$name=$file" --source "$name=$TEXT/valid.$name.jsonl.zst:valid"); done'
    )
    command = f'python -m data_prep pack --out "$WORK/{name}" --tokenizer "$TEXT/tokenizer.json" --length {length} '
    return Job(name, "data", (sources, command + '--valid-fraction 0 "${sources[@]}"'), 1.0, gpus=0, busy=True)


def recipe() -> list[Job]:
    """Returns what docs/results/width.md and the README show."""
    width = 'python -m eval.papers.width_study "$WORK/rows1024" --out "$HERE/study" --jobs 4 --microbatch 64'
    return [
        Job("width", "docs/results/width.md", (width,), 16.5, after=("rows1024",)),
        # Stick-breaking after the others, so that the job `kernels` has ended before.
        run_file("1b_softmax", 120, 3.2),
        run_file("1b_ssmax", 120, 3.1),
        run_file("3b_sb", 120, 6.0),
        run_file("1b_sb", 260, 5.2),
        readme(),
        run_file("1b_sb_rem", 120, 3.0),
    ]


def kernels() -> list[Job]:
    """Returns the kernels alone; `kernels` comes first of all, because the rest runs on them."""
    module = "python -m ssscale_kernels."
    paged = f'{module}stickbreaking.paged_benchmark --candidates --workers 20 --out "$HERE/paged.json"'
    return [
        Job("kernels", "stick-breaking", (f'{module}stickbreaking.measure "$HERE" --workers 20',), 2.8, busy=True),
        Job("paged", "docs/results/attention_speed.md", (paged,), 1.0, busy=True),
        Job("adamw", "AdamW", (f'{module}adamw.benchmark --tilings | tee "$HERE/adamw.txt"',), 0.8),
        Job(
            "fuzz",
            "stick-breaking",
            (f'{module}stickbreaking.fuzz --cases 10000 | tee "$HERE/fuzz.txt"',),
            4.0,
            gib=20.0,
            busy=True,
        ),
        Job(
            "tests",
            "tests of GPUs",
            all_of(
                "OMP_NUM_THREADS=1 python -m pytest -q -n 8 -m gpu -p no:cacheprovider tests/kernels",
                "python -m pytest -q -m gpu -p no:cacheprovider tests/gpu",
            ),
            6.0,
            gib=40.0,
        ),
    ]


def trained() -> list[Job]:
    """Returns what needs a model that has learnt: stick-breaking at 162m, SSMax from a softmax model, 8M tokens of 1b."""
    train = (
        'python launch/pretrain.py config=162m_sb run_dir="$WORK/162m_sb" data.path="$WORK/all4096" data.length=4096 '
        "data.one_document=true model.vocab_size=50304 train.batch_size=16 train.microbatch=16 train.max_steps=1550 "
        "train.stages.0.tokens=400000000 train.stages.0.schedule.lr=1e-3 train.stages.0.schedule.warmup_tokens=3300000 "
        "train.eval_every=0 train.observe_every=0"
    )
    measure = 'python -m eval.benchmarks.stickbreaking_trained "$WORK/162m_sb" "$WORK/all4096"'
    both = (f'{measure} | tee "$HERE/trained.txt"', f'{measure} --rows 8 --lengths 4096 | tee "$HERE/trained_8.txt"')
    mine = ('bash eval/papers/ssmax_your_model.sh "$TEXT" "$HERE/mine"', 'rm -rf "$HERE"/mine/{data,*/checkpoints}')
    return [
        Job("ssmax_your_model", "docs/guide/ssmax_your_model.md", mine, 8.2, gib=40.0),
        Job("trained", "docs/results/attention_speed.md", (train, *both), 8.0, after=("all4096",)),
        *(
            run_file(config, 125, minutes, data, suffix)
            for data, suffix in (("rows4096", "_8m"), ("tech4096", "_tech"))
            for config, minutes in (("1b_sb", 2.6), ("1b_softmax", 3.0))
        ),
    ]


def all_of(*commands: str) -> tuple[str, ...]:
    """Runs all commands, also those after one that fails. The job fails then."""
    return *(f"{command} || failed=1" for command in commands), '[ -z "${failed-}" ]'


def parts(folder: str) -> str:
    """Writes where the time of the traced steps of runs in WORK/folder went."""
    traces = f'traces="$(ls -d "$WORK"/{folder}/parallel_* | paste -sd,)"'
    return f'python -m eval.benchmarks.step_time {traces} | tee "$HERE/parts.txt"'


def kept(folder: str) -> str:
    """Keeps the metrics of runs in WORK/folder, which say how long each phase of a step took."""
    return f'for run in "$WORK"/{folder}/parallel_*; do cp "$run/metrics.jsonl" "$HERE/${{run##*/}}.jsonl"; done'


def at_once(first: str, second: str) -> str:
    """Runs two commands at the same time. Prints the output of the first when both have ended."""
    return (
        f'{first} > "$HERE/first.txt" & {second} && code=0 || code=1; wait $! && cat "$HERE/first.txt" && [ $code = 0 ]'
    )


def parallel(part: str, options: str, gpus: int = 2, data: str = "rows4096", one_document: bool = True) -> str:
    """Returns the benchmark of parallel layouts, without what it prints to. options: of the part."""
    documents = " data.one_document=true" * one_document
    command = f'python launch/benchmark_parallel.py gpus={gpus} data="$WORK/{data}" {VOCABULARY}'
    return f"{command}{documents} part={part} {options}"


def graphs() -> tuple[str, ...]:
    """Compares graphs with launches kernel by kernel: bits, speed with packed documents, and where the time goes.

    The traced run comes last, because no graph has been traced yet.
    """
    best, rows = "TP2 whole keep_gathered copy_engines", "config=1b_sb rows=16 train.microbatch=4"
    packed = f'{rows} steps=24 folder="$WORK/graphs" only="DP2,{best},{best} cuda_graphs"'
    traced = f'{rows} steps=12 folder="$WORK/traced" {TRACED} only="DP2,{best} cuda_graphs"'
    return (
        'python -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_graphs.py | tee "$HERE/tests.txt"',
        f'timeout 300 {parallel("tensor", packed, one_document=False)} | tee "$HERE/packed.txt"',
        kept("graphs"),
        f"timeout 200 {parallel('tensor', traced)}",
        parts("traced"),
    )


def tensor() -> tuple[str, ...]:
    """Trains with tensor parallelism beside data parallelism."""
    only = 'only="DP2,TP2 whole keep_gathered copy_engines cuda_graphs"'
    found = []
    for config, rows in (("1b_sb", 8), ("1b_sb", 4), ("1b_softmax", 8)):
        name = f"{config}_{rows}"
        options = f'config={config} rows=16 steps=12 train.microbatch={rows} folder="$WORK/tensor/{name}" {only}'
        found.append(f'{parallel("tensor", options)} | tee "$HERE/{name}.txt"')
    return tuple(found)


def exchanges() -> list[Job]:
    """Trains 1b_softmax with data parallelism at accumulation 1, by each transport.

    Records of five steps each, as a record costs the host a few milliseconds and a run as shipped has one in ten steps. Two
    GPUs are measured alone at the same time, so that heat and host are as in the runs on both. Sockets keep many cores busy.
    """

    def run(job: str, *labels: str, gpus: int = 2) -> str:
        options = f"config=1b_softmax steps=40 train.log_every=5 {TRACED} "
        options += f'folder="$WORK/{job}" only="{",".join(labels)}"'
        return parallel("exchange", options, gpus)

    def over_nvlink(job: str, gpus: int, *more: str) -> tuple[str, ...]:
        first, last = (run(job, label, gpus=gpus) for label in ("DP1", "DP1 on the last GPU"))
        ways = (f"DP{gpus}{way} by NVLink" for way in ("", " overlap", " overlap copy_engines"))
        together = run(job, *ways, *more, gpus=gpus)
        return at_once(first, f'{last} | tee "$HERE/last.txt"'), f'{together} | tee "$HERE/exchange.txt"'

    sockets = (
        f'{run("sockets", "DP2 overlap copy_engines by NVLink")} | tee "$HERE/nvlink.txt"',
        f'{SOCKETS} {run("sockets", "DP2 overlap in bf16 through sockets")} | tee "$HERE/sockets.txt"',
    )
    named = {
        "exchange": over_nvlink("exchange", 2, "DP2 overlap in bf16 through host memory"),
        "sockets": sockets,
        "exchange_4": over_nvlink("exchange_4", 4),
    }
    commands = {name: all_of(*some, kept(name), parts(name)) for name, some in named.items()}
    page, after = "docs/results/several_gpus.md", ("rows4096",)
    return [
        Job("exchange", page, commands["exchange"], 5.5, gpus=2, after=after),
        Job("sockets", page, commands["sockets"], 2.5, gpus=2, after=after, busy=True, needs_cores=True),
        Job("exchange_4", page, commands["exchange_4"], 5.0, gpus=4, after=after),
    ]


def steps() -> list[Job]:
    """Returns whole training steps beside plain torch, and on several GPUs."""
    alone = "python launch/benchmark.py masters=true steps="
    sockets = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"
    environments = ("", "NCCL_P2P_DISABLE=1", sockets, f"{sockets} {SOCKETS}")
    links = tuple(
        f'env {environment} python launch/benchmark_links.py gpus=2 largest=256 | tee -a "$HERE/links.txt"'
        for environment in environments
    )
    of_1b = f'{alone}60,8 accumulation=1,16 configs=1b_softmax data="$WORK/rows4096" {VOCABULARY} out="$HERE/1b.json"'
    of_162m = f'{alone}60 accumulation=4 microbatch=64 configs=162m_softmax data="$WORK/rows1024" out="$HERE/162m.json"'
    ring = parallel("long", 'config=1b_sb rows=1 steps=12 data.length=65536 only="ring 2"', data="rows65536")
    weak = (
        parallel("weak", f'config={config} rows={rows} steps=24 folder="$WORK/scale" | tee "$HERE/{config}.txt"')
        for config, rows in (("3b_softmax", 8), ("3b_sb", 8), ("1b_softmax", 16))
    )
    slow = 'python -m pytest -q -m gpu tests/train/test_stragglers.py | tee "$HERE/slow_rank.txt"'
    page, several = "docs/results/training_speed.md", "docs/results/several_gpus.md"
    return [
        Job("step_1b", page, (of_1b,), 7.0, after=("rows4096",)),
        Job("step_162m", page, (of_162m,), 2.5, after=("rows1024",)),
        Job("links", "docs/results/predicted_scaling.md", links, 1.5, gpus=2),
        Job("scale", "docs/results/predicted_scaling.md", all_of(*weak), 6.6, gpus=2, after=("rows4096",)),
        *exchanges(),
        Job("ring", several, (f'{ring} | tee "$HERE/ring.txt"',), 1.4, gpus=2, after=("rows65536",)),
        Job("slow_rank", "docs/log/2026-11-24-step-time.md", (slow,), 1.5, gpus=2),
        Job("tensor", several, all_of(*tensor()), 6.0, gpus=2, after=("rows4096",)),
        Job("graphs", several, all_of(*graphs()), 8.0, gpus=2, after=("rows4096",)),
    ]


def fp8_loss(recipe: str, seed: int) -> tuple[str, ...]:
    """Trains 162m_ssmax on 131M tokens with a recipe of `train.fp8`."""
    run = (
        'python launch/pretrain.py config=162m_ssmax data.path="$WORK/rows1024" run_dir="$HERE/run" '
        f"train.fp8={recipe} train.seed={seed} data.shuffle_seed={seed} train.batch_size=64 train.microbatch=64 "
        "train.max_steps=2000 train.eval_every=500 train.save_every=0 train.observe_every=0 "
        "train.stages.0.schedule.warmup_tokens=6553600"
    )
    return run, 'rm -rf "$HERE/run/checkpoints"'


def options() -> list[Job]:
    """Returns what options cost and bring: determinism, fp8, Muon, ZeRO-3."""
    bits = 'python -m eval.benchmarks.deterministic gpus=2 data="$WORK/rows1024" folder="$HERE/runs"'
    clean = 'find "$HERE/runs" -name checkpoints -type d -prune -exec rm -rf {} +'
    pairs = ",".join(f"162m_{core},162m_{core}+train.deterministic=true" for core in ("softmax", "ssmax", "sb"))
    cost = (
        'python launch/benchmark.py data="$WORK/rows1024" microbatch=64 accumulation=1 steps=50 last=30 plain=false '
        f'out="$HERE/cost.json" configs={pairs}'
    )
    bars = (
        f'python launch/benchmark.py data="$WORK/rows4096" {VOCABULARY} accumulation=16 steps=8 plain=false '
        "train.stages.0.schedule.kind=constant train.stages.0.schedule.lr=3e-4 train.stages.0.schedule.warmup_tokens=160000 "
    )
    fp8 = tuple(
        f'{bars}microbatch={rows} out="$HERE/{size}.json" '
        f"configs={size}_ssmax,{size}_ssmax+train.fp8=tensorwise,{size}_ssmax+train.fp8=rowwise_bf16_dw"
        for size, rows in (("3b", 2), ("1b", 4))
    )
    muon = (
        'python -m eval.papers.width_study "$WORK/rows1024" --widths 512 --lrs 7,6,5,4 --jobs 4 --microbatch 64 '
        '--out "$HERE/study" --variant adamw --variant "muon optimizer.name=muon"',
        'python launch/benchmark.py data="$WORK/rows1024" data.length=1024 microbatch=64 accumulation=1 steps=60 '
        'plain=false out="$HERE/muon.json" configs=50m_softmax,50m_softmax+optimizer.name=muon',
    )
    losses = (
        Job(
            f"fp8_loss_{recipe}_{seed}",
            "docs/results/options.md",
            fp8_loss(recipe, seed),
            5.2,
            gib=65.0,
            after=("rows1024",),
        )
        for seed in (0, 1)
        for recipe in ("none", "rowwise_bf16_dw", "tensorwise")
    )
    zero = tuple(
        parallel(
            "zero",
            f'config={config} rows=16 steps=12 train.microbatch=4 folder="$WORK/zero/{config}" {TRACED} '
            f'only="ZeRO-1,ZeRO-3" | tee "$HERE/{config}.txt"',
        )
        for config in ("1b_softmax", "1b_sb")
    )
    return [
        Job("zero", "docs/results/several_gpus.md", all_of(*zero, parts("zero/*")), 3.8, gpus=2, after=("rows4096",)),
        Job("deterministic", "docs/results/options.md", (bits, clean), 8.0, gpus=2, after=("rows1024",)),
        Job("deterministic_cost", "docs/results/options.md", (cost,), 4.5, after=("rows1024",)),
        Job("fp8", "train.fp8", fp8, 15.0, after=("rows4096",)),
        *losses,
        Job("muon", "optimizer.name=muon", muon, 8.0, after=("rows1024",)),
    ]


def jobs() -> dict[str, Job]:
    """Returns all jobs by name, the most important first."""
    packed = [
        pack("rows4096", 4096, STUDY[:3]),
        pack("rows1024", 1024, STUDY),
        pack("tech4096", 4096, ("tech_docs",)),
        pack("rows65536", 65536, STUDY[:3]),
        pack_all("all4096", 4096),
    ]
    first, *others = kernels()
    return {job.name: job for job in [*packed, first, *recipe(), *others, *trained(), *steps(), *options()]}
