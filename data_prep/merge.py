"""The command `merge`, which combines the folders of all tasks (`pack --task I/N`) into one.

Shards are linked; they are neither read nor written again.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.names import leads_out
from data_prep.progress import Progress
from data_prep.read_shards import read_manifest, shards
from data_prep.write_shards import INDEX, TOKENIZER, ShardFolder, check_free, file_sha256

Manifest = dict[str, Any]


def merge(parts: list[str], out: str, progress: Progress) -> Manifest:
    """Makes the data folder `out` from the parts, in the order of their tasks. Returns its manifest.

    The hashes of the shards are taken from the manifests of the parts. Raises DataError unless the parts are all tasks
    of one conversion, each complete and present once.
    """
    check_free(Path(out))
    ordered = _ordered({part: read_manifest(part) for part in parts})
    first = next(iter(ordered.values()))
    progress.start(
        "merge", sum(entry["bytes"] for manifest in ordered.values() for entry in manifest["files"].values())
    )
    with ShardFolder(out, first["settings"]["shard_bytes"]) as folder:
        folder.clear()
        known: dict[str, str] = {}
        splits: dict[str, dict[str, Any]] = {}
        for split, sources in first["splits"].items():
            counts = {source: _sum([m["splits"][split][source] for m in ordered.values()]) for source in sources}
            splits[split] = counts
            for source in sources:
                known |= _link(ordered, folder.partial, split, source, progress)
        shutil.copyfile(_tokenizer(next(iter(ordered))), folder.partial / TOKENIZER)
        manifest = {key: first[key] for key in ("length", "packing", "dtype", "tokenizer")}
        manifest |= {"splits": splits, "settings": first["settings"] | {"task": None}}
        manifest["inputs"] = _sum([m["inputs"] for m in ordered.values()])
        return folder.commit(manifest, known)


def _ordered(manifests: dict[str, Manifest]) -> dict[str, Manifest]:
    """Sorts the manifests by task. Raises DataError if a task is missing, duplicate, or from another conversion."""
    tasks: dict[int, str] = {}
    first = next(iter(manifests))
    for part, manifest in manifests.items():
        settings, wanted = manifest["settings"], manifests[first]["settings"]
        if settings["task"] is None:
            raise DataError(f"{part} is whole by itself: only folders of `pack --task I/N` are merged")
        task, number = map(int, settings["task"].split("/"))
        changed = [key for key in wanted if key != "task" and settings.get(key) != wanted[key]]
        if number != int(wanted["task"].split("/")[1]):
            changed = ["task"]
        if not changed and manifest["tokenizer"] != manifests[first]["tokenizer"]:
            changed = ["tokenizer"]
        if changed:
            raise DataError(f"{part} and {first} were made with different {changed[0]}: they cannot be merged")
        if task in tasks:
            raise DataError(f"{part} and {tasks[task]} are the same task {settings['task']}")
        tasks[task] = part
    missing = [task for task in range(number) if task not in tasks]
    if missing:
        raise DataError(f"task {missing[0]}/{number} is missing: all of them are merged together")
    return {tasks[task]: manifests[tasks[task]] for task in sorted(tasks)}


def _link(manifests: dict[str, Manifest], out: Path, split: str, source: str, progress: Progress) -> dict[str, str]:
    """Links the shards of a source under new numbers and writes their index. Returns their sha256 by name."""
    name = f"{split}/{source}"
    target = out / name
    entries: list[dict[str, Any]] = []
    known: dict[str, str] = {}
    for part, manifest in manifests.items():
        index = manifest["files"].get(f"{name}/{INDEX}")
        if index is None:  # the part has no rows of this source
            continue
        if file_sha256(Path(part) / name / INDEX) != index["sha256"]:
            raise DataError(f"{part}/{name}/{INDEX} is corrupt: its sha256 is not the manifest's")
        target.mkdir(parents=True, exist_ok=True)
        for shard in shards(part, split, source):
            file = Path(part) / name / shard["zip_data"]["basename"]
            entry = manifest["files"][f"{name}/{file.name}"]
            if leads_out(file, Path(part)):
                raise DataError(f"shard {file} is a link that leads out of the data folder: put the file in its place")
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise DataError(f"shard {file} is missing or of the wrong size")
            stem = f"shard.{len(entries):05}.mds"
            shard["raw_data"]["basename"], shard["zip_data"]["basename"] = stem, f"{stem}.zstd"
            _link_or_copy(file, target / f"{stem}.zstd")
            known[f"{name}/{stem}.zstd"] = entry["sha256"]
            entries.append(shard)
            progress.advance(entry["bytes"])
    if entries:
        (target / INDEX).write_text(json.dumps({"version": 2, "shards": entries}, sort_keys=True))
    return known


def _tokenizer(part: str) -> Path:
    file = Path(part) / TOKENIZER
    if leads_out(file, Path(part)) or not file.is_file():
        raise DataError(f"{file} is missing, or a link that leads out of the data folder")
    return file


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, target)


def _sum(values: list[Any]) -> Any:
    """Adds numbers, or dictionaries of numbers key by key. Their keys may differ."""
    if not isinstance(values[0], dict):
        return sum(values)
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: _sum([value[key] for value in values if key in value]) for key in keys}
