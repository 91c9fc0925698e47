"""Damage to what a run reads or others read of it: the data folder, the run file, the export; and commands that read a run."""

import json
from pathlib import Path

import yaml
from safetensors.torch import load_file

from ssscale.train.checkpoint_folder import verify
from tests.chaos.damage import WAYS, any_way, file_of, snapshot
from tests.chaos.kinds import Kind, Outcome, demand_code, judge, kind
from tests.chaos.scene import (
    BEGUN,
    END,
    EVERY,
    HANG_S,
    Scene,
    Start,
    check_output,
    check_refusal,
    demand,
    leaves,
    saved_tree,
)
from tests.train.commands import run_command
from tests.train.lying_names import CASES
from tests.train.ranks import SMALL, Ranks

REFUSES, SAVES, AS_IT_STANDS = Outcome.REFUSES, Outcome.GOES_ON_OR_SAVES, Outcome.USES_OR_REFUSES
DATA, FILE, EXPORT, READING = "The data folder", "The run file", "An export", "Commands that read a run"
BY_NAME = "the message names the file"
OLDER = "the command takes the checkpoint before it, and a message says so; no file of the run changes"


def train_on_own(kind: Kind, scene: Scene) -> None:
    """Start the run on damaged data: nothing there changes but shards that are decompressed."""
    before, data = snapshot(scene.run), snapshot(scene.data)
    ranks = scene.train()
    code = ranks.wait(HANG_S)[0]
    scene.output = ranks.output()
    judge(kind, scene, code, before)
    after = snapshot(scene.data)
    demand({name: after.get(name) for name in data} == data, "the data was changed")


def _damage_json(scene: Scene, file: Path) -> None:
    """In any way that changes what it says."""
    before = file.read_bytes()
    while True:
        scene.harmed = f"{file.name}: {any_way(file, scene.rng)}"
        if not file.is_file():
            return
        try:
            same = json.loads(file.read_bytes()) == json.loads(before)
        except (ValueError, RecursionError):
            return
        if not same:
            return
        file.write_bytes(before)


@kind(DATA, "manifest.json, an index.json or the tokenizer is damaged in any way", REFUSES, BY_NAME, train_on_own)
def data_json(scene: Scene) -> None:
    data = scene.own_data()
    _damage_json(
        scene, scene.rng.choice([data / "manifest.json", data / "tokenizer.json", *data.glob("train/*/index.json")])
    )
    scene.names = str(data)


@kind(DATA, "a shard is damaged in any way", SAVES, BY_NAME, train_on_own)
def shard(scene: Scene) -> None:
    data = scene.own_data()
    file = scene.rng.choice(sorted(data.glob("train/*/*.zstd")))
    scene.harmed = f"{file}: {any_way(file, scene.rng)}"
    scene.names = str(data)


@kind(DATA, "a shard, a source or the whole folder is missing", REFUSES, BY_NAME, train_on_own)
def data_gone(scene: Scene) -> None:
    data = scene.own_data()
    file = scene.rng.choice([*sorted(data.glob("train/*")), *sorted(data.glob("train/*/*")), data])
    scene.harmed, scene.names = str(file), str(data)
    file.rename(scene.folder / "moved")


@kind(DATA, "a name or a link leads out of the folder", REFUSES, "the message gives the name or the link", train_on_own)
def data_elsewhere(scene: Scene) -> None:
    (scene.folder / "outside/secret").write_bytes(b"not yours")
    name = scene.rng.choice(sorted(set(CASES) - {"source", "source folder is a link", "files"}))
    CASES[name][0](scene.own_data())
    (scene.folder / "outside/secret").unlink()
    scene.harmed, scene.names = name, str(scene.data)


@kind(DATA, "the folder holds other data than before", REFUSES, "the message says that the data differs", train_on_own)
def other_data(scene: Scene) -> None:
    """As whole as the first, with other texts or another order of its rows."""
    scene.data = scene.world.folder / scene.rng.choice(["data-less", "data-shuffled"])
    scene.names = "data"


# ---- the run file


def with_run_file(kind: Kind, scene: Scene) -> None:
    """Start the run from the file: it does what the file says now, or refuses."""
    before = snapshot(scene.run)
    file = scene.folder / "run.yaml"
    keys = [f"config={file}", f"data.path={scene.data}", f"train.max_steps={END}", "train.watchdog=30"]
    plant = Start(scene.folder / "cwd", None)
    ranks = Ranks(keys, scene.run, size=1, plant=plant, log=scene.folder / "log", small=False)
    code = ranks.wait(HANG_S)[0]
    scene.output = ranks.output()
    check_output(code, scene.output)
    if code == 2:
        check_refusal(scene, scene.output, before)
        return
    demand_code(kind, code, scene.output)
    asked = leaves(yaml.safe_load(file.read_bytes())) if file.read_bytes().strip() else {}
    saved = saved_tree(scene.run)
    for key, value in asked.items():
        told = key == "include" or key.startswith(("train.max_steps", "train.watchdog", "train.stages"))
        demand(
            told or saved.get(key) == value or str(saved.get(key)) == str(value),
            f"{key}: {value} in the file, {saved.get(key)} used",
        )


