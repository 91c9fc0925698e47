"""Compares the installed torch and Triton with the versions that the documented figures were measured with."""

import os
import re
from pathlib import Path

import torch
import triton

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints-gpu.txt"
GPU = Path("/dev/nvidia0")


def measured() -> dict[str, str]:
    """Returns the versions of `torch` and `triton` that constraints-gpu.txt pins. Every figure was measured with them.

    The result is empty if the package was installed without the repository.
    """
    text = CONSTRAINTS.read_text() if CONSTRAINTS.is_file() else ""
    return dict(re.findall(r"^(torch|triton)==(\S+)$", text, re.MULTILINE))


def stack_note(device: torch.device) -> str | None:
    """Returns a warning if torch or Triton is not the measured version, or if torch does not see the machine's GPU.

    Returns None if there is nothing to report, or if CUDA_VISIBLE_DEVICES is set to the empty string.
    """
    if device.type == "cuda":
        known, found = measured(), {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
        if not known or found == known:
            return None
        return (
            f"torch {found['torch']} with Triton {found['triton']} is installed, but all tests and measurements on GPUs used"
            f" torch {known['torch']} with Triton {known['triton']} (`make setup STACK=gpu` installs them)"
        )
    if not GPU.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    advice = "the GPU's driver is too old" if torch.version.cuda else "`make setup STACK=gpu` installs one that does"
    return f"this machine has an NVIDIA GPU, but torch {torch.__version__} does not see it: {advice}"
