"""Names that are read from files: whoever wrote the file chose them, so each is checked before a path is made of it.

ssscale/names.py and data_prep/names.py are the same text, as data_prep imports nothing of ssscale.
"""

from pathlib import Path
from typing import Any

LONGEST = 255  # bytes of a file's name on every common file system


def is_plain(name: object) -> bool:
    """Whether this names a file directly inside a folder: no separators, no `..`, nothing that cannot be printed."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not set("/\\") & set(name)
        and name.isprintable()  # NUL and lone surrogates are not
        and len(name.encode()) <= LONGEST
    )


def is_plain_path(name: object) -> bool:
    """Whether this is a relative path of plain names, such as train/web/index.json."""
    return isinstance(name, str) and all(map(is_plain, name.split("/")))


def leads_out(file: Path, folder: Path) -> bool:
    """Whether links on the way to `file` lead out of `folder`, which may be a link itself."""
    try:
        return not file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return True


def bad_name(manifest: dict[str, Any]) -> str | None:
    """Where the manifest of a data folder gives a name that is not of a file inside the folder, else None.

    Raises AttributeError, KeyError or TypeError for a manifest that has another form.
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
    """The same for the shards of an index.json of mosaicml-streaming."""
    for number, shard in enumerate(shards):
        for kind in ("raw_data", "zip_data"):
            if shard[kind] and not is_plain(shard[kind]["basename"]):
                return f"`{kind}.basename` of shard {number} is {shard[kind]['basename']!r}"
    return None
