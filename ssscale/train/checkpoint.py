"""Reads checkpoints, which any parallel layout can load. They are safetensors and JSON, without pickle.

A checkpoint is a folder such as `step-00001000` (docs/reference/checkpoints.md specifies the format):
  rank-00000.safetensors  flat pieces of the fp32 weights and of the optimizer's states that one rank owns
  rank-00000.json         for each piece: its weight, its state, and which elements of the whole weight it holds
  state.json              `TrainState`, the format's version and the number of ranks
  config.yaml             the merged configuration
  tokenizer.json          the tokenizer of the data
  checksums.json          size and XXH3-128 of every other file
`ssscale.train.save` writes to `step-00001000.partial` and renames it after all ranks have flushed their files.
`ssscale.train.whole` decides which checkpoints are whole.
"""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ssscale.engine.base import Engine, Fragment
from ssscale.errors import UserError
from ssscale.model.flops import is_of_mixer
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import global_shape, local_part, local_ranges, split_dim
from ssscale.train.stages import Returns, read_returns

logger = logging.getLogger("ssscale")

FORMAT = 2


@dataclass(frozen=True)
class TrainState:
    """The progress of a run after an optimizer step."""

    step: int = 0  # optimizer steps taken, including skipped ones
    applied_steps: int = 0  # steps that changed the weights
    tokens: int = 0
    samples: int = 0  # rows of the current data folder consumed by all ranks, including those left out
    data_fingerprint: str = ""
    valid_loss: float | None = None  # nats per token; None if this step was not evaluated
    skipped: Returns = ()  # returns to checkpoints after NaN, and the rows that are left out since


@dataclass(frozen=True)
class _Piece:
    file: Path
    key: str
    start: int
    numel: int
    ranges: list[list[int]] | None  # along the split dimension of the whole weight


