"""The check with which benchmarks of kernels begin."""

import sys

import torch


def require_gpu() -> None:
    """Ends the command with one sentence on stderr and exit code 2 if torch finds no CUDA GPU."""
    if not torch.cuda.is_available():
        print(f"error: this command needs a CUDA GPU, and torch {torch.__version__} finds none", file=sys.stderr)
        raise SystemExit(2)
