"""The wheels of parts: the kernels without the trainer, and the plugin for vLLM."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What stands for an environment that has no more than the part needs.
BARE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
"""
KERNELS = """
import torch
from ssscale_kernels import cached, exact, flex
from ssscale_kernels.softmax import softmax_attention
from ssscale_kernels.ssmax import rotary, rotary_attention
from ssscale_kernels.stickbreaking import decode, paged_launch, stickbreaking_attention
from ssscale_kernels.stickbreaking.paged import paged_stickbreaking
from ssscale_kernels.testing import compile_for_hopper
assert rotary.__file__.startswith(sys.argv[1]), rotary.__file__
q, k, v = torch.randn(9, 4, 32), torch.randn(9, 2, 32), torch.randn(9, 2, 32)
bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
o, rest = stickbreaking_attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=5, max_seqlen_k=5)
assert o.isfinite().all() and softmax_attention(q, k, v, cu_seqlens=bounds, max_seqlen=5).isfinite().all()
cache = torch.cat((k, v), -1).view(3, 3, 2, 64)
table, lengths = torch.tensor([[2, 0], [1, 2**30]], dtype=torch.int32), torch.tensor([4, 3], dtype=torch.int32)
o, rest = paged_stickbreaking(q[:7], cache[..., :32], cache[..., 32:], table, torch.tensor([0, 4, 7]), lengths)
assert o.isfinite().all() and not o[0].any()
from ssscale_kernels.softmax.merge import merge_kernel
types = dict.fromkeys(("o_ptr", "lse_ptr", "lse_new_ptr"), "*fp32") | {"o_new_ptr": "*bf16", "num_pairs": "I32"}
assert compile_for_hopper(merge_kernel, types, {"H": 64, "BH": 64}).asm["cubin"]
"""
PLUGIN = """
import ssscale_vllm.config
assert ssscale_vllm.__file__.startswith(sys.argv[1])
assert set(ssscale_vllm.config.MIXERS) == {"softmax", "ssmax", "stickbreaking"}
"""
TRAINER = {"ssscale", "megatron", "deepspeed", "omegaconf", "streaming", "lm_eval"}
PARTS = {
    "ssscale_kernels": ("kernels", KERNELS, TRAINER | {"transformers", "cudnn"}),
    "ssscale_vllm": ("ssscale/serving/vllm", PLUGIN, TRAINER | {"ssscale_kernels", "vllm"}),
}


@pytest.mark.parametrize("package", PARTS)
def test_a_part_works_alone(package: str, tmp_path: Path) -> None:
    folder, code, forbidden = PARTS[package]
    source = tmp_path / "source"
    shutil.copytree(ROOT / folder, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "-q", "wheel", *options], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if name.endswith(".py")}
        content.extractall(tmp_path / "installed")
    inner = ROOT / folder if package == "ssscale_kernels" else ROOT / folder / package
    assert names == {f"{package}/{path.relative_to(inner)}" for path in inner.rglob("*.py")}
    script = BARE.format(forbidden=forbidden) + code
    command = [sys.executable, "-I", "-c", script, str(tmp_path / "installed")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
