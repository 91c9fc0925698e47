"""The jobs of the study `cores`: softmax, SSMax and stick-breaking at 162m, on the same rows in the same order.

Each core has two jobs that measure one model: CORE trains it alone on its GPU, then measures the loss by position and the
tables of arXiv:2410.17980; CORE+ruler fine-tunes it on questions of RULER's kinds, and measures needles and RULER. RoPE has
50 times its base beyond training, as in arXiv:2501.19399, and for RULER dynamic NTK scaling, as in arXiv:2410.17980.
"""

from functools import partial
from pathlib import Path
from typing import Any

from eval.checkpoint.tasks.local.files import FILES, find, missing
from eval.papers.study import measure, steps
from eval.papers.study.jobs import WIDE_GIB, Job, Place, Step
from eval.papers.study.sizes import Cores
from eval.papers.study.studies import Study
from ssscale.errors import UserError

CORES = {"softmax": "162m_softmax", "ssmax": "162m_ssmax", "sb": "162m_sb"}
WITH_ROPE = ("softmax", "ssmax")
HOTPOT = "squadshifts/reddit_v1.0.json"  # in SQuAD's form, in place of HotpotQA
EVAL_GIB, EVAL_SHARE = 10.0, 0.25  # launch/evaluate.py's cache takes a quarter of a GPU


def cores(study: Study) -> list[Job]:
    """Return the jobs of all cores: learning rates, then one core after the other."""
    size = study.size
    form, keys = size.cores.form, size.cores.keys
    jobs = [job for core, config in CORES.items() for job in study.rate_jobs(core, config, form, *keys, gib=WIDE_GIB)]
    return jobs + [job for core in CORES for seed in study.seeds_of(core) for job in _jobs(study, core, seed)]


def check_files(place: Place) -> None:
    """Raise UserError for files that are missing, and for questions that RULER's samples are made from."""
    if place.eval_data is None or not place.questions:
        raise UserError(
            "--eval-data and --questions are needed: the tasks' data, and files in SQuAD's form for fine-tuning"
        )
    used = {file.resolve() for file in _ruler_files(place.eval_data).values()}
    if same := [file for file in place.questions if file.resolve() in used]:
        raise UserError(f"--questions: RULER's samples are made from {same[0]}; give another file")
    if not _tasks(place.eval_data):
        raise UserError(f"--eval-data={place.eval_data} has the data of none of the tasks {', '.join(FILES)}")


def _ruler_files(eval_data: Path) -> dict[str, Path]:
    from eval.checkpoint.ruler.data import ORIGINS  # imports lm-eval, which takes seconds

    found: dict[str, Path] = {}
    for name in ("squad", "hotpotqa"):
        origin = ORIGINS[name]
        for file in (origin.file, origin.stand_in or HOTPOT):
            if (there := find(str(eval_data), file)) is not None:
                found.setdefault(name, there)
    return found


def _tasks(eval_data: Path) -> list[str]:
    """Return the tasks of the tables, and LAMBADA, whose data is there."""
    return [task for task in FILES if missing(task, str(eval_data)) is None]


def _jobs(study: Study, core: str, seed: int) -> list[Job]:
    place, size, form = study.place, study.size, study.size.cores
    run, rate = study.work / f"{core}-s{seed}", study.rate(core)
    assert place.eval_data is not None
    packed, questions = steps.pack(place, form.form.length), _questions(place, form)
    trained = steps.train(
        place,
        size,
        form.form,
        CORES[core],
        run,
        rate,
        seed,
        *form.keys,
        evals=form.evals,
        eval_rows=form.eval_rows,
        alone=True,
    )
    beyond = [steps.BASE] if core in WITH_ROPE else []
    scaled = [steps.NTK, f"model.position.rope.train_length={form.form.length}"] if core in WITH_ROPE else []
    skipping = [_skipping(place, form, run)] if core == "sb" else []
    first = [packed, questions, trained, *skipping, *_positions(place, form, run, beyond)]
    first.append(_tables(place.eval_data, form, run))
    tuned = run.with_name(f"{run.name}_ruler")
    second = [
        packed,
        questions,
        trained,
        _tune(place, form, run, tuned, seed),
        _needles(place, size.depths, form, tuned, beyond),
    ]
    second.append(_ruler(place, place.eval_data, form, tuned, scaled))
    rest: dict[str, Any] = {"rate": rate, "method": core, "reads_test": True, "group": run.name}
    return [
        study.job(core, seed, first, partial(_measured, run), WIDE_GIB, **rest),
        study.job(f"{core}+ruler", seed, second, partial(_retrieved, tuned), EVAL_GIB, share=EVAL_SHARE, **rest),
    ]


