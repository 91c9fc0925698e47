"""The loss, and the logarithm of its normalizer for z-loss, from logits that the tensor-parallel ranks divide."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import log_normalizer, vocabulary_cross_entropy

IGNORE = -100  # label of a token without a target, as in ssscale/data/batch.py


def without_padding(logits: Tensor, vocab_size: int, groups: Groups) -> Tensor:
    """Returns the logits [T, V_local] in float32, with the padding of the vocabulary set to the lowest value."""
    logits = logits.float()
    first = groups.tensor_rank * logits.shape[-1]
    if vocab_size < logits.shape[-1] * groups.tensor_size:
        column = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(column >= vocab_size, torch.finfo(torch.float32).min)
    return logits


def squared_log_z(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Returns the scalar Σ ln²Z over tokens with a target, Z = Σ exp(logits): z-loss (arXiv:2204.02311, Section 5)."""
    log_z = logits.logsumexp(-1) if groups.tensor_size == 1 else log_normalizer(logits, groups)
    return (log_z.square() * (labels != IGNORE)).sum()


def token_losses(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Returns −log p(label) in nats, or 0 if the label is IGNORE: [T] float32.

    logits: [T, V_local] float32, from `without_padding`. labels: [T] int64.
    """
    if groups.tensor_size == 1:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    losses = vocabulary_cross_entropy(logits, labels.clamp(min=0), groups)
    return losses * (labels != IGNORE)