@kind(
    FILE,
    "the file is damaged in any way",
    AS_IT_STANDS,
    "the message names the line or the key; a file that is still valid is used as it stands",
    with_run_file,
)
def run_file(scene: Scene) -> None:
    tree = {"include": ["tiny_sb"]}
    lines = [f"include: {json.dumps(tree['include'])}"]
    for key in [*SMALL[1:], *EVERY]:
        path, _, value = key.partition("=")
        lines.append(f"{path}: {value}")
    nested: dict[str, dict[str, object]] = {}
    for line in lines[1:]:
        path, _, text = line.partition(": ")
        section, _, name = path.partition(".")
        nested.setdefault(section, {})[name] = yaml.safe_load(text)
    file = scene.folder / "run.yaml"
    file.write_text(lines[0] + "\n" + yaml.safe_dump(nested))
    way = scene.rng.choice([name for name in WAYS if name not in ("gone", "a folder of its name")])
    WAYS[way](file, scene.rng)
    scene.harmed = f"{way}: {file.read_bytes()[:300]!r}"


# ---- an export


def import_it(kind: Kind, scene: Scene) -> None:
    folder, out = scene.folder / "exported", scene.folder / "imported"
    plant = Start(scene.folder / "cwd", None)
    code, scene.output = run_command("launch.import_hf", [f"from={folder}", f"out={out}"], scene.folder / "log", plant)
    check_output(code, scene.output)
    if code == 2:
        check_refusal(scene, scene.output, snapshot(scene.run))
        demand(not out.exists(), "a part of it was imported")
        return
    demand_code(kind, code, scene.output)
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    demand(verify(checkpoint) is None, "what was imported is not whole")
    ours = load_file(checkpoint / "rank-00000.safetensors")
    theirs = load_file(folder / "model.safetensors")
    total = sum(tensor.double().sum() for tensor in theirs.values())
    found = sum(tensor.double().sum() for name, tensor in ours.items() if name.startswith("weight/"))
    demand(abs(total - found) < 1e-6 * max(1.0, abs(total)), "other weights than those in the file were imported")


@kind(
    EXPORT,
    "one of its files is damaged in any way, and the export is imported",
    AS_IT_STANDS,
    "the message names the file or what is missing; the format has no checksums, so weights that are still numbers are used",
    import_it,
)
def export_file(scene: Scene) -> None:
    """Hugging Face's format has no checksums: weights that are numbers are taken as they are."""
    folder = scene.folder / "exported"
    folder.mkdir()
    for file in (scene.world.folder / f"exported-{BEGUN}").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    files = [folder / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    file = scene.rng.choice(files)
    scene.harmed, scene.names = f"{file.name}: {any_way(file, scene.rng)}", str(folder)


# ---- reading


def _read(kind: Kind, scene: Scene, module: str, *arguments: str) -> None:
    """Goes on with the newest whole checkpoint, which it names."""
    before = snapshot(scene.run)
    plant = Start(scene.folder / "cwd", None)
    given = [f"checkpoint={scene.run}", *arguments]
    code, scene.output = run_command(module, given, scene.folder / "log", plant)
    check_output(code, scene.output)
    demand_code(kind, code, scene.output)
    after = snapshot(scene.run)
    demand({name: after.get(name) for name in before} == before, "reading changed the run's folder")


def export_it(kind: Kind, scene: Scene) -> None:
    out = scene.folder / "out"
    _read(kind, scene, "launch.export", f"out={out}")
    found = snapshot(out)
    demand(
        any(found == snapshot(scene.world.folder / f"exported-{step}") for step in scene.resumes),
        f"the export is not that of step {scene.resumes}",
    )


def _harm_newest(scene: Scene) -> None:
    file = file_of(scene.newest, scene.rng)
    before = snapshot(scene.newest)
    scene.harmed = f"{file.name}: {any_way(file, scene.rng)}"
    if snapshot(scene.newest) != before:
        scene.resumes = (BEGUN - 2, BEGUN) if file.name == "checksums.json" else (BEGUN - 2,)


@kind(
    READING,
    "export: a file of the newest checkpoint is damaged in any way",
    Outcome.TAKES_THE_OLDER,
    OLDER,
    export_it,
)
def export_of_damaged(scene: Scene) -> None:
    _harm_newest(scene)


def evaluate_it(kind: Kind, scene: Scene) -> None:
    _read(kind, scene, "launch.evaluate", "tasks=none", "baseline=false")
    results = [file.stem for file in (scene.run / "eval").glob("*.json")]
    demand(
        results in [[f"step-{step:08d}"] for step in scene.resumes],
        f"results of {results}, not of step {scene.resumes}",
    )


@kind(
    READING,
    "evaluate: a file of the newest checkpoint is damaged in any way",
    Outcome.TAKES_THE_OLDER,
    OLDER,
    evaluate_it,
)
def evaluate_damaged(scene: Scene) -> None:
    _harm_newest(scene)
