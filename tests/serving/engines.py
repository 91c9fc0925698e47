"""vLLM's engine with tiny exports on the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving.reference import NEW

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = Path(os.environ.get("SSSCALE_EXPORTS", "/nonexistent"))
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # texts longer than a training row
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
    "disable_log_stats": True,
}
# Chunks of 32 tokens, and texts that share their first blocks; or whole prompts and no sharing.
WAYS = {
    "chunked": {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "enable_prefix_caching": True},
    "whole": {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False, "enable_prefix_caching": False},
}
Tokens = list[list[int]]


def by_transformers(kind: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """What transformers computes from the exports of a kind. Kept beside them, for repeated runs."""
    file = EXPORTS / ("tokens.json" if kind == "served" else f"{kind}.json")
    if not file.exists():
        modules = {"HF_MODULES_CACHE": str(scratch)}
        command = [sys.executable, "-m", "tests.serving.reference", str(EXPORTS / kind), str(file)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | modules, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(str(folder), **SMALL | options)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def generate(llm: Any, rows: Tokens, new: int = NEW) -> tuple[Tokens, list[int]]:
    """Greedy tokens, and for each row the number of tokens that were found in the cache."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": row} for row in rows], settings, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], [one.num_cached_tokens for one in done]
