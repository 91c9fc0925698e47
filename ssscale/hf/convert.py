"""Conversion of checkpoints to folders that transformers loads, and back.

A folder holds config.json, generation_config.json, the weights as safetensors and the tokenizer. In our own form
(`ssscale`), it also holds the code files that `trust_remote_code=True` runs, and weights have the same names as in the
checkpoint. In float32, weights are bit-identical.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ssscale.config import from_yaml, to_yaml
from ssscale.config.schema import Config
from ssscale.engine.base import Engine, Fragment
from ssscale.errors import UserError
from ssscale.hf.building import building
from ssscale.hf.code import exported_files
from ssscale.hf.families import FAMILIES, check_exportable
from ssscale.hf.folder import INDEX, WEIGHTS, check_folder
from ssscale.hf.plain import (
    family_config,
    from_family,
    native_tree,
    to_family,
)
from ssscale.hf.tokenizer import open_tokenizer, write_json, write_tokenizer
from ssscale.json_object import read_json
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.flops import declared_weights
from ssscale.names import is_plain, leads_out
from ssscale.parallel.groups import Groups, initialize
from ssscale.train.build import build_model
from ssscale.train.checkpoint import CheckpointReader, TrainState, check_shapes
from ssscale.train.checkpoint_folder import check_empty, saved_config
from ssscale.train.save import save_checkpoint
from ssscale.validate import validate

SHARD_BYTES = 5 * 10**9  # limit per file of weights, as in transformers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
META = torch.device("meta")
AUTO = {
    "AutoConfig": "configuration_ssscale.SSScaleConfig",
    "AutoModel": "modeling_ssscale.SSScaleModel",
    "AutoModelForCausalLM": "modeling_ssscale.SSScaleForCausalLM",
    "AutoModelForSequenceClassification": "modeling_ssscale.SSScaleForSequenceClassification",
}
# Key of `model` → its name in config.json. Keys that are missing here have the same name in both.
RENAMED = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}


@dataclass(frozen=True)
class Exported:
    """What an export wrote: bytes of weights, and whether the tokenizer has a pad token of its own."""

    bytes: int
    own_pad: bool


def export_checkpoint(
    checkpoint: Path, out: Path, bos_id: int, eos_id: int, dtype: str = "float32", form: str = "ssscale"
) -> Exported:
    """Writes a checkpoint of any parallel layout as a folder for transformers.

    form: `ssscale`, which takes every model and adds the code of the model; or a family of `ssscale.hf.families`, whose code
    is part of transformers. bos_id, eos_id: the tokens at the beginning and the end of a document. The exported tokenizer
    puts BOS before every text, as in training. Weights are read one at a time. The caller must have verified the
    checksums of the checkpoint (`reading`).

    Raises UserError if the dtype is unknown, the checkpoint has no tokenizer or one with ids beyond the model's vocabulary,
    the family cannot represent the model, or `out` is not empty.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not supported: use {', '.join(DTYPES)}")
    check_empty(out)
    if not (checkpoint / "tokenizer.json").is_file():
        raise UserError(f"checkpoint {checkpoint} has no tokenizer.json: copy the one of its data folder there")
    _check_link(checkpoint / "tokenizer.json", checkpoint)
    config, reader = saved_config(checkpoint), CheckpointReader(checkpoint)
    if form in FAMILIES:
        check_exportable(config.model, form)
    code = exported_files(config.model) if form == "ssscale" else {}
    check_shapes(
        reader, build_model(config, replace(initialize(), device=META), DTYPES[dtype]), initialize(), VOCAB_WEIGHTS
    )
    with building(out) as folder:
        weights = _whole_weights(reader, config, DTYPES[dtype])
        size = _write_weights(weights if form == "ssscale" else to_family(weights, config.model), folder)
        ids = write_tokenizer(checkpoint / "tokenizer.json", folder, config.model.vocab_size, bos_id, eos_id)
        write_json(folder / "generation_config.json", ids)
        for name, text in code.items():
            (folder / name).write_text(text, encoding="utf-8")
        content = hf_config(config, dtype) if form == "ssscale" else family_config(config, form, dtype)
        write_json(folder / "config.json", content | {key: ids[key] for key in ids if key != "suppress_tokens"})
    return Exported(size, ids["pad_token_id"] != eos_id)


