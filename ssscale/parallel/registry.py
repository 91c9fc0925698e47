"""Registers operators that keep a compiled block in one graph (`ssscale.parallel.operators` says how)."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ssscale_kernels.versions import mark

mark(__file__)


def new_library(name: str, *sources: str) -> torch.library.Library:
    """Returns a library whose namespace is `name` and a digest of the files `sources` and of this one.

    torch caches compiled graphs on disk by the names of their operators. The digest keeps graphs of another version out.
    """
    content = b"".join(Path(file).read_bytes() for file in (*sources, __file__))
    return torch.library.Library(f"{name}_{hashlib.sha256(content).hexdigest()[:8]}", "DEF")


def register(library: torch.library.Library, schema: str, body: Callable[..., Any]) -> Any:
    """Registers an operator that is replaced by its body wherever it is differentiated or compiled. Returns it.

    Dynamo does not trace the body; AOTAutograd does.
    """
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, body, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops, library.ns), name).default