class CheckpointReader:
    """Reads whole weights, a rank's share of them or flat pieces, independent of the layout that wrote the checkpoint.

    Raises UserError, naming the file, if a file is missing or does not have the expected form.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, dict[str, Any]] = {}
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        self._open: dict[Path, Any] = {}
        try:
            self.state, self.ranks = self._read_state()
            self.tensor_size = int(self._read_index(0)["tensor_size"])
            for rank in range(1, self.ranks):
                self._read_index(rank)
        except OSError as error:
            raise UserError(f"{path} is not a whole checkpoint: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is not a whole checkpoint: its JSON does not have the expected form: {error!r}"
            ) from error

    def _read_state(self) -> tuple[TrainState, int]:
        """Returns the progress of the run and the number of ranks that wrote the checkpoint."""
        saved = json.loads((self.path / "state.json").read_bytes())
        state = TrainState(**{key: saved[key] for key in TrainState.__dataclass_fields__})
        state = replace(state, skipped=read_returns(state.skipped))
        numbers = (state.step, state.applied_steps, state.tokens, state.samples, saved["ranks"])
        if any(type(number) is not int or number < 0 for number in numbers) or saved["ranks"] < 1:
            raise ValueError(f"state.json: {saved}")
        return state, saved["ranks"]

    def _read_index(self, rank: int) -> dict[str, Any]:
        file = self.path / f"rank-{rank:05d}.safetensors"
        index: dict[str, Any] = json.loads(file.with_suffix(".json").read_bytes())
        room = file.stat().st_size // 4  # fp32 elements that fit into the file, an upper bound for each piece
        for name, entry in index["weights"].items():
            self.weights.setdefault(name, {"shape": entry["shape"], "split_dim": entry["split_dim"]})
        for entry in index["pieces"]:
            ranges = index["weights"][entry["name"]]["ranges"]
            piece = _Piece(file, entry["key"], entry["start"], entry["numel"], ranges)
            if not (piece.start >= 0 and 0 <= piece.numel <= room):
                raise ValueError(f"{file.stem}.json: {entry}")
            self._pieces.setdefault((entry["name"], entry["state"]), []).append(piece)
        return index

    def has(self, name: str, state: str) -> bool:
        """Whether the checkpoint has any elements of a state of this weight."""
        return (name, state) in self._pieces

    def restore_rng(self, groups: Groups) -> None:
        """Restores this rank's random number generators, if the checkpoint was written by the same number of ranks."""
        file = self.path / f"rank-{groups.rank:05d}.safetensors"
        if self.ranks != groups.world_size:
            return
        with safe_open(file, framework="pt") as saved:
            for device, restore in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
                if f"rng/{device}" in saved.keys() and (device == "cpu" or torch.cuda.is_available()):  # noqa: SIM118
                    restore(saved.get_tensor(f"rng/{device}"))

    def whole(self, name: str, state: str) -> Tensor:
        """Returns a whole weight or optimizer state, float32 on the CPU, in its saved shape with the vocabulary's padding.

        Raises UserError if it cannot be read, or if a weight has NaN, Inf or elements that no file holds.
        """
        try:
            result = self._whole(name, state)
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"{self.path}: {state} of {name} cannot be read: {error}") from error
        if state == "weight" and not result.isfinite().all():
            raise UserError(
                f"{self.path} cannot be used: {state} of {name} has NaN or Inf, or elements that no file holds"
            )
        return result

    def _whole(self, name: str, state: str) -> Tensor:
        entry = self.weights[name]
        shape, dim = entry["shape"], entry["split_dim"]
        saved = sum(piece.numel for piece in self._pieces[name, state])
        if math.prod(shape) > saved:  # checked before memory is allocated for it
            raise ValueError(f"{saved:,} of {math.prod(shape):,} elements are saved")
        parts: dict[tuple[tuple[int, int], ...], Tensor] = {}
        for piece in self._pieces[name, state]:
            ranges = tuple((a, b) for a, b in piece.ranges or [])
            if ranges not in parts:
                local = list(shape)
                if dim is not None:
                    local[dim] = sum(b - a for a, b in ranges)
                parts[ranges] = torch.full((torch.Size(local).numel(),), torch.nan)
            parts[ranges][piece.start : piece.start + piece.numel] = self._read(piece, 0, piece.numel)
        if dim is None:
            return parts[()].view(shape)
        result = torch.full(shape, torch.nan)
        for ranges, flat in parts.items():
            local = list(shape)
            local[dim] = sum(b - a for a, b in ranges)
            for (a, b), stripe in zip(ranges, flat.view(local).split([b - a for a, b in ranges], dim)):
                result.narrow(dim, a, b - a).copy_(stripe)
        return result

    def local(self, name: str, state: str, weight: Tensor, shape: torch.Size, groups: Groups) -> Tensor:
        """Returns the share of a weight or state that this rank holds in the layout `groups`, float32 on the CPU.

        shape: of the rank's share. The padding of a vocabulary is cut off or filled with zeros. Raises UserError.
        """
        whole = self.whole(name, state)
        wanted = global_shape(weight, groups.tensor_size, shape)
        if list(whole.shape) != wanted:
            padded = torch.zeros(wanted)
            rows = min(len(whole), len(padded))
            padded[:rows] = whole[:rows]
            whole = padded
        return local_part(whole, weight, groups.tensor_rank, groups.tensor_size)

    def flat(self, fragment: Fragment, weight: Tensor, shape: torch.Size, groups: Groups) -> Tensor:
        """Returns the elements of a fragment, [numel] float32 on the CPU; NaN for elements that no file holds.

        If the checkpoint has the same tensor-parallel split, only these elements are read. shape: of the rank's share.
        """
        start, stop = fragment.start, fragment.start + fragment.tensor.numel()
        entry = self.weights[fragment.name]
        wanted = global_shape(weight, groups.tensor_size, shape)
        if entry["shape"] != wanted or self.tensor_size != groups.tensor_size:
            local = self.local(fragment.name, fragment.state, weight, shape, groups)
            return local.flatten()[start:stop]
        dim = split_dim(weight)
        mine = None if dim is None else [list(r) for r in local_ranges(weight, groups.tensor_rank, groups.tensor_size)]
        result = torch.full((stop - start,), torch.nan)
        for piece in self._pieces[fragment.name, fragment.state]:
            first, last = max(start, piece.start), min(stop, piece.start + piece.numel)
            if piece.ranges == mine and first < last:
                result[first - start : last - start] = self._read(piece, first - piece.start, last - piece.start)
        return result

    def _read(self, piece: _Piece, first: int, last: int) -> Tensor:
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(piece.file, framework="pt")
            return self._open[piece.file].get_slice(piece.key)[first:last]
        except OSError as error:
            raise UserError(f"{piece.file} cannot be read: {error}") from error
        except SafetensorError as error:
            raise UserError(f"{piece.file} is broken: {error}") from error


