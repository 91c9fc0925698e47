"""What a model folder of transformers must hold to be imported. Needs no torch."""

from pathlib import Path
from typing import Any

from ssscale.errors import UserError
from ssscale.hf.families import FAMILIES, LACKING
from ssscale.json_object import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_folder(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises UserError for another kind of model, or if a file is missing."""
    file = folder / "config.json"
    content = read_json(file)
    kind = content.get("model_type")
    if kind != "ssscale" and kind not in FAMILIES:
        lacking = f": it has {LACKING[kind]}" if kind in LACKING else ""
        raise UserError(f"{file} is of a model_type {kind!r}, not 'ssscale', {', '.join(map(repr, FAMILIES))}{lacking}")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json")
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: weights of other formats are not imported")
    return content
