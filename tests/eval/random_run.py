"""A run of random weights, for commands that evaluate one."""

import dataclasses
import json
from pathlib import Path

from eval.checkpoint.text import TextTokenizer
from ssscale.config import to_yaml
from ssscale.config.schema import Config, DataConfig, position_config
from ssscale.hf.convert import WeightsOnly
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint

LENGTH = 320  # GSM8K generates 256 tokens


def write_run(folder: Path, config: Config, core: str, groups: Groups, tokenizer: TextTokenizer, file: str) -> Decoder:
    """A run of random weights, large enough that predictions are far from uniform."""
    method = "nope" if core == "stickbreaking" else "rope"
    model = dataclasses.replace(config.model, mixers=[core], position=position_config(method))
    config = dataclasses.replace(config, model=model, data=DataConfig(config.data.path, LENGTH))
    decoder = Decoder(config.model, groups, LENGTH)
    initialize_weights(decoder, config.model, groups, seed=5)
    bounds = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    files = {
        "config.yaml": to_yaml(config),
        "tokenizer.json": Path(file).read_text(),
        "boundaries.json": json.dumps(bounds),
    }
    save_checkpoint(folder / "checkpoints", WeightsOnly(decoder), groups, TrainState(step=1), files)
    return decoder.eval().requires_grad_(False)
