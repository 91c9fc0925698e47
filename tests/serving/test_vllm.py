"""The vLLM plugin against transformers: the same exports, the same greedy tokens. Run by `make test-vllm`."""

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.reference import NEW, TEXT, prompts

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = Path(os.environ.get("SSSCALE_EXPORTS", "/nonexistent"))
SERVED = sorted(path.name for path in (EXPORTS / "served").glob("*"))
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # texts longer than a training row
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SMALL = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
# Chunks of 32 tokens, and texts that share their first blocks; or whole prompts and no sharing.
WAYS = {
    "chunked": {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "enable_prefix_caching": True},
    "whole": {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False, "enable_prefix_caching": False},
}
Tokens = list[list[int]]


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    os.environ.update(ENVIRONMENT)
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "ssscale" in found.names, "the plugin is not installed: pip install ssscale/serving/vllm"


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("reference") / "tokens.json"
    modules = {"HF_MODULES_CACHE": str(file.parent / "modules")}
    command = [sys.executable, "-m", "tests.serving.reference", str(EXPORTS / "served"), str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | modules, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text(encoding="utf-8"))


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(folder), **SMALL | {"disable_log_stats": True} | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def generate(llm: Any, rows: Tokens) -> tuple[Tokens, list[int]]:
    """Greedy tokens, and for each row the number of tokens that were found in the cache."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": row} for row in rows], settings, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], [one.num_cached_tokens for one in done]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name: str, way: str, expected: dict[str, Any]) -> None:
    rows, wanted = prompts(), expected[name]["ids"]
    assert len({tuple(row) for row in wanted}) == len(wanted), "the texts do not tell prompts apart"
    with engine(EXPORTS / "served" / name, **WAYS[way]) as llm:
        together, _ = generate(llm, rows)
        assert together == wanted
        alone = [generate(llm, [row]) for row in rows]
        assert [text for (text,), _ in alone] == wanted
        assert any(cached for _, (cached,) in alone) == (way == "chunked")
        if way == "chunked":  # nothing is cached: chunks only
            llm.reset_prefix_cache()
            (text,), (cached,) = generate(llm, rows[:1])
            assert (text, cached) == (wanted[0], 0)


@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("hybrid") or "pn" in name])
def test_two_tensor_parallel_ranks_give_the_same_tokens(
    name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(EXPORTS / "served" / name, tensor_parallel_size=2, **WAYS["chunked"]) as llm:
        assert generate(llm, prompts())[0] == expected[name]["ids"]
