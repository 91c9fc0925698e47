"""Checks names of tasks without importing lm-eval and torch, because these imports take seconds."""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from eval.checkpoint.ruler import TASKS as RULER
from eval.checkpoint.tasks.local.files import FILES, missing
from ssscale.errors import UserError

TASKS = Path(__file__).parent / "tasks"
OURS = [*FILES, "cloze", *RULER]

# `task: name`, also in lists, and the names listed under `tag:` or `group:`.
_NAMED = re.compile(rb"^[ \t-]*[\"']?(?:task|group|tag)[\"']?[ \t]*:[ \t]*([^\s#].*)$", re.MULTILINE)
_LISTED = re.compile(rb"^[ \t-]*[\"']?(?:tag|group)[\"']?[ \t]*:[ \t]*\n((?:[ \t]*-[ \t]*.+\n?)+)", re.MULTILINE)


def check_tasks(names: Sequence[str], eval_data: str, option: str = "tasks", include: Sequence[Path] = ()) -> list[str]:
    """Check that all tasks are defined and their local files exist. Returns the names that lm-eval must define.

    eval_data: the folder of local files. They are required only without network access.
    option: the name of the option in messages.
    include: further folders of definitions.

    Raises UserError for an unknown name, with similar names, and for missing files.
    """
    ruler = [name for name in names if name in (*RULER, "ruler")]
    if ruler:  # lm-eval's own versions download texts and a tokenizer
        raise UserError(f"{option}={','.join(ruler)}: RULER's tasks run with launch/evaluate.py suite=ruler")
    absent = {name: missing(name, eval_data) for name in names if name in FILES}
    lacking = {name: file for name, file in absent.items() if file}
    if lacking and os.environ.get("HF_HUB_OFFLINE", "1") == "1":
        files = "; ".join(f"{eval_data}/{file} (a copy of {origin})" for file, origin in lacking.values())
        raise UserError(
            f"{option}={','.join(lacking)}: data is missing: {files}. Put it there as JSON lines (or .zst of them), name "
            "another folder with eval_data=FOLDER, or let lm-eval download it with HF_HUB_OFFLINE=0"
        )
    return [*lacking, *check_names(names, option, include)]


def check_names(names: Sequence[str], option: str = "tasks", include: Sequence[Path] = ()) -> list[str]:
    """Like `check_tasks`, without a look for their files."""
    own = set(OURS) if all(name in OURS for name in names) else set(OURS) | defined([TASKS, *include])
    others = [name for name in names if name not in own]
    if not others:
        return []
    known = defined([lm_eval_tasks()])
    for name in others:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(own), n=1) + difflib.get_close_matches(name, known, n=3)
            hint = " or ".join(dict.fromkeys(near)) or f"one of ours ({', '.join(OURS)}) or of lm-eval's"
            raise UserError(f"{option}={name}: there is no such task; did you mean {hint}?")
    return others


def check_request(names: Sequence[str], eval_data: str, option: str = "tasks", include: Sequence[str] = ()) -> None:
    """Check a user's request like `check_tasks`. names may also contain paths of YAML files.

    include: folders with YAML files of the user. Raises UserError also for a missing file or folder.
    """
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{option}={file}: there is no such file")
    for folder in include:
        if not Path(folder).is_dir():
            raise UserError(f"include={folder}: there is no such folder (use tasks= for a YAML file)")
    folders = [*map(Path, include), *(file.parent for file in files)]
    check_tasks([name for name in names if Path(name) not in files], eval_data, option, folders)


def lm_eval_tasks() -> Path:
    """Return the folder of lm-eval's definitions without importing lm-eval."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("lm-eval is not installed: make setup")
    return Path(spec.origin).parent / "tasks"


def defined(folders: Iterable[Path]) -> set[str]:
    """Return the names of tasks, groups and tags that YAML files in the folders and their subfolders define.

    It matches lines with regular expressions and does not parse YAML. lm-eval's 14,000 files take half a second this way,
    but one minute with lm-eval's own index. A name that is found in error is refused later by lm-eval.
    """
    contents = []
    for folder in folders:
        for root, _, files in os.walk(folder):
            for file in files:
                # Templates that other files include often have no suffix.
                if "yaml" in file or file.endswith(".yml") or "." not in file:
                    with open(os.path.join(root, file), "rb", buffering=0) as opened:
                        contents.append(opened.read())
    text = b"\n\n".join(contents)  # one search of all is faster than one search of each
    found = set(_NAMED.findall(text))
    for block in _LISTED.findall(text):
        found.update(line.strip(b" \t-") for line in block.splitlines())
    names = {part for line in found for part in line.strip(b" []").split(b",")}
    return {name.split(b" #")[0].strip(b" \t\"'").decode(errors="replace") for name in names}
