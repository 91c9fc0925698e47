"""The attention cores. A new one is a file here and a line in `CORES`."""

from ssscale.attention.base import AttentionCore
from ssscale.attention.softmax import SoftmaxCore
from ssscale.attention.ssmax import SSMaxCore
from ssscale.attention.stickbreaking import StickBreakingCore

CORES: dict[str, type[AttentionCore]] = {
    "softmax": SoftmaxCore,
    "ssmax": SSMaxCore,
    "stickbreaking": StickBreakingCore,
}
