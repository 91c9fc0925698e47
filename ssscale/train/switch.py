"""Initializes a model from a checkpoint of the same model or of a model with other mixers."""

import logging
from pathlib import Path

import torch
from torch import nn

from ssscale.config.schema import ModelConfig
from ssscale.errors import UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.flops import declared_weights
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, check_shapes, load_weights, new_weights
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.stages import begun_model

logger = logging.getLogger("ssscale")


def check_heads(checkpoint: Path, target: ModelConfig) -> None:
    """Raises UserError if a checkpoint divides the same shapes into other heads."""
    source = saved_config(checkpoint).model
    for key in ("num_heads", "num_kv_heads"):
        theirs, ours = (getattr(model, key) or model.num_heads for model in (source, target))
        if theirs != ours:
            raise UserError(f"{checkpoint} has {key}={theirs}, and model.{key} is {ours} here")


@torch.no_grad()
def load_switched(reader: CheckpointReader, model: nn.Module, target: ModelConfig, groups: Groups) -> None:
    """Fills a model's weights from a checkpoint of the same model, or of one whose mixers its own mixers can begin from.

    New weights start with the values that `Mixer.begun` gives, which change the logits the least. Options that are not
    weights (such as SSMax's fixed s) are those of `target`. Raises UserError if the models differ in any other way.
    """
    source = saved_config(reader.path)
    check_heads(reader.path, target)
    for old, new in zip(source.model.layer_mixers, target.layer_mixers):
        if old.name != new.name and new.begins_from != old.name:
            raise UserError(
                f"{reader.path} has {old.name} where model.mixers={target.mixers} has {new.name}, which "
                + (f"can only begin from {new.begins_from}" if new.begins_from else "cannot begin from another mixer")
            )
    check_shapes(reader, model, groups, VOCAB_WEIGHTS)
    load_weights(reader, model, groups)
    if source.model.num_layers != target.num_layers or source.model.mixers == target.mixers:
        return
    begun = begun_model(source.model, target, source.data.length)
    starts = declared_weights(begun, source.data.length)
    names = new_weights(reader, model)
    for name, weight in model.named_parameters():
        if name in names:
            weight.fill_(starts[name].start)
    changed = [new for old, new in zip(source.model.layer_mixers, begun.layer_mixers) if old.name != new.name]
    for mixer in dict.fromkeys(changed):
        logger.info(
            "%s: from %s to %s", reader.path, mixer.begins_from, mixer if names else target.mixer_called(mixer.name)
        )
