"""The loss of each token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import vocabulary_cross_entropy

IGNORE = -100  # the label of a token without a target: the last one of a document


def token_losses(logits: Tensor, labels: Tensor, vocab_size: int, groups: Groups) -> Tensor:
    """−log p(label) in nats, 0 where the label is IGNORE.

    logits: [T, V_local], this rank's part of the padded vocabulary; labels: [T] int64. Returns [T] float32.
    """
    logits = logits.float()
    first = groups.tensor_rank * logits.shape[-1]
    if vocab_size < logits.shape[-1] * groups.tensor_size:
        column = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(column >= vocab_size, torch.finfo(torch.float32).min)
    if groups.tensor_size == 1:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    losses = vocabulary_cross_entropy(logits, labels.clamp(min=0))
    return losses * (labels != IGNORE)
