"""Tells the caches of torch.compile for which version of the operators their code was compiled.

The caches keep the backward graph of a compiled block, with its calls of our operators. They do not look at the formulas of
gradients that made these calls. So after an upgrade, a block could call an operator with the arguments of the version before.
"""

import hashlib
from pathlib import Path

import torch.compiler.config as compiler_config

_digests: dict[str, str] = {}  # by file


def mark(file: str) -> None:
    """Makes the contents of `file`, a module that registers operators, a part of the key of compiled code."""
    before = " ".join(sorted(_digests.values()))
    others = compiler_config.cache_key_tag.removesuffix(before).rstrip()
    _digests[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    compiler_config.cache_key_tag = f"{others} {' '.join(sorted(_digests.values()))}".lstrip()
