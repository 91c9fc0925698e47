"""Stick-breaking attention (arXiv:2410.17980): fused kernels, a torch reference, and `merge` for partial results."""

from .interface import stickbreaking_attention
from .reference import merge, stickbreaking_reference

__all__ = ["merge", "stickbreaking_attention", "stickbreaking_reference"]
