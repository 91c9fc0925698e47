"""The attention backend of stick-breaking, called as vLLM calls it, against Eqs. 5 and 13 of arXiv:2410.17980.

Run by `make test-vllm`. The code for GPUs runs in Triton's interpreter (backend_interpreted.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.batches import BATCHES, LAYOUTS, Batch, run

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]


def reference(batch: Batch, scale: float, remainder: bool) -> torch.Tensor:
    """Term by term, in float64."""
    rows = []
    for q, k, v in batch.sequences:
        group = q.shape[1] // k.shape[1]
        for row in range(len(q)):
            position = len(k) - len(q) + row
            for head in range(q.shape[1]):
                keys, values = k[:, head // group].double(), v[:, head // group].double()
                left, o = 1.0, torch.zeros(q.shape[2], dtype=torch.float64)
                for i in range(position - 1, -1, -1):
                    beta = torch.sigmoid(scale * q[row, head].double() @ keys[i])
                    o, left = o + left * beta * values[i], left * (1 - beta)
                rows.append(o + left * values[position] * remainder)
    return torch.stack(rows).view(-1, q.shape[1], q.shape[2])


@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BATCHES)
def test_backend_in_float64(name: str, layout: str, remainder: bool) -> None:
    batch = Batch(BATCHES[name])
    got = run(batch, layout, 0.7, remainder)
    assert (got - reference(batch, 0.7, remainder)).abs().max() < 2e-6


def test_the_code_for_gpus_in_the_interpreter(expected: dict[str, Any], vllm_environment: None) -> None:
    """vLLM's write to the cache and our kernels, alone and inside vLLM, whose tokens are those of transformers."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.serving.backend_interpreted", os.environ["SSSCALE_EXPORTS"]]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launches"]["write"] > 0
    assert found["launches"]["paged"] > 0
    assert max(found["errors"].values()) < 2e-6, found["errors"]
    for name, tokens in found["tokens"].items():
        assert tokens == [row[: len(tokens[0])] for row in expected[name]["ids"][1:]], name
