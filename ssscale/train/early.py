"""Checks of a run before torch is imported: its folder, its data and the weights from which it starts."""

import os
from contextlib import suppress
from pathlib import Path

from ssscale.config.schema import Config
from ssscale.data import manifest as manifests
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import FIRST_SAVE, find_checkpoint, intact, list_checkpoints, step_of
from ssscale.train.files import may, refusal
from ssscale.train.lock import check_unused
from ssscale.train.run_folder import check_folder
from ssscale.train.same_tokens import check_folders
from ssscale.train.stages import Plan


def check_run(config: Config) -> None:
    """Raises UserError if a run cannot start. `config` has passed `validate`. Nothing is written or downloaded.

    Of the data folders, the one that the run reads first is checked. Those of later stages may not exist yet; if they do,
    their tokenizers are compared.
    """
    folder, plan = Path(config.folder), Plan(config)
    if config.train.profile is not None and config.train.profile > plan.total_steps:
        raise UserError(f"train.profile={config.train.profile} is beyond the last step of the run, {plan.total_steps}")
    check_folder(folder, config)
    check_unused(folder)
    saved: list[Path] = []
    with suppress(OSError, UserError):  # the ranks report such problems together later
        saved = list_checkpoints(folder / "checkpoints")
    if config.init_from is not None and not saved and not os.path.lexists(folder / FIRST_SAVE):
        find_checkpoint(Path(config.init_from), "init_from", newest=True)
    step = next((step_of(path) for path in reversed(saved) if intact(path)), 0)
    now = plan.at(step).stage
    own = plan.configs[now]
    sources = check_data(own)
    check_folders(list(dict.fromkeys(folder for folder in plan.folders if "://" not in folder)))
    if sources and config.train.eval_every:
        _check_validation(own.data.path)
    for index, stage in enumerate(config.train.stages):
        unknown = [name for name in stage.mix or {} if name not in sources]
        if sources and unknown and plan.folders[index] == plan.folders[now]:
            raise UserError(
                f"train.stages.{index}.mix names {unknown[0]!r}, which is not a source of {own.data.path} "
                f"({', '.join(sources)}): use its sources, or null for all in proportion to their sizes"
            )


def _check_validation(folder: str) -> None:
    """Raises UserError if the data folder has no rows for the validation during training."""
    manifest = manifests.read(Path(folder) / manifests.NAME)
    hint = "pack it with a part for validation (--valid-fraction), or set train.eval_every=0"
    manifests.sources(manifest, folder, "valid", hint)


def check_data(config: Config, path: str | None = None, split: str = "train", hint: str | None = None) -> list[str]:
    """Checks a data folder and returns its sources. path: the folder; None is the run's.

    A remote folder is not checked here, and the result is empty. Raises UserError if the folder is missing, does not fit
    the run, or cannot be written, as it must be without a cache.
    """
    data, folder = config.data, path or config.data.path
    if "://" in folder or (path is None and data.cache is not None):
        return []
    manifest = manifests.open_checked(folder, Path(folder), config.model.vocab_size, data.length, hint)
    sources = manifests.sources(manifest, folder, split, hint)
    for source in sources:
        _check_writable(Path(folder) / split / source, split)
    return sources


def _check_writable(shards: Path, split: str) -> None:
    """Raises UserError if shards cannot be decompressed in their folder, because this process may not write there."""
    reason = refusal(shards) if shards.is_dir() else None
    if reason is None:
        return
    locks = list(shards.glob(".*.lock"))  # if it may write to these, all shards may be decompressed already
    if not (locks and all(may(lock, os.R_OK | os.W_OK) for lock in locks)):
        training = "data.cache must name another folder for them, or auto for this node's own disk"
        remedy = training if split == "train" else "name a copy of the data that can be written with data=FOLDER"
        raise UserError(
            f"{shards} cannot be written ({reason}), and shards are decompressed beside their files: {remedy}"
        )
