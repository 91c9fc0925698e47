"""Functions that torch.compile leaves out, without the import of Dynamo that `torch.compiler.disable` makes."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    PRIVATE_NAMES = True
except ImportError:  # a torch that has changed them
    PRIVATE_NAMES = False

Function = TypeVar("Function", bound=Callable[..., Any])


def breaks_graph(function: Function) -> Function:
    """Makes the graph of a compiled block break at calls of a function, which runs as it would without torch.compile.

    `torch.compiler.disable` does the same, but imports Dynamo and Inductor when it decorates: 2 seconds in each process,
    most of which compile nothing. So this sets what it sets: the mark at which Dynamo stops tracing, and for the
    interpreter, that Dynamo gets neither the frame of the function nor those below it. A wrapper that calls `disable`
    only once Dynamo is there would be a frame of its own, which Dynamo compiles again for each shape of its arguments.

    These names are private to torch, and the same in torch 2.11 and 2.13. Where they are missing, `disable` decorates.
    """
    if not PRIVATE_NAMES:
        return torch.compiler.disable(function)
    marked: Any = function
    marked._torchdynamo_disable = True
    set_code_exec_strategy(marked.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
