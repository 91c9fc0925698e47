"""`train.deterministic`: results that have the same bits in every run on the same GPUs."""

import logging
import os

logger = logging.getLogger("ssscale")

# cuBLAS reads this when it is first used. Without it, its products may depend on which stream got which workspace.
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic() -> None:
    """Makes torch and cuBLAS choose algorithms that give the same bits in every run.

    Must be called before CUDA is used. The kernels of softmax and SSMax read torch's flag and choose FlashAttention-2
    with deterministic gradients. Operators of torch without a deterministic algorithm raise an error on GPUs.
    """
    import torch

    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    logger.info("train.deterministic: the same bits in every run on the same GPUs and layout")