def _questions(place: Place, form: Cores) -> Step:
    books = place.text / f"train.{place.test.name.split('.')[1]}.jsonl.zst"
    command = [
        "-m",
        "eval.papers.ruler_questions",
        "--texts",
        str(books),
        "--squad",
        ",".join(map(str, place.questions)),
    ]
    command += ["--tokenizer", str(place.text / "tokenizer.json"), "--out", str(place.work / "data" / "ruler.json")]
    command += ["--samples", str(form.questions), "--length", str(form.tune_length)]
    return Step("questions", tuple(command), 0.5, place.work / "data")


def _skipping(place: Place, form: Cores, run: Path) -> Step:
    """Times evaluation with and without skipping, alone on the GPU."""
    command = (
        "-m",
        "eval.benchmarks.forward_skipping",
        str(run),
        "--texts",
        str(place.test),
        "--lengths",
        form.skip_lengths,
    )
    return Step("skipping", command, 1.5, run, alone=True)


def _positions(place: Place, form: Cores, run: Path, beyond: list[str]) -> list[Step]:
    """Measures the loss by position: as trained, and with RoPE's other base."""
    command = ["-m", "eval.papers.long_context", str(run), "--texts", str(place.test), "--processes", "1"]
    command += ["--lengths", str(form.by_position), "--windows", str(form.windows)]
    found = [Step("positions", tuple(command), 1.0, run)]
    return [*found, Step("positions-base", (*command, *beyond), 1.0, run)] if beyond else found


def _tables(eval_data: Path, form: Cores, run: Path) -> Step:
    command = [
        "launch/evaluate.py",
        f"checkpoint={run}",
        "suite=stickbreaking_paper",
        f"tasks={','.join(_tasks(eval_data))}",
    ]
    command += [f"eval_data={eval_data}", f"length={form.table_length}", "missing=true"]
    return Step("tables", tuple(command), 4.0, run)


def _tune(place: Place, form: Cores, run: Path, tuned: Path, seed: int) -> Step:
    command = ["launch/finetune.py", f"from={run}", f"questions={place.work}/data/ruler.json", f"run_dir={tuned}"]
    command += [f"epochs={form.tune_epochs:g}", f"lr={form.tune_rate:g}", f"batch={form.tune_batch}"]
    command += [f"microbatch={form.tune_microbatch}", f"data.length={form.tune_length}", f"train.seed={seed}"]
    command += [f"data.shuffle_seed={seed}", "train.save_every=1000000", "train.keep=1"]
    tokens = 0.8 * form.questions * form.tune_epochs * form.tune_length
    return Step("tune", tuple(command), steps.START + tokens / form.form.speed / 60, tuned)


def _needles(place: Place, depths: str, form: Cores, tuned: Path, beyond: list[str]) -> Step:
    command = ["-m", "eval.papers.needle", str(tuned), "--texts", str(place.test), "--processes", "1"]
    command += ["--lengths", form.needle_lengths, "--depths", depths, "--samples", str(form.samples), *beyond]
    return Step("needle", tuple(command), 1.8, tuned)


def _ruler(place: Place, eval_data: Path, form: Cores, tuned: Path, scaled: list[str]) -> Step:
    from eval.checkpoint.ruler.data import ORIGINS

    stand_in = [f"essays:{place.test}"]
    there = _ruler_files(eval_data).get("hotpotqa")
    if there is not None and there != find(str(eval_data), ORIGINS["hotpotqa"].file):
        stand_in.append(f"hotpotqa:{there}")
    command = [
        "launch/evaluate.py",
        f"checkpoint={tuned}",
        f"tasks={form.ruler_tasks}",
        f"lengths={form.ruler_lengths}",
    ]
    command += [
        f"limit={form.ruler_samples}",
        f"eval_data={eval_data}",
        f"stand_in={','.join(stand_in)}",
        "valid=false",
    ]
    return Step("ruler", (*command, "missing=true", *scaled), 5.5, tuned)


def _measured(run: Path) -> dict[str, Any]:
    skipped = {"skipping": measure.skipping(run)} if any((run / "eval").glob("skipping-*.json")) else {}
    return {
        **skipped,
        "training": measure.training(run),
        "to_loss": measure.to_loss(run),
        "positions": measure.positions(run),
        "tables": measure.tables(run),
    }


def _retrieved(tuned: Path) -> dict[str, Any]:
    return {"needle": measure.cells(tuned), "ruler": measure.ruler(tuned)}
