"""Rotary positions and Scalable-Softmax's factor around softmax attention, from the fused projection of q, k and v."""

from .interface import rotary_attention
from .reference import query_factor, rotary_attention_reference, rotate

__all__ = ["query_factor", "rotary_attention", "rotary_attention_reference", "rotate"]