def hf_config(config: Config, dtype: str) -> dict[str, Any]:
    """Returns config.json of a run's model, without the token ids."""
    model = asdict(config.model)
    # Values that the schema derives are written as numbers, so that readers of config.json need not derive them.
    model |= {"num_kv_heads": config.model.kv_heads, "head_dim": config.model.head_size}
    for key in ("logits_divisor", "matrix_lr_divisor", "matrix_init_divisor"):
        model["width"][key] = getattr(config.model, key)
    model["mixer"] = {
        name: asdict(mixer) | {"positions": mixer.positions, "windowed": mixer.no_window is None}
        for name, mixer in config.model.used.items()
    }
    place, window = config.model.place, config.model.position.window
    model["position"] = {"method": place.name, "window": window, place.name: asdict(place)}
    return {
        "architectures": ["SSScaleForCausalLM"],
        "model_type": "ssscale",
        "auto_map": AUTO,
        "dtype": dtype,
        "max_position_embeddings": config.data.length,
        "learned": [[name, w.shape, w.start] for name, w in declared_weights(config.model, config.data.length).items()],
        **{RENAMED.get(key, key): value for key, value in model.items()},
    }


def _whole_weights(reader: CheckpointReader, config: Config, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in reader.weights:
        whole = reader.whole(name, "weight")
        if name in VOCAB_WEIGHTS:
            whole = whole[: config.model.vocab_size]
        yield name, whole.to(dtype).contiguous()


def _write_weights(weights: Iterator[tuple[str, Tensor]], out: Path) -> int:
    """Writes one file of weights, or several files and an index if one would exceed SHARD_BYTES.

    Returns the bytes of the weights.
    """
    files: list[dict[str, Any]] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = out / f"part-{len(files):05d}"
        try:
            file.touch()
            mode = file.stat().st_mode
            save_file(shard, file, metadata={"format": "pt"})
            file.chmod(mode)  # safetensors writes files that only their owner can read; this one obeys the umask
        except (OSError, SafetensorError) as error:  # for example a full or read-only disk
            raise UserError(f"{file} cannot be written: {error}") from error
        files.append({"file": file, "names": list(shard), "bytes": sum(w.nbytes for w in shard.values())})
        shard.clear()

    for name, weight in weights:
        if shard and sum(w.nbytes for w in shard.values()) + weight.nbytes > SHARD_BYTES:
            flush()
        shard[name] = weight
    flush()
    total: int = sum(entry["bytes"] for entry in files)
    if len(files) == 1:
        files[0]["file"].rename(out / "model.safetensors")
        return total
    index: dict[str, str] = {}
    for number, entry in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        entry["file"].rename(out / name)
        index |= dict.fromkeys(entry["names"], name)
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    return total


def import_checkpoint(folder: Path, out: Path, groups: Groups) -> Path:
    """Converts a folder to a run with one checkpoint, and returns the checkpoint.

    folder: written by `export_checkpoint`, or a model of one of the FAMILIES. The checkpoint is at step 0 and
    holds weights only, without optimizer state.

    Raises UserError if the folder is damaged or holds another kind of model, if its tokenizer, BOS or EOS have ids beyond
    the vocabulary of the model, if `out` is not empty, or if the checkpoint cannot be written.
    """
    check_empty(out)
    content = check_folder(folder)
    config = _native_config(content, out.name, folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    # In the cache of huggingface_hub, snapshots/REVISION links into blobs/, a sibling of snapshots/.
    _check_link(tokenizer, folder.parent.parent if folder.parent.name == "snapshots" else folder)
    open_tokenizer(tokenizer, config.model.vocab_size, "config.json")
    bounds = _bounds(content, config.model.vocab_size, folder / "config.json")
    model = build_model(config, groups, torch.float32)
    weights = _open_weights(folder)
    _fill(model, weights if content["model_type"] == "ssscale" else from_family(weights, config.model, folder), folder)
    files = {
        "config.yaml": to_yaml(config),
        "tokenizer.json": tokenizer.read_text(encoding="utf-8"),
        "boundaries.json": json.dumps(bounds),
    }
    with building(out) as run:
        save_checkpoint(run / "checkpoints", cast(Engine, WeightsOnly(model)), groups, TrainState(), files)
        (run / "config.yaml").write_text(files["config.yaml"], encoding="utf-8")
    return out / "checkpoints" / "step-00000000"


def _bounds(content: dict[str, Any], vocab_size: int, file: Path) -> dict[str, Any]:
    """Returns the content of boundaries.json. Raises UserError if the embedding has no row for such a token."""
    for key in ("bos_token_id", "eos_token_id"):
        if content.get(key) is not None and content[key] not in range(vocab_size):
            raise UserError(f"{file} has {key}={content[key]!r}, which is not an id below vocab_size={vocab_size}")
    return {"bos_id": content.get("bos_token_id"), "eos_id": content.get("eos_token_id")}


def _check_link(file: Path, folder: Path) -> None:
    """Raises UserError if a file to be copied is a link that leads out of the folder."""
    if leads_out(file, folder):
        raise UserError(f"{file} is a link that leads out of its folder: put the file in its place")


def _native_config(content: dict[str, Any], name: str, file: Path) -> Config:
    if content["model_type"] in FAMILIES:
        return _imported_config(content, name, file)
    names = asdict(Config())["model"]
    model = {key: content[RENAMED.get(key, key)] for key in names if RENAMED.get(key, key) in content}
    if isinstance(model.get("mixer"), dict):
        model["mixer"] = {name: _options(given) for name, given in model["mixer"].items()}
    tree = {"name": name, "model": model, "data": {"length": content.get("max_position_embeddings")}}
    config = from_yaml(yaml.safe_dump(tree), str(file))
    validate(config)
    return config


def _imported_config(content: dict[str, Any], name: str, file: Path) -> Config:
    try:
        model = native_tree(content, file)
        tree = {"name": name, "model": model, "data": {"length": content["max_position_embeddings"]}}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} does not describe a {content['model_type']} model: {error!r}") from error
    config = from_yaml(yaml.safe_dump(tree), str(file))
    validate(config)
    return config


def _options(given: Any) -> Any:
    """Removes the entries of a mixer in config.json that only the exported code needs."""
    return {k: v for k, v in given.items() if k not in ("positions", "windowed")} if isinstance(given, dict) else given


def _open_weights(folder: Path) -> dict[str, Any]:
    """Returns the open file of each weight."""
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else _weight_files(folder / INDEX)
    found: dict[str, Any] = {}
    for name in names:
        try:
            opened = safe_open(folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read: {error}") from error
        found |= dict.fromkeys(opened.keys(), opened)
    return found


def _weight_files(index: Path) -> list[str]:
    """Returns the files that an index names. Raises UserError for a wrong format or a name outside its folder."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{index} has no `weight_map` of weights to files")
    for weight, name in names.items():
        if not is_plain(name):
            raise UserError(
                f"{index} is not to be trusted: {weight} is in {name!r}, which is not the name of a file in its folder"
            )
    return sorted(set(names.values()))


@torch.no_grad()
def _fill(model: nn.Module, weights: dict[str, Any], folder: Path) -> None:
    """Fills a model that is not tensor-parallel with the weights of a folder. Padding rows of the vocabulary become zero."""
    ours = dict(model.named_parameters())
    for name in ours.keys() ^ weights.keys():
        where = "config.json describes" if name in ours else "the folder has"
        raise UserError(f"{folder} is not whole: only {where} {name}")
    for name, weight in ours.items():
        try:
            value = weights[name].get_tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{folder}: {name} cannot be read: {error}") from error
        wanted = list(weight.shape)
        if name in VOCAB_WEIGHTS:
            wanted[0] = model.config.vocab_size
            weight.zero_()
        if list(value.shape) != wanted:
            raise UserError(f"{folder}: {name} is {list(value.shape)}, but config.json describes {wanted}")
        if not value.is_floating_point():
            raise UserError(f"{folder}: {name} has {value.dtype}, which is no type of trained weights")
        if not value.isfinite().all():
            raise UserError(f"{folder}: {name} has NaN or Inf")
        weight[: wanted[0]] = value


@dataclass
class WeightsOnly:
    """The part of an engine's interface that saving a checkpoint uses, for a model without an optimizer."""

    module: nn.Module

    def fragments(self) -> Iterator[Fragment]:
        for name, weight in self.module.named_parameters():
            yield Fragment(name, "weight", 0, weight.detach().flatten(), True)

    def local_shape(self, name: str) -> torch.Size:
        return dict(self.module.named_parameters())[name].shape
