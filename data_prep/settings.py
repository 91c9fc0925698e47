"""The settings that determine the output's bytes, from flags or YAML. The number of workers is not one of them."""

import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import DataError
from data_prep.parse import Parser

PACKINGS = ("best-fit", "concat")
TASK = re.compile(r"([0-9]+)/([0-9]+)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Settings:
    """The settings of a conversion.

    sources, valid: name → paths, folders, globs or `stdlib:code`, `stdlib:docs`. `valid_fraction` of the documents of
    `sources`, chosen by the hash of their text, go to validation, unless `valid` names validation files of the same
    source. Exactly one of tokenizer and train_vocab_size must be given. Raises DataError for invalid settings.
    """

    sources: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    valid: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    length: int = 4096  # tokens per row
    packing: str = "best-fit"
    tokenizer: str | None = None  # a tokenizer.json
    train_vocab_size: int | None = None  # train a tokenizer of this size on the sources instead
    bos: str | None = None  # None: the first known pair among the tokenizer's tokens
    eos: str | None = None
    vocab_size: int | None = None  # size of the model's vocabulary; every token id must be smaller
    field: str = "text"  # field of a JSON record with the text
    where: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # source → values that records must have
    min_chars: int = 0  # shorter texts are left out
    max_chars: int | None = None  # longer texts are left out
    deduplicate: bool = False  # keep only the first of equal texts, over all sources
    skip_broken: bool = False  # count broken documents instead of stopping at them
    valid_fraction: float = 0.01
    buffer_tokens: int = 1 << 25  # tokens that best-fit packs together
    shard_bytes: int = 1 << 25  # bytes of a shard before compression
    seed: int = 0  # seed of the order in which best-fit writes its rows
    task: str | None = None  # "i/n": convert only the i-th of n parts of the input (i from 0), for `merge`

    def __post_init__(self) -> None:
        if not self.sources:
            if self.valid:
                raise DataError(f"source {next(iter(self.valid))!r} has validation files only: name its training files")
            raise DataError("no source: give --source NAME=PATH or a config with `sources`")
        for name in (*self.sources, *self.valid):
            if not NAME.fullmatch(name):
                raise DataError(
                    f"source name {name!r} must be of letters, digits, `_`, `-` and `.`, a letter or digit first"
                )
        for name in (*self.valid, *self.where):
            if name not in self.sources:
                raise DataError(
                    f"{name!r} has validation files or a filter but is no source ({', '.join(self.sources)})"
                )
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            raise DataError(
                "give either a tokenizer (--tokenizer FILE) or the size of one to train (--train-vocab-size N)"
            )
        for key, token in (("bos", self.bos), ("eos", self.eos)):
            if token == "":
                raise DataError(f"{key} is empty: name a token of the tokenizer")
        if self.packing not in PACKINGS:
            raise DataError(f"packing {self.packing!r} is not one of {', '.join(PACKINGS)}")
        if self.length < 2:
            raise DataError(f"length {self.length} must be at least 2")
        if not 0 <= self.valid_fraction < 1:
            raise DataError(f"valid_fraction {self.valid_fraction} must be at least 0 and below 1")
        if not 1 << 10 <= self.shard_bytes < 1 << 31:
            raise DataError(f"shard_bytes {self.shard_bytes} must be between 1 KiB and 2 GiB")
        if self.buffer_tokens < 1:
            raise DataError(f"buffer_tokens {self.buffer_tokens} must be at least 1")
        self._check_filters()
        if self.task is not None:
            task, tasks = self.task_numbers
            if not 0 <= task < tasks:
                raise DataError(f"task {self.task} must be i/n with i from 0 to n - 1")
            if self.train_vocab_size is not None:
                raise DataError("tasks share one tokenizer: train it before (train-tokenizer) and give --tokenizer")

    def _check_filters(self) -> None:
        for name, least in (("min_chars", 0), ("max_chars", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name} {value} must be at least {least}")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise DataError(f"max_chars {self.max_chars} is below min_chars {self.min_chars}")
        for source, conditions in self.where.items():
            for column, wanted in conditions.items():
                # A misspelt bound would keep every record that has the column.
                if isinstance(wanted, dict) and not (
                    wanted and wanted.keys() <= {"min", "max"} and all(_fits(v, "float") for v in wanted.values())
                ):
                    raise DataError(
                        f"where.{source}.{column} is {wanted}: a range is {{min: NUMBER, max: NUMBER}}, or one of them"
                    )

    @property
    def task_numbers(self) -> tuple[int, int]:
        """(i, n) from `task`. Raises DataError if it has another form."""
        match = TASK.fullmatch(self.task or "")
        if not match:
            raise DataError(f"task {self.task} must be i/n, such as 0/8")
        return int(match[1]), int(match[2])

    def parser(self, source: str) -> Parser:
        where = self.where.get(source, {})
        return Parser(self.field, where, self.min_chars, self.max_chars, self.skip_broken)

    def is_valid(self, source: str, key: int) -> bool:
        """Whether the hash of a document of `sources` sends it to the validation split."""
        return source not in self.valid and key < self.valid_fraction * 2.0**64

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice. yaml.SafeLoader takes the last one without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(None, None, f"found duplicate key {key.value}", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def from_yaml(file: str, overrides: dict[str, Any]) -> Settings:
    """Returns the settings of a YAML file, with those of `overrides` that are not None. Raises DataError."""
    try:
        values = yaml.load(Path(file).read_text(encoding="utf-8"), UniqueKeys)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not valid UTF-8: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise DataError(f"{file} is not YAML{line}: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise DataError(f"{file} is nested too deeply, or contains itself") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} must hold keys and values")
    return from_dict(values | {key: value for key, value in overrides.items() if value is not None}, file)


def from_dict(values: dict[str, Any], where: str) -> Settings:
    """Returns settings from plain values. Raises DataError naming an unknown key or a wrong type."""
    fields = {
        f.name: f.type.__name__ if isinstance(f.type, type) else str(f.type) for f in dataclasses.fields(Settings)
    }
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            raise DataError(f"{where}: unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        if key in ("sources", "valid"):
            values = values | {key: _patterns(value, f"{where}: {key}")}
        elif not _fits(value, fields[key]):
            raise DataError(f"{where}: {key}={value!r} must be {fields[key]}")
    return Settings(**values)


def _patterns(value: Any, where: str) -> dict[str, list[str]]:
    if not isinstance(value, dict):
        raise DataError(f"{where} must map names to paths")
    patterns = {str(name): [paths] if isinstance(paths, str) else paths for name, paths in value.items()}
    for name, paths in patterns.items():
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
            raise DataError(f"{where}.{name} must be a path or a list of paths")
    return patterns


def _fits(value: Any, declared: str) -> bool:
    kinds = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
    if declared.startswith("dict"):
        return isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())
    if isinstance(value, bool):
        return declared == "bool"
    return any(isinstance(value, kinds[kind]) for kind in declared.split(" | "))  # type: ignore[arg-type]
