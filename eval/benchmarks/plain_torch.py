"""Measures a training step of a simple plain torch model of the same shape, as the baseline of launch/benchmark.py.

It has bf16 weights and optimizer state, torch.compile of the whole model, cuDNN attention and fused AdamW, but no
DeepSpeed, no Megatron-core and no data loading. `python -m eval.benchmarks.plain_torch CONFIG MICROBATCH ACCUMULATION
STEPS [masters] [key=value ...]` prints one JSON line. With `masters`, gradients are clipped, and master weights and
optimizer state are fp32.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssscale.config import load_config
from ssscale.config.registry import POSITIONS
from ssscale.config.schema import ModelConfig
from ssscale.model.flops import PEAK_FLOPS, flops_per_token


class PlainBlock(nn.Module):
    """A block of pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.ffn_hidden_size
        self.heads = config.num_heads
        self.norm1, self.norm2 = nn.RMSNorm(size), nn.RMSNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, size = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, size // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(rows, length, size))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """A softmax model with RoPE in a config's shape. The vocabulary is padded to a multiple of 128 for tensor cores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        vocab = -(-config.vocab_size // 128) * 128
        self.embedding = nn.Embedding(vocab, config.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, vocab, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=config.init_std)

    def forward(self, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def update_masters(weights: list[Tensor], masters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Clips the gradients of bf16 weights to norm 1, updates fp32 master weights and copies them to the weights."""
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    for weight, master in zip(weights, masters, strict=True):
        assert weight.grad is not None
        master.grad = weight.grad.float()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        torch._foreach_copy_(weights, masters)


def measure(
    name: str, microbatch: int, accumulation: int, steps: int, keys: Sequence[str] = (), masters: bool = False
) -> dict[str, float]:
    """Times training steps of a run file with further keys. masters: whether to clip and to keep fp32 master weights.

    Returns tokens per second (median of the steps after the second), MFU with all and with only causal attention FLOPs,
    peak memory in GiB, and seconds until the first step has ended.
    """
    config = load_config([f"config={name}", *keys])
    model, length = config.model, config.data.length
    began = time.perf_counter()
    decoder = PlainDecoder(model).cuda().bfloat16()
    weights = list(decoder.parameters())
    updated = [weight.detach().float().requires_grad_() for weight in weights] if masters else weights
    optimizer = torch.optim.AdamW(updated, lr=1e-5, fused=True)
    compiled = torch.compile(decoder)
    theta = POSITIONS["rope"]().base ** -(torch.arange(0, model.head_size, 2, device="cuda") / model.head_size)
    angle = torch.outer(torch.arange(length, device="cuda"), theta).repeat(1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    tokens = torch.randint(0, model.vocab_size, (microbatch, length), device="cuda")
    seconds = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for step in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(accumulation):
                (compiled(tokens, tokens.roll(-1, 1), cos, sin) / accumulation).backward()
            if masters:
                update_masters(weights, updated, optimizer)
            else:
                optimizer.step()
            decoder.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if step == 0:
                first = time.perf_counter() - began
    rate = microbatch * length * accumulation / statistics.median(seconds[2:])
    return {
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(model, length, causal_half=False) / PEAK_FLOPS,
        "mfu_causal": rate * flops_per_token(model, length, causal_half=True) / PEAK_FLOPS,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_s": first,
    }


if __name__ == "__main__":
    if len(sys.argv) < 5:
        print(
            "error: usage: plain_torch.py CONFIG MICROBATCH ACCUMULATION STEPS [masters] [key=value ...]",
            file=sys.stderr,
        )
        sys.exit(2)
    name, *numbers = sys.argv[1:5]
    microbatch, accumulation, steps = map(int, numbers)
    keys = [argument for argument in sys.argv[5:] if "=" in argument]
    print(json.dumps(measure(name, microbatch, accumulation, steps, keys, masters="masters" in sys.argv[5:])))
