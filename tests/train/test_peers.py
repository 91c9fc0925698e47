"""Which errors of a rank's connections mean that another rank is gone, and which do not."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ssscale.config import load_config
from ssscale.errors import OUT_OF_MEMORY
from ssscale.train.faults import mishap, out_of_memory
from ssscale.train.peers import Peers, Where


def where() -> Where:
    return Where(load_config(["config=tiny_softmax"]), step=3, phase="optimizer", held=0)


@pytest.mark.parametrize("last", ["Cuda failure 2 'out of memory'", "Failed to CUDA calloc async 608 bytes"])
def test_nccl_runs_out_of_memory(last: str) -> None:
    """NCCL allocates buffers at the first exchange. Its error is not one about another rank."""
    stop = out_of_memory(
        dist.DistBackendError(f"NCCL error, unhandled cuda error\nLast error:\n{last}"), "rank 0", where()
    )
    assert stop is not None
    assert stop.code == OUT_OF_MEMORY
    assert "use train.microbatch below" in str(stop)
    assert out_of_memory(dist.DistBackendError("NCCL error, Connection reset"), "rank 0", where()) is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.AcceleratorError("CUDA error: out of memory"), "out of GPU memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "out of GPU memory",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of GPU memory"),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), "the GPU failed: .* look for Xid"),
        (
            torch.AcceleratorError("CUDA error: device-side assert triggered"),
            "an error of the GPU: CUDA error: device-",
        ),
        (RuntimeError("the size of a must match"), None),
    ],
)
def test_errors_of_a_gpu(error: Exception, sentence: str | None) -> None:
    memory = out_of_memory(error, "rank 0", where())
    found = str(memory) if memory else mishap(error)
    assert found is None if sentence is None else re.search(sentence, str(found))


def test_one_rank_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of NCCL in a run of one process cannot mean that another rank is gone."""
    monkeypatch.setattr("ssscale.train.peers.gather_json", lambda value: [value])
    peers = Peers(tmp_path, SimpleNamespace(rank=0, world_size=1))  # type: ignore[arg-type]
    with pytest.raises(dist.DistBackendError), peers.telling(where):
        raise dist.DistBackendError("NCCL error, unhandled cuda error")
