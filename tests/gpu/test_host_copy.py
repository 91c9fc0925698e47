"""Results of a GPU are read while it computes what follows them. `pytest -m gpu tests/gpu/test_host_copy.py`: seconds."""

import time

import pytest
import torch

from ssscale.engine.host_copy import HostCopy

pytestmark = pytest.mark.gpu
CYCLES = 1_000_000_000  # about half a second


def test_reading_does_not_wait_for_what_follows() -> None:
    x = torch.arange(1000.0, device="cuda")
    HostCopy(x).read()  # creates the stream and the memory
    torch.cuda.synchronize()
    total = x.square().sum()
    copy = HostCopy(total)
    torch.cuda._sleep(CYCLES)
    began = time.perf_counter()
    value = float(copy.read())
    read = time.perf_counter() - began
    torch.cuda.synchronize()
    assert value == float(total.cpu())
    assert read < 0.1 < time.perf_counter() - began


def test_the_copy_is_that_of_its_moment() -> None:
    for i in range(100):
        x = torch.full((257,), float(i), device="cuda")
        copy = HostCopy(x)
        del x  # its memory may serve the next one
        y = torch.full((257,), -1.0, device="cuda")
        assert copy.read().tolist() == [float(i)] * 257
        assert float(y.sum()) == -257
