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
SERVED, PLAIN = (sorted(path.name for path in (EXPORTS / kind).glob("*")) for kind in ("served", "plain"))
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


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    os.environ.update(ENVIRONMENT)
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "ssscale" in found.names, "the plugin is not installed: pip install ssscale/serving/vllm"


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return by_transformers("served", tmp_path_factory.mktemp("modules"))


def by_transformers(kind: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """What transformers finds for the exports of a kind. Kept beside them, for repeated runs."""
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


@pytest.mark.parametrize("name", ["hybrid-alibi", "hybrid-pn-window", "softmax-bias", "ssmax-bias-norm"])
def test_two_tensor_parallel_ranks_give_the_same_tokens(
    name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(EXPORTS / "served" / name, tensor_parallel_size=2, **WAYS["chunked"]) as llm:
        assert generate(llm, prompts())[0] == expected[name]["ids"]


@pytest.mark.parametrize("name", PLAIN)
def test_vllm_itself_serves_exports_of_transformers_own_classes(name: str, tmp_path: Path) -> None:
    """Up to the length of training: vLLM has no rotations for later positions."""
    length = json.loads((EXPORTS / "plain" / name / "config.json").read_text())["max_position_embeddings"]
    wanted = by_transformers("plain", tmp_path)[name]["ids"]
    pairs = [(row, ids) for row, ids in zip(prompts(), wanted, strict=True) if len(row) + NEW <= length]
    assert len(pairs) >= 2
    with engine(EXPORTS / "plain" / name, max_model_len=length) as llm:
        assert generate(llm, [row for row, _ in pairs])[0] == [ids for _, ids in pairs]


def log_probabilities(name: str, dtype: str) -> torch.Tensor:
    """Of each prompt's next token, [prompts, V]."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    with engine(EXPORTS / "served" / name, **WAYS["whole"], dtype=dtype, max_logprobs=-1) as llm:
        done = llm.generate([{"prompt_token_ids": row} for row in prompts()], settings, use_tqdm=False)
    found = [one.outputs[0].logprobs[0] for one in done]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in found])


def test_log_probabilities_are_those_of_transformers(expected: dict[str, Any]) -> None:
    """Greedy tokens do not depend on the divisor of the logits."""
    wanted = torch.tensor(expected["softmax-width"]["float32"])
    assert (log_probabilities("softmax-width", "float32") - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["ssmax", "stickbreaking-remainder", "hybrid-pn-window"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, expected: dict[str, Any]) -> None:
    exact, theirs = (torch.tensor(expected[name][dtype]) for dtype in ("float32", "bfloat16"))
    ours = log_probabilities(name, "bfloat16")
    assert (ours - exact).abs().mean() < 2 * (theirs - exact).abs().mean()


def test_remote_code_changes_nothing(expected: dict[str, Any]) -> None:
    with engine(EXPORTS / "served" / "hybrid", trust_remote_code=True, **WAYS["whole"]) as llm:
        assert generate(llm, prompts())[0] == expected["hybrid"]["ids"]


def test_ids_without_an_entry_in_the_tokenizer_are_not_generated(expected: dict[str, Any]) -> None:
    folder = EXPORTS / "served" / "spare-ids"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] > 1000
    assert max(token for row in expected["spare-ids"]["ids"] for token in row) < 257


@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 9), (5, 1), (6, 4)])
def test_break_stick_in_float64(first: int, rows: int, remainder: bool) -> None:
    """Eqs. 5 and 13 of arXiv:2410.17980, term by term."""
    from ssscale_vllm.backends.stickbreaking_cpu import break_stick

    generator = torch.Generator().manual_seed(first)
    q, k, v = (torch.randn(h, n, 8, generator=generator) for h, n in ((4, rows), (2, 10), (2, 10)))
    got = break_stick(q, k, v, first, 0.7, remainder)
    for head in range(4):
        keys, values = k[head // 2].double(), v[head // 2].double()
        for row in range(rows):
            left, o = 1.0, torch.zeros(8, dtype=torch.float64)
            for i in range(first + row - 1, -1, -1):
                beta = torch.sigmoid(0.7 * q[head, row].double() @ keys[i])
                o, left = o + left * beta * values[i], left * (1 - beta)
            o = o + left * values[first + row] * remainder
            assert (got[head, row] - o).abs().max() < 2e-6


REFUSALS = {"softmax-fire": "FIRE computes a bias", "softmax-dynamic": "dynamic_ntk rotates by a text's final length"}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_served_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSALS[name]), engine(EXPORTS / "refused" / name):
        pass


OPTIONS = {
    "quantization=.* is not supported": {"quantization": "fp8", "dtype": "bfloat16"},
    "divides? the 4 heads|divisible by": {"tensor_parallel_size": 3},
    "logit_cap=30 is not known": {"hf_overrides": {"logit_cap": 30}},
    "cannot be served with --kv-cache-dtype fp8|FP8 KV cache": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("sentence", OPTIONS)
def test_options_that_would_be_ignored_are_refused(sentence: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=sentence):  # noqa: SIM117
        with engine(EXPORTS / "served" / "stickbreaking", **OPTIONS[sentence]):
            pass


@pytest.mark.parametrize("damage", ["missing", "unknown"])
def test_a_folder_with_other_weights_is_refused(damage: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(EXPORTS / "served" / "ssmax", tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    s = weights.pop("blocks.1.attention.weights.s")
    if damage == "unknown":
        weights |= {"blocks.1.attention.weights.s": s, "blocks.1.attention.weights.z": s.clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = {"missing": "has no weight blocks.1.attention.weights.s", "unknown": "has a weight .*weights.z"}[damage]
    with pytest.raises(ValueError, match=wanted), engine(folder):
        pass


@pytest.mark.parametrize("command", ["serve", "module"])
def test_a_server_answers_with_the_tokens_of_transformers(
    command: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """The two commands of the guide, and a request by HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = {"serve": "hybrid", "module": "ssmax-bias"}[command]
    folder = str(EXPORTS / "served" / name)
    start = {
        "serve": [str(Path(sys.executable).with_name("vllm")), "serve", folder],
        "module": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder],
    }[command]
    if command == "serve":
        give_vllm_a_version(tmp_path)
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(tmp_path),
    }
    environ = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT} | own
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*start, "--port", str(port), "--dtype", "float32"],
            cwd=tmp_path,
            env=environ,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        body = {"model": folder, "prompt": TEXT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        answer = post(f"http://127.0.0.1:{port}/v1/completions", body | {"return_token_ids": True})
        assert answer["choices"][0]["token_ids"] == expected[name]["text"]
        assert answer["usage"]["prompt_tokens"] == len(TEXT) + 1  # a text begins with BOS
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def give_vllm_a_version(folder: Path) -> None:
    """The command `vllm` asks for the version of the distribution vllm, and vllm-cpu 0.32.0 has another name."""
    if "vllm" not in {found.name for found in importlib.metadata.distributions()}:
        (folder / "vllm-0.32.0.dist-info").mkdir()
        (folder / "vllm-0.32.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
        )


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 280
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(body).encode()
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
