"""From a checkpoint of one model to the beginning of another: the same weights, or softmax to SSMax."""

import logging

import torch
from torch import nn

from ssscale.config.schema import Core, ModelConfig
from ssscale.errors import UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, check_shapes, load_weights, new_weights
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.stages import switched_model

logger = logging.getLogger("ssscale")


@torch.no_grad()
def load_switched(reader: CheckpointReader, model: nn.Module, target: ModelConfig, groups: Groups) -> None:
    """Fill a model's weights from a checkpoint of the same model, or of a softmax model where this one is SSMax.

    What is new makes the first logits most like softmax's: `switched_model`'s s, b = 0, p_n = 1. Under `fixed` s is
    target.attention.ssmax_scale, as ever. Raises UserError where the models differ otherwise.
    """
    source = saved_config(reader.path)
    before, after = source.model.attention.core, target.attention.core
    if before is Core.ssmax and after is not Core.ssmax:
        raise UserError(
            f"{reader.path} is an ssmax model, whose s has no place in model.attention.core={after.value}: "
            "a switch goes from softmax to ssmax"
        )
    check_shapes(reader, model, groups, VOCAB_WEIGHTS)
    load_weights(reader, model, groups)
    if before is not Core.softmax or after is not Core.ssmax:
        return
    switched = switched_model(target, source.data.length).attention.ssmax_scale
    new = new_weights(reader, model)
    for name, weight in model.named_parameters():
        if name in new:
            weight.fill_({"s": switched, "b": 0.0, "pn": 1.0}[name.rpartition(".")[2]])
    scale = switched if new else target.attention.ssmax_scale
    logger.info("%s: from softmax to ssmax (%s) with s = %.4f", reader.path, target.attention.ssmax.value, scale)
