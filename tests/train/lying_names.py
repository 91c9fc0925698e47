"""Data folders with names and links that lead out of them, and what is said of each."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

SECRET = b"not yours"


def sign(manifest: dict) -> dict:
    """A manifest with the checksum that its content has: strangers can compute it too."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}


def edit_manifest(folder: Path, edit: Callable[[dict], None]) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(sign(manifest)))


def edit_index(folder: Path, edit: Callable[[dict], None]) -> None:
    """Change the first shard's entry of train/code, and the manifest with it."""
    file = folder / "train/code/index.json"
    index = json.loads(file.read_text())
    edit(index["shards"][0])
    content = json.dumps(index).encode()
    file.write_bytes(content)

    def known(manifest: dict) -> None:
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"]["train/code/index.json"] = entry

    edit_manifest(folder, known)


def tokenizer_elsewhere(folder: Path) -> None:
    def edit(manifest: dict) -> None:
        manifest["tokenizer"] |= {"file": "../outside/secret", "sha256": hashlib.sha256(SECRET).hexdigest()}
        manifest["files"]["../outside/secret"] = {"bytes": len(SECRET), "sha256": hashlib.sha256(SECRET).hexdigest()}

    edit_manifest(folder, edit)


def tokenizer_link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(folder.parent / "outside/secret")
    digest = hashlib.sha256(SECRET).hexdigest()

    def edit(manifest: dict) -> None:
        manifest["tokenizer"]["sha256"] = digest
        manifest["files"]["tokenizer.json"] = {"bytes": len(SECRET), "sha256": digest}

    edit_manifest(folder, edit)


def source_elsewhere(folder: Path) -> None:
    shutil.copytree(folder / "train/code", folder.parent / "outside/code")

    def edit(manifest: dict) -> None:
        train = manifest["splits"]["train"]
        train["../../outside/code"] = train.pop("code")
        for name in [name for name in manifest["files"] if name.startswith("train/code/")]:
            manifest["files"][name.replace("train/", "train/../../outside/")] = manifest["files"].pop(name)

    edit_manifest(folder, edit)


def folder_link(folder: Path) -> None:
    (folder / "train/code").rename(folder.parent / "outside/code")
    (folder / "train/code").symlink_to(folder.parent / "outside/code")


def write_link(suffix: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        name = json.loads((folder / "train/code/index.json").read_text())["shards"][0]["raw_data"]["basename"]
        (folder / "train/code" / suffix.format(name)).symlink_to(folder.parent / "outside/secret")

    return plant


def name(kind: str, value: str) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, lambda shard: shard[kind].update(basename=value))


NOT_OURS = "not the name of a file in its folder"
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "raw": (name("raw_data", "../../../outside/secret"), NOT_OURS),
    "raw absolute": (name("raw_data", "/tmp/ssscale-outside"), NOT_OURS),
    "raw with NUL": (name("raw_data", "shard\0"), NOT_OURS),
    "raw is ..": (name("raw_data", ".."), NOT_OURS),
    "raw is no text": (name("raw_data", 3), NOT_OURS),  # type: ignore[arg-type]
    "zip": (name("zip_data", "../../../outside/shard.00000.mds.zstd"), NOT_OURS),
    "tokenizer": (tokenizer_elsewhere, NOT_OURS),
    "tokenizer is a link": (tokenizer_link, "a link that leads out"),
    "source": (source_elsewhere, NOT_OURS),
    "files": (lambda folder: edit_manifest(folder, lambda m: m["files"].update({"../x": {}})), "manifest"),
    "source folder is a link": (folder_link, "a link that leads out"),
    "lock is a link": (write_link(".{}.lock"), "is a link"),
    "temporary file is a link": (write_link("{}.tmp"), "is a link"),
    "no table": (lambda folder: edit_manifest(folder, lambda m: m.update(splits=[])), "form of a manifest"),
    "no tokenizer": (lambda folder: edit_manifest(folder, lambda m: m.pop("tokenizer")), "form of a manifest"),
    "no shards": (lambda folder: edit_index(folder, dict.clear), "form of an index"),
}
