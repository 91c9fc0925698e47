"""Causal softmax attention on packed documents by the fastest kernel that the machine has."""

from .backends import choose_backend, varied_documents
from .interface import softmax_attention

__all__ = ["choose_backend", "softmax_attention", "varied_documents"]
