"""Where a conversion stands, saved now and then: after a kill the same command goes on from there to the same bytes."""

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.key_set import KeySet
from data_prep.pack import Counts, Packer
from data_prep.write_shards import ShardFolder, Unfinished, sync, write_whole

STATE, KEYS = ".state", ".keys"


@dataclass
class State:
    """Everything that the rest of a conversion depends on, after a batch of the source that is being packed."""

    plan: dict[str, Any]  # what was asked for
    finished: dict[str, dict[str, Counts]] = field(default_factory=dict)  # source → split → counts
    position: tuple[int, int] = (0, 0)  # input of the source, and how many batches of it are packed
    documents: int = 0  # of the source, seen so far
    packers: dict[str, Packer] = field(default_factory=dict)  # by split
    unfinished: dict[str, Unfinished] = field(default_factory=dict)  # shards in the making, by split
    num_keys: int = 0  # documents' keys in KEYS

    def save(self, folder: ShardFolder) -> None:
        self.unfinished = folder.unfinished()
        write_whole(folder.partial / STATE, pickle.dumps(self, protocol=5))


def load_state(folder: ShardFolder, plan: dict[str, Any]) -> State | None:
    """The state that a killed run left, if `plan` continues it. Raises DataError if it does not."""
    file = folder.partial / STATE
    if not file.is_file():
        return None
    try:
        state = pickle.loads(file.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise DataError(f"{file} is of another version or broken ({error}): remove {folder.partial}") from error
    changed = [key for key in plan if not _continues(state.plan.get(key), plan[key])]
    if changed:
        raise DataError(
            f"{folder.partial} holds an unfinished conversion with other {changed[0]}:"
            " run its command again, choose another --out, or remove it"
        )
    state.plan = plan
    return state


def _continues(old: Any, new: Any) -> bool:
    """Whether a run that asks for `new` may go on with what one that asked for `old` has done."""
    if isinstance(old, dict) and new.get("skip_broken"):  # nothing was broken so far, or the old run skipped it too
        old = old | {"skip_broken": True}
    return json.dumps(old) == json.dumps(new)  # the order of the sources counts too


class Seen:
    """The keys of all documents so far; on disk too, as the state would grow with them."""

    def __init__(self, folder: ShardFolder, num_keys: int):
        self.path = folder.partial / KEYS
        self._set = KeySet()
        if num_keys:
            self._set.add(np.fromfile(self.path, np.uint64, num_keys))
        self._file = open(self.path, "ab")  # noqa: SIM115 (lives as long as the conversion)
        self._file.truncate(8 * num_keys)
        self.num_keys = num_keys

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Whether each document is the first of its text."""
        new = self._set.add(keys)
        self._file.write(keys[new].astype(np.uint64).tobytes())
        self.num_keys += int(new.sum())
        return new

    def flush(self) -> None:
        self._file.flush()
        sync(Path(self.path))
