"""The state of a conversion, saved at intervals.

After a kill, the same command continues from it and gives the same bytes. The file .state is an .npz of numbers and
text, so that reading it never runs code.
"""

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.key_set import KeySet
from data_prep.names import bad_shard_name
from data_prep.pack import Counts, Held, Packer, Part
from data_prep.write_shards import ShardFolder, Unfinished, sync, write_whole

STATE, KEYS = ".state", ".keys"
VERSION = 3
NUMBERS = ("documents", "num_keys")

Arrays = dict[str, np.ndarray]


@dataclass
class State:
    """Everything that the rest of a conversion depends on, after some batch of the current source."""

    plan: dict[str, Any]  # settings, inputs, and the tokenizer unless it is trained
    finished: dict[str, dict[str, Counts]] = field(default_factory=dict)  # source → split → counts
    position: tuple[int, int] = (0, 0)  # input of the source, and its number of packed batches
    documents: int = 0  # documents of the source so far
    packers: dict[str, Packer] = field(default_factory=dict)  # by split
    held: dict[str, Held] = field(default_factory=dict)  # state of the previous run's packers
    unfinished: dict[str, Unfinished] = field(default_factory=dict)  # unfinished shards by split
    num_keys: int = 0  # number of keys in KEYS

    def save(self, folder: ShardFolder) -> None:
        self.unfinished = folder.unfinished()
        values: dict[str, Any] = {"version": VERSION, "plan": self.plan, "position": self.position}
        values |= {name: getattr(self, name) for name in NUMBERS}
        values["finished"] = {
            source: {split: asdict(counts) for split, counts in splits.items()}
            for source, splits in self.finished.items()
        }
        values["held"], values["shards"] = {}, {}
        arrays: Arrays = {}
        for split, packer in self.packers.items():
            held = packer.held()
            values["held"][split] = held.values
            arrays |= _pack_parts(split, held.parts)
        for split, (shards, samples) in self.unfinished.items():
            values["shards"][split] = shards
            arrays[f"{split}.sizes"] = np.array([len(sample) for sample in samples], np.int64)
            arrays[f"{split}.samples"] = np.frombuffer(b"".join(samples), np.uint8)
        arrays["values"] = np.frombuffer(json.dumps(values).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_whole(folder.partial / STATE, content.getvalue())


def _pack_parts(split: str, parts: list[Part]) -> Arrays:
    places = np.array([(part.document, part.offset, len(part.tokens)) for part in parts], np.int64).reshape(-1, 3)
    tokens = [part.tokens for part in parts] or [np.empty(0, np.uint16)]
    return {f"{split}.parts": places, f"{split}.tokens": np.concatenate(tokens)}


def load_state(folder: ShardFolder, plan: dict[str, Any]) -> State | None:
    """Returns the state that a killed run left, or None. Raises DataError if it is broken or does not fit `plan`."""
    file = folder.partial / STATE
    if not file.is_file():
        return None
    try:
        state = _read(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise DataError(f"{file} is of another version or broken ({error}): remove {folder.partial}") from error
    except (zipfile.BadZipFile, MemoryError, RecursionError, NotImplementedError) as error:
        raise DataError(f"{file} is of another version or broken ({error}): remove {folder.partial}") from error
    changed = [key for key in plan if not _continues(state.plan.get(key), plan[key])]
    if changed == ["tokenizer"]:
        raise DataError(
            f"{folder.partial} was begun with another tokenizer than {plan['settings']['tokenizer']} holds now:"
            f" put the earlier one back, or remove {folder.partial}"
        )
    if changed:
        raise DataError(
            f"{folder.partial} holds an unfinished conversion whose {changed[0]} differ from those of this command:"
            " enter the earlier command to continue it, choose another --out, or remove the folder"
        )
    state.plan = plan
    return state


def _read(file: Path) -> State:
    """Reads a state. Raises the errors of the formats, and ValueError for values that no conversion saves."""
    with np.load(file, allow_pickle=False) as opened:
        arrays = {name: opened[name] for name in opened.files}
    values = json.loads(arrays["values"].tobytes())
    if values["version"] != VERSION:
        raise ValueError(f"version {values['version']!r}")
    first, second = values["position"]
    state = State(values["plan"], position=(first, second), **{name: values[name] for name in NUMBERS})
    if any(type(number) is not int or number < 0 for number in (first, second, state.documents, state.num_keys)):
        raise ValueError("a count that is not one")
    state.finished = {
        source: {split: _counts(counts) for split, counts in splits.items()}
        for source, splits in values["finished"].items()
    }
    for split, held in values["held"].items():
        _counts(held["counts"])
        state.held[split] = Held(held, _unpack_parts(split, arrays))
    for split, shards in values["shards"].items():
        if bad_shard_name(shards) is not None:
            raise ValueError(bad_shard_name(shards))
        ends = np.cumsum(arrays[f"{split}.sizes"], dtype=np.int64).tolist()
        samples = arrays[f"{split}.samples"].tobytes()
        state.unfinished[split] = (shards, [samples[start:end] for start, end in zip([0, *ends], ends)])
    return state


def _unpack_parts(split: str, arrays: Arrays) -> list[Part]:
    tokens, parts = arrays[f"{split}.tokens"], []
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1:
        raise ValueError(f"tokens of {tokens.dtype}")
    end = 0
    for document, offset, length in arrays[f"{split}.parts"].tolist():
        if min(document, offset, length) < 0:
            raise ValueError("a part that begins or ends before its document")
        parts.append(Part(document, offset, tokens[end : end + length]))
        end += length
    if end != len(tokens):
        raise ValueError(f"{len(tokens):,} tokens in parts of {end:,}")
    return parts


def _counts(values: dict[str, Any]) -> Counts:
    counts = Counts(**values)
    for entry in fields(Counts):
        value = getattr(counts, entry.name)
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(type(number) is not int for number in numbers):
            raise ValueError(f"{entry.name} = {value!r}")
    return counts


def _continues(old: Any, new: Any) -> bool:
    """Whether a run with the plan `new` may continue one with the plan `old`."""
    if isinstance(old, dict) and new.get("skip_broken"):  # nothing was broken so far, or the old run skipped it too
        old = old | {"skip_broken": True}
    return json.dumps(old) == json.dumps(new)  # the order of the sources matters too


class Seen:
    """The keys of all documents so far. They have a file of their own, because the state would grow with them."""

    def __init__(self, folder: ShardFolder, num_keys: int):
        self.path = folder.partial / KEYS
        self._set = KeySet()
        if num_keys:
            keys = np.fromfile(self.path, np.uint64, num_keys) if self.path.is_file() else np.empty(0, np.uint64)
            if len(keys) < num_keys:
                raise DataError(f"{self.path} has {len(keys):,} keys of {num_keys:,}: remove {folder.partial}")
            self._set.add(keys)
        self._file = open(self.path, "ab")  # noqa: SIM115 (lives as long as the conversion)
        self._file.truncate(8 * num_keys)
        self.num_keys = num_keys

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys. Returns for each document whether it is the first with its text."""
        new = self._set.add(keys)
        self._file.write(keys[new].astype(np.uint64).tobytes())
        self.num_keys += int(new.sum())
        return new

    def flush(self) -> None:
        self._file.flush()
        sync(Path(self.path))