def new_weights(reader: CheckpointReader, model: nn.Module) -> set[str]:
    """Returns the weights of the model's mixers that the checkpoint lacks. They keep their initial values."""
    lacking = {name for name, _ in model.named_parameters()} - reader.weights.keys()
    return set(filter(is_of_mixer, lacking))


def check_shapes(reader: CheckpointReader, model: nn.Module, groups: Groups, vocab_rows: Iterable[str]) -> None:
    """Raises UserError if the checkpoint is of another model. vocab_rows: weights whose number of rows may differ."""
    ours = {name: global_shape(weight, groups.tensor_size) for name, weight in model.named_parameters()}
    ours = {name: shape for name, shape in ours.items() if name not in new_weights(reader, model)}
    theirs = {name: entry["shape"] for name, entry in reader.weights.items()}
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            where = "the checkpoint has" if a is None else "the model has"
            raise UserError(f"{reader.path} is of another model: only {where} {name} {a or b}")
        if a != b and not (name in vocab_rows and a[1:] == b[1:]):
            raise UserError(f"{reader.path} is of another model: {name} is {b} there and {a} here")


@torch.no_grad()
def load_weights(
    reader: CheckpointReader, model: nn.Module, groups: Groups, restarted: frozenset[str] = frozenset()
) -> None:
    """Fills the weights of a model, rounded to their dtype. Must be called before ZeRO divides them.

    restarted: weights that keep the start values of the model.
    """
    new = new_weights(reader, model)
    if new:
        logger.warning("%s has no %s: they have their initial values", reader.path, ", ".join(sorted(new)))
    for name, weight in model.named_parameters():
        if name in new | restarted:
            continue
        weight.copy_(reader.local(name, "weight", weight, weight.shape, groups))


@torch.no_grad()
def load_training_state(
    reader: CheckpointReader, engine: Engine, groups: Groups, restarted: frozenset[str] = frozenset()
) -> None:
    """Fills the fp32 master weights and the optimizer's states, and restores the random number generators.

    The weights of the model must be loaded already. restarted: as for `load_weights`; their states start from zero.
    Raises UserError if elements are missing.
    """
    engine.restore(reader.state.applied_steps)
    reader.restore_rng(groups)
    weights = dict(engine.module.named_parameters())
    new = new_weights(reader, engine.module) | restarted
    for fragment in engine.fragments():
        if fragment.name in new:
            continue
        if fragment.name in reader.weights and not reader.has(fragment.name, fragment.state):
            raise UserError(
                f"{reader.path} has no {fragment.state} of {fragment.name}, which optimizer.name={engine.kind.name} needs: use "
                f"the optimizer of that run, or init_from={reader.path} for a new run from its weights"
            )
        shape = engine.local_shape(fragment.name)
        value = reader.flat(fragment, weights[fragment.name], shape, groups)
        if value.isnan().any():
            raise UserError(f"{reader.path} is not whole: {fragment.state} of {fragment.name} has missing elements")
        fragment.tensor.copy_(value)
