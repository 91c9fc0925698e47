"""AdamW over flat buffers: the gradient norm, then clipping, update and the bf16 copy in one pass over memory."""

from .interface import FlatAdamW, Segment, Settings, clip_factor
from .reference import adamw_reference, summed

__all__ = ["FlatAdamW", "Segment", "Settings", "adamw_reference", "clip_factor", "summed"]
