"""The attention backend of stick-breaking, called as vLLM calls it, against Eqs. 1 and 13 of arXiv:2410.17980.

Run by `make test-vllm`. The code for GPUs runs in Triton's interpreter (backend_interpreted.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serving.batches import BATCHES, LAYOUTS, Batch, build, prepare, run

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


def mixer() -> Any:
    from ssscale_vllm.mixers.stickbreaking import StickBreaking

    return StickBreaking("stickbreaking", (), False, remainder=False, skip_below=0.0)


REFUSALS = {
    "layers of stickbreaking need the package ssscale-kernels": {"find_spec": lambda _: None},
    "can be served on cpu and cuda, not on xpu": {
        "current_platform": SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="xpu")
    },
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_where_the_backend_cannot_run(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssscale_vllm import attention
    from ssscale_vllm.backends.stickbreaking import StickBreakingBackend

    assert attention._backend(mixer()) is StickBreakingBackend
    for name, value in REFUSALS[sentence].items():
        monkeypatch.setattr(attention, name, value)
    with pytest.raises(ValueError, match=sentence):
        attention._backend(mixer())


@pytest.mark.parametrize(
    "option",
    [
        {"sliding_window": 8},
        {"alibi_slopes": [0.5]},
        {"kv_cache_dtype": "fp8"},
        {"logits_soft_cap": 30.0},
        {"attn_type": "encoder"},
        {"kv_sharing_target_layer_name": "first"},
        {"head_size": 136},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_the_operator_does_not_compute_is_refused(option: dict[str, Any]) -> None:
    from ssscale_vllm.backends.stickbreaking import StickBreakingImpl

    usual = {"num_heads": 4, "head_size": 64, "scale": 0.1, "remainder": False, "skip_below": 0.0}
    StickBreakingImpl(**usual)
    with pytest.raises(ValueError, match="stick-breaking attention cannot be served with"):
        StickBreakingImpl(**usual | option)


def test_no_step_reads_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the builder nor a layer waits for a GPU, and bounds come from vLLM."""
    from ssscale_kernels.stickbreaking import paged

    calls = []

    def operator(o: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return o.new_zeros(o.shape[:2])

    def read(*_: Any) -> Any:
        raise AssertionError("a value was read back")

    batch = Batch(BATCHES["chunks"])
    common, impl, cache, q = prepare(batch, "tokens first", 0.7, False)
    monkeypatch.setattr(paged, "paged_op", operator)
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, read)
    metadata = build(common)
    impl.forward(None, q, None, None, cache, metadata, torch.empty_like(q))
    monkeypatch.undo()
    ((*_, longest, most, scale, skip_below, remainder),) = calls
    assert (longest, most, scale, skip_below, remainder) == (40, 170, 0.7, 0.0, False)


def test_a_captured_graph_serves_the_longest_texts() -> None:
    common, *_ = prepare(Batch(BATCHES["decode"]), "tokens first", 0.7, False)
    metadata = build(common, capture=True)
    assert metadata.max_length == 5000
    assert metadata.lengths.tolist() == [1] * 4
    assert metadata.max_new == 1


def test_the_code_for_gpus_in_the_interpreter(expected: dict[str, Any], vllm_environment: None) -> None:
    """vLLM's write to the cache and our kernels, alone and inside vLLM, whose tokens are those of transformers."""
    environ = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.serving.backend_interpreted", os.environ["SSSCALE_EXPORTS"]]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launches"]["write"] > 0
    assert found["launches"]["paged"] > 0
    assert max(found["errors"]["float32"].values()) < 2e-6, found["errors"]
    # One unit in the last place of results up to 4.
    assert max(found["errors"]["float16"].values()) <= 2**-9, found["errors"]
    for name, tokens in found["tokens"].items():
        assert tokens == [row[: len(tokens[0])] for row in expected[name]["ids"][1:]], name
