"""From a checkpoint of one model to the beginning of another: the same weights, or mixers that begin from others."""

import logging

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


@torch.no_grad()
def load_switched(reader: CheckpointReader, model: nn.Module, target: ModelConfig, groups: Groups) -> None:
    """Fill a model's weights from a checkpoint of the same model, or of one from whose mixers this one's can begin.

    What is new starts where `Mixer.begun` says, which changes the logits least. An option that is no weight (SSMax's fixed s)
    is the target's own, as ever. Raises UserError where the models differ otherwise.
    """
    source = saved_config(reader.path)
    for old, new in zip(source.model.layer_mixers, target.layer_mixers):
        if old.name != new.name and new.begins_from != old.name:
            raise UserError(
                f"{reader.path} has {old.name} where model.mixers={target.mixers} has {new.name}, which "
                + (f"begins from {new.begins_from} only" if new.begins_from else "begins from no other mixer")
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
