"""Tasks that users define: lm-eval YAML files, in folders or given by path, with data of the user."""

import difflib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.api.metrics  # fills the registry
import lm_eval.tasks
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as READERS  # json, csv, parquet, text, ...
from lm_eval.api.group import Group
from lm_eval.api.registry import METRIC_REGISTRY, get_metric
from lm_eval.api.task import Task
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from ssscale.errors import UserError

LM_EVAL = Path(lm_eval.tasks.__file__).parent

Config = dict[str, Any]


class TaskManager(lm_eval.tasks.TaskManager):
    """lm-eval's TaskManager with a different rule for relative data paths in a task's YAML.

    They are looked up in the folder of the YAML first, then in the working directory.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = _Factory(meta=self.metadata)

    def _load_spec(self, spec: str | Config) -> Task | Group | list[Task]:
        """Load a task or group by name or by YAML file.

        lm-eval's version names a group that is given by file after its list of tasks.
        """
        if isinstance(spec, str) and is_yaml(spec):
            config = read_yaml(Path(spec))
            name, kind = (config["group"], Kind.GROUP) if "group" in config else (config["task"], Kind.TASK)
            entry = Entry(name, Kind.PY_TASK if "class" in config else kind, Path(spec).resolve())
            return self._factory.build(entry, registry=self.task_index)
        return super()._load_spec(spec)


class _Factory(TaskFactory):
    def _load_full_config(self, entry: Entry, overrides: Config | None = None) -> Config:
        config: Config = super()._load_full_config(entry, overrides)
        yaml = entry.yaml_path
        if yaml is None or yaml.is_relative_to(LM_EVAL):
            return config
        check_splits(config, yaml)
        check_metrics(config, yaml)
        return with_found_data(config, yaml)


def is_own(config: Any) -> bool:
    """Return whether a task is defined outside lm-eval. config: its TaskConfig."""
    metadata = config.metadata if isinstance(config.metadata, dict) else {}
    return not Path(metadata.get("config_source", "")).is_relative_to(LM_EVAL)


def check_splits(config: Config, yaml: Path) -> None:
    """Raises UserError if a task of a user names a split that its own `data_files` lack. lm-eval raises a KeyError."""
    settings = config.get("dataset_kwargs")
    files = settings.get("data_files") if isinstance(settings, dict) else None
    if not isinstance(files, dict) or config.get("dataset_path") not in READERS or config.get("process_docs"):
        return
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        split = config.get(key)
        if isinstance(split, str) and split.partition("[")[0] not in files:
            raise UserError(f"{yaml}: {key} is {split!r}, but data_files has {', '.join(map(str, files))}")


def check_metrics(config: Config, yaml: Path) -> None:
    """Raises UserError if a task of a user names a metric that nothing computes. lm-eval raises KeyError(None)."""
    if config.get("process_results"):
        return
    for entry in config.get("metric_list") or []:
        name = entry.get("metric") if isinstance(entry, dict) else None
        # get_metric also searches the library `evaluate`, as lm-eval does.
        if isinstance(name, str) and name not in METRIC_REGISTRY and get_metric(name) is None:
            near = difflib.get_close_matches(name, list(METRIC_REGISTRY), n=1)
            hint = f"; did you mean {near[0]}?" if near else ", and the task has no process_results that returns it"
            raise UserError(f"{yaml}: lm-eval has no metric {name!r}{hint}")


def with_found_data(config: Any, yaml: Path) -> Any:
    """Return a definition of a task or group with its data paths resolved. Raises UserError for a missing file."""
    if isinstance(config, list):
        return [with_found_data(item, yaml) for item in config]
    if not isinstance(config, dict):
        return config
    found = {key: with_found_data(value, yaml) for key, value in config.items()}
    path, settings = config.get("dataset_path"), config.get("dataset_kwargs")
    if isinstance(path, str) and path.startswith("."):
        found["dataset_path"] = find_data(path, yaml)
    # Data sets of other kinds have their files in their own folder or on the hub.
    if isinstance(settings, dict) and (path is None or path in READERS):
        key = "data_dir" if settings.get("data_dir") else "data_files"
        if settings.get(key):
            found["dataset_kwargs"] = settings | {key: _each(settings[key], yaml)}
    return found


def _each(paths: Any, yaml: Path) -> Any:
    """Resolve data_files, which is a path, a list of paths, or a dict of either by split."""
    if isinstance(paths, dict):
        return {split: _each(value, yaml) for split, value in paths.items()}
    if isinstance(paths, list | tuple):
        return [_each(value, yaml) for value in paths]
    return find_data(str(paths), yaml)


def find_data(path: str, yaml: Path) -> str:
    """Resolve a path or glob pattern, first in the folder of the YAML, then in the working directory.

    URLs are returned unchanged. Raises UserError if nothing matches.
    """
    if "://" in path:
        return path
    path = os.path.expanduser(path)
    folders = [str(yaml.parent), os.getcwd()]
    for folder in folders:
        whole = os.path.join(folder, path)  # an absolute path stays as it is
        if os.path.exists(whole) or glob.glob(whole, recursive=True):
            return whole
    where = "does not exist" if os.path.isabs(path) else f"is neither in {folders[0]} nor in {folders[1]}"
    raise UserError(f"{yaml}: its data {path} {where}")


def is_yaml(name: str) -> bool:
    """Return whether an entry of `tasks=` is a YAML file rather than the name of a task."""
    return name.endswith((".yaml", ".yml"))


def read_yaml(file: Path) -> Config:
    """Read the YAML of a task or group without resolving functions. Raises UserError if it is missing or broken."""
    if not file.is_file():
        raise UserError(f"tasks={file}: there is no such file")
    try:
        config: Config = load_yaml(file, resolve_func=False)
    except Exception as error:  # the YAML parser and lm-eval's loader raise many types
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(config.get("task", config.get("group")), str | list):
        raise UserError(f"{file} defines no task: it has neither task: nor group:")
    return config


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class OwnTasks:
    """The tasks and groups that the YAML files in a user's folders define.

    files: the defining files by name of the task or group.
    broken: one sentence per file that cannot be read.

    Raises UserError if a folder is missing.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.files: dict[str, list[Path]] = {}
        self.broken: list[str] = []
        for folder in self.folders:
            if not folder.is_dir():
                raise UserError(f"include={folder}: there is no such folder (use tasks= for a YAML file)")
            for file in TaskIndex._iter_yaml_files(folder):
                try:
                    config = load_yaml(file, resolve_func=False)
                except Exception as error:
                    self.broken.append(f"{file} cannot be read: {first_line(error)}")
                    continue
                name = config.get("group", config.get("task"))
                if isinstance(name, str):
                    self.files.setdefault(name, []).append(file)

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError for a name that two files define. lm-eval would use the first without a warning."""
        for name in names:
            if len(self.files.get(name, [])) > 1:
                files = " and ".join(map(str, self.files[name]))
                raise UserError(f"tasks={name}: {files} both define it; name the file in tasks=, or rename one")


def group_folders(names: Iterable[str]) -> list[Path]:
    """Return the folders of groups that are given by file. Members of such a group are looked up in its folder."""
    return [Path(name).parent for name in names if is_yaml(name) and "group" in read_yaml(Path(name))]


def leads_to(names: Iterable[str], index: dict[str, Entry]) -> list[str]:
    """Return all names that must be defined: the given ones, and the members of groups that lm-eval does not define."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in found:
            found[name] = None
            entry = index.get(name)
            if entry is None or (entry.yaml_path is not None and entry.yaml_path.is_relative_to(LM_EVAL)):
                return
            for member in _members(entry.cfg or {}, index) if entry.kind is Kind.GROUP else ():
                visit(member)

    for name in names:
        if is_yaml(name):
            for member in _members(read_yaml(Path(name)), index):
                visit(member)
        else:
            visit(name)
    return list(found)


def _members(config: Config, index: dict[str, Entry]) -> Iterator[str]:
    members = config.get("task")
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            yield member
        elif isinstance(member, dict) and "group" in member and member["group"] not in index:
            yield from _members(member, index)  # defined inside this group
        elif isinstance(member, dict):
            name = member.get("group", member.get("task"))
            defined_here = {"dataset_path", "custom_dataset", "class"} & member.keys()
            if isinstance(name, str) and (name in index or not defined_here):
                yield name
