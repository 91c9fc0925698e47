"""An exported model from its files alone, in float64: one text at a time, by the definitions, without a cache."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class Run:
    """logits [T, V]; states: input of each block, and the normed output of the last; weights: [N, T, T] per block."""

    logits: Tensor
    states: list[Tensor]
    weights: list[Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, base: float) -> Tensor:
    """Rotary positions 0 … T − 1 of x [N, T, H] as complex numbers. arXiv:2104.09864, Eq. 15"""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), theta)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def stick(z: Tensor) -> Tensor:
    """A_ij = β_ij Π_{i<m<j} (1 − β_mj) for query j and key i, from logits z [N, T, T]. arXiv:2410.17980, Eq. 1"""
    columns = []
    left = torch.ones_like(z[..., 0])
    for i in range(z.shape[-1] - 1, -1, -1):
        beta = z[..., i].sigmoid() * (torch.arange(z.shape[-2]) > i)
        columns.append(left * beta)
        left = left * (1 - beta)
    return torch.stack(columns[::-1], -1)


class Reference:
    def __init__(self, folder: Path | str, vocab_size: int | None = None) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())
        weights: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        self.w = {name: weight.double() for name, weight in weights.items()}
        self.real_ids = vocab_size  # later ids are never generated

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.w["embedding.weight"][torch.tensor(tokens)]

    def __call__(self, tokens: Sequence[int] | Tensor) -> Run:
        """tokens: ids, or embeddings [T, D]"""
        c, w = self.config, self.w
        x = tokens.double() if isinstance(tokens, Tensor) else self.embed(tokens)
        heads, kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        states, all_weights = [], []
        for layer in range(c["num_hidden_layers"]):
            states.append(x)
            p, mixer = f"blocks.{layer}", c["mixers"][layer % len(c["mixers"])]
            y = rms(x, w[f"{p}.attention_norm.weight"], c["rms_norm_eps"]) @ w[f"{p}.attention.qkv.weight"].T
            extra = f"{p}.attention.projection_weights"
            if c["qkv_bias"]:
                y = y + torch.cat([w[f"{extra}.{name}_bias"] for name in "qkv"])
            q, k, v = (
                part.unflatten(-1, (-1, size)).transpose(0, 1)
                for part in y.split([heads * size, kv * size, kv * size], -1)
            )
            if c["qk_norm"]:
                q, k = (rms(t, w[f"{extra}.{name}_norm"], c["rms_norm_eps"]) for name, t in (("q", q), ("k", k)))
            if mixer != "stickbreaking":
                q, k = turn(q, c["position"]["rope"]["base"]), turn(k, c["position"]["rope"]["base"])
            z = q @ k.repeat_interleave(heads // kv, 0).mT / size**0.5
            if mixer == "ssmax":
                n = torch.arange(1, len(x) + 1, dtype=torch.float64)
                z = z * w[f"{p}.attention.weights.s"][:, None, None] * n.log()[:, None]
            if mixer == "stickbreaking":
                a = stick(z)
            else:
                a = z.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
            all_weights.append(a)
            mixed = (a @ v.repeat_interleave(heads // kv, 0)).transpose(0, 1).flatten(1)
            x = x + mixed @ w[f"{p}.attention.out.weight"].T
            hidden = rms(x, w[f"{p}.mlp_norm.weight"], c["rms_norm_eps"]) @ w[f"{p}.mlp.gate_up.weight"].T
            gate, up = hidden.chunk(2, -1)
            x = x + (F.silu(gate) * up) @ w[f"{p}.mlp.down.weight"].T
        x = rms(x, w["norm.weight"], c["rms_norm_eps"])
        head = w["embedding.weight"] if c["tie_word_embeddings"] else w["head.weight"]
        return Run(x @ head.T, [*states, x], all_weights)

    def next_scores(self, tokens: Sequence[int]) -> Tensor:
        """[V], −∞ for ids that are never generated"""
        scores = self(tokens).logits[-1]
        scores[self.real_ids :] = -torch.inf
        return scores

    def continued(
        self, prompt: Sequence[int], new: int, choose: Callable[[list[int], Tensor], int] | None = None
    ) -> list[int]:
        """Returns `new` tokens, each chosen from the scores of all tokens before; greedy by default."""
        text = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                scores = self.next_scores(text)
                text.append(int(scores.argmax()) if choose is None else choose(text, scores))
        return text[len(prompt) :]

    def loss(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the mean over all tokens that have a predecessor in their text."""
        losses = [F.cross_entropy(self(text).logits[:-1], torch.tensor(text[1:]), reduction="none") for text in texts]
        return torch.cat(losses).mean()

    def trainable(self) -> dict[str, Tensor]:
        for weight in self.w.values():
            weight.requires_grad_()
        return self.w
