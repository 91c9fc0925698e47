"""The GPUs of this machine that a command may use."""

import os
import subprocess
from dataclasses import dataclass

from ssscale.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """name: for CUDA_VISIBLE_DEVICES, or None for the CPU. gib: its memory."""

    name: str | None
    gib: float


def gpus_here(chosen: str | None) -> list[Gpu]:
    """Return the GPUs that are visible, or those of --gpus. Without any, the CPU. Raises UserError for unknown ones."""
    query = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    found = [Gpu(name.strip(), float(mib) / 1024) for name, _, mib in (line.partition(",") for line in lines)]
    if chosen is None:
        visible = visible_gpus() if found else []
        return [gpu for gpu in found if gpu.name in visible] or found or [Gpu(None, float("inf"))]
    names = {gpu.name: gpu for gpu in found}
    if unknown := [name for name in chosen.split(",") if name not in names]:
        raise UserError(f"--gpus={chosen}: this machine has no GPU {unknown[0]}")
    return [names[name] for name in chosen.split(",")]


def visible_gpus() -> list[str]:
    """Return the names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use."""
    import torch  # takes seconds, which --help and mistakes do not wait for

    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names or [str(index) for index in range(torch.cuda.device_count())]
