"""Checks names that are read from files. The author of a file chose them, so they are checked before use in a path.

ssscale/names.py and data_prep/names.py have the same text, because data_prep imports nothing of ssscale but its
`streaming_patches` and `zstd`.
"""

from pathlib import Path
from typing import Any

LONGEST = 255  # bytes of a file name, the limit of common file systems


def is_plain(name: object) -> bool:
    """Whether `name` is the name of a file directly inside a folder: no separators, no `..`, only printable characters."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not set("/\\") & set(name)
        and name.isprintable()  # excludes NUL and lone surrogates
        and len(name.encode()) <= LONGEST
    )


def is_plain_path(name: object) -> bool:
    """Whether `name` is a relative path of plain names, such as train/web/index.json."""
    return isinstance(name, str) and all(map(is_plain, name.split("/")))


def leads_out(file: Path, folder: Path) -> bool:
    """Whether symbolic links in the path `file` lead out of `folder`, which may itself be a link."""
    try:
        return not file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a cycle of links
        return True


def bad_name(manifest: dict[str, Any]) -> str | None:
    """Returns a description of the first name in a data folder's manifest that does not stay inside the folder, or None.

    Raises AttributeError, KeyError or TypeError if the manifest does not have the expected form.
    """
    for name in manifest["files"]:
        if not is_plain_path(name):
            return f"`files` has {name!r}"
    if not is_plain(manifest["tokenizer"]["file"]):
        return f"`tokenizer.file` is {manifest['tokenizer']['file']!r}"
    for split, sources in manifest["splits"].items():
        for name in (split, *sources):
            if not is_plain(name):
                return f"`splits` has {name!r}"
    return None


def bad_shard_name(shards: list[dict[str, Any]]) -> str | None:
    """Returns a description of the first such name in the shards of a mosaicml-streaming index.json, or None."""
    for number, shard in enumerate(shards):
        for kind in ("raw_data", "zip_data"):
            if shard[kind] and not is_plain(shard[kind]["basename"]):
                return f"`{kind}.basename` of shard {number} is {shard[kind]['basename']!r}"
    return None
