"""`parallel.free_multiprocessors`: what is refused, and on a GPU the number of thread blocks of a matrix product."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssscale.errors import UserError
from ssscale.parallel.multiprocessors import LIMIT, leave_free, limit_exchanges

PRODUCT = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile
from ssscale.parallel.multiprocessors import leave_free

leave_free(int(sys.argv[1]))
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
x @ x.T
with profile(activities=[ProfilerActivity.CUDA]) as trace:
    x @ x.T
    torch.cuda.synchronize()
trace.export_chrome_trace(sys.argv[2])
"""


def test_zero_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    limit_exchanges(0)
    leave_free(0)
    assert torch._C._get_sm_carveout_experimental() is None


def test_without_a_gpu_or_with_another_limit_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"parallel\.free_multiprocessors=8 needs a GPU"):
        limit_exchanges(8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(LIMIT, "4")
    limit_exchanges(4)
    with pytest.raises(UserError, match=f"free_multiprocessors=8 and {LIMIT}=4 in the environment differ"):
        limit_exchanges(8)


def blocks_of_a_product(number: int, folder: Path) -> int:
    """The thread blocks of a matrix product, with `number` multiprocessors left free."""
    file = folder / f"{number}.json"
    subprocess.run([sys.executable, "-c", PRODUCT, str(number), str(file)], check=True)
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    longest = max((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["dur"])
    return math.prod(longest["args"]["grid"])


@pytest.mark.gpu
def test_products_leave_multiprocessors_free(tmp_path: Path) -> None:
    have = torch.cuda.get_device_properties().multi_processor_count
    assert blocks_of_a_product(0, tmp_path) > have - 8
    assert blocks_of_a_product(8, tmp_path) <= have - 8
