"""Runs several small decoders of one shape as one batched computation, for a sweep over learning rates on one GPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from ssscale_kernels.stickbreaking.interface import MAX_HEAD_DIM
from torch import Tensor, nn

from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.model.mixers.base import Tables, rotated
from ssscale.parallel.groups import Groups


class DenseCore(nn.Module):
    """Softmax and stick-breaking attention in plain torch, for heads that are wider than the kernels support.

    All sequences must have the same length. Scores are whole matrices. Stick-breaking computes scores and weights in at
    least float32.
    """

    def __init__(self, core: str) -> None:
        super().__init__()
        if core not in ("softmax", "stickbreaking"):
            raise ValueError(f"heads above {MAX_HEAD_DIM} dimensions need softmax or stickbreaking here, not {core!r}")
        self.kind = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """q, k, v: [T, N, H], sequences of layout.uniform_length tokens in sequence. Returns [T, N, H]."""
        assert layout.uniform_length is not None
        q, k, v = (x.unflatten(0, (-1, layout.uniform_length)).transpose(1, 2) for x in (q, k, v))  # [B, N, L, H]
        if self.kind == "softmax":
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            o = _stickbreaking(q, k, v)
        return o.transpose(1, 2).flatten(0, 1)


def _stickbreaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A_ij = exp(z_ij − Σ_{i ≤ k < j} ln(1 + e^z_kj)) for keys i before the query j   (arXiv:2410.17980, Eq. 12)

    q, k, v: [B, N, L, H]. Returns [B, N, L, H] in v's dtype.
    """
    length = q.shape[-2]
    k, v = k.flip(-2), v.flip(-2)  # nearest key first, so that the sum over nearer keys is a prefix sum
    wide = torch.promote_types(q.dtype, torch.float32)
    z = q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu().flip(-1)
    z = z.masked_fill(hidden, -torch.inf)
    weights = (z + F.logsigmoid(-z).cumsum(-1)).exp()
    return weights.to(v.dtype) @ v


class MixingLayer:
    """The attributes of `ssscale.model.decoder.Attention` that a mixer without parameters reads.

    dense: replaces the mixer, if given.
    """

    def __init__(self, config: ModelConfig, groups: Groups, dense: DenseCore | None) -> None:
        self.dense = dense
        self.groups, self.heads, self.kv_heads, self.head_size = (
            groups,
            config.num_heads,
            config.kv_heads,
            config.head_size,
        )
        self.mixer, self.scale, self.window = config.mixer_of(0), config.width.attention_scale, config.position.window
        self.position = config.place_of(self.mixer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        if self.dense is not None:
            return self.dense(q, k, v, layout)
        found: Tensor = self.mixer.attend(q, k, v, self, layout)
        return found


class Bank(nn.Module):
    """M decoders that differ only in their weights, with the architecture and names of `ssscale.model.decoder.Decoder`.

    weights(name) returns the M parameters of a name. dtype: the dtype of the matrix products. Weights and the residual
    stream are float32. All M models start from the same random weights.
    """

    def __init__(
        self, config: ModelConfig, count: int, groups: Groups, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        super().__init__()
        self.config, self.count, self.dtype, self.device = config, count, dtype, groups.device
        wide = config.head_size > MAX_HEAD_DIM
        self.layer = MixingLayer(config, groups, DenseCore(config.mixers[0]) if wide else None)
        generator = torch.Generator().manual_seed(seed)
        self._run_body: Callable[..., Tensor] = self.body
        self._layouts: dict[tuple[int, int], tuple[PackedLayout, Tables]] = {}
        self.names = []
        for name, shape in _shapes(config).items():
            std = config.init_std
            if name.endswith((".out.weight", ".down.weight")):
                std /= (2 * config.num_layers) ** 0.5
            drawn = torch.randn(shape, generator=generator) * std if len(shape) > 1 else torch.ones(shape)
            copies = nn.ParameterList([nn.Parameter(drawn.to(groups.device, copy=True)) for _ in range(count)])
            self.names.append(name)
            self.add_module(_module(name), copies)

    def weights(self, name: str) -> nn.ParameterList:
        """Return the parameters of this name, one per model."""
        return self.get_submodule(_module(name))

    def of_model(self, index: int) -> list[nn.Parameter]:
        """Return the parameters of one model."""
        return [self.weights(name)[index] for name in self.names]

    def compile_parts(self) -> None:
        """Compile the part whose shapes do not depend on the number of pairs."""
        self._run_body = torch.compile(self.body, dynamic=False)

    def forward(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return logits [M, B, R, V] at positions `rows` [R] of tokens [B, L]. Every model gets the same tokens."""
        return self.read_out(self.hidden(tokens, rows), len(tokens))

    def hidden(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return the output of the last block at `rows`, [M, B · R, D]."""
        batch, length = tokens.shape
        if (batch, length) not in self._layouts:
            layout = PackedLayout.from_lengths([length] * (batch * self.count)).to(tokens.device)
            self._layouts[batch, length] = layout, Tables(self.config.place.rotation(self.config.head_size, layout))
        x = self._run_body(tokens, *self._layouts[batch, length])
        return x.unflatten(1, (batch, length))[:, :, rows].flatten(1, 2)

    def body(self, tokens: Tensor, layout: PackedLayout, tables: Tables) -> Tensor:
        """Return the output of the last block, [M, B · L, D]."""
        size, heads = self.config.head_size, self.config.num_heads
        x = torch.stack([F.embedding(tokens.flatten(), weight) for weight in self.weights("embedding.weight")])
        for layer in range(self.config.num_layers):
            block = f"blocks.{layer}"
            qkv = self._linear(self._norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
            q, k, v = qkv.flatten(0, 1).unflatten(-1, (3 * heads, size)).split(heads, 1)
            q, k = rotated(q, k, tables.rotation, None)
            o = self.layer.attend(q, k, v, layout).flatten(1).unflatten(0, (self.count, -1))
            x = x + self._linear(o, f"{block}.attention.out")
            gate, up = self._linear(self._norm(x, f"{block}.mlp_norm"), f"{block}.mlp.gate_up").chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, f"{block}.mlp.down")
        return x

    def read_out(self, x: Tensor, batch: int) -> Tensor:
        """Return logits [M, B, R, V] from the output of `hidden`."""
        return self._linear(self._norm(x, "norm"), "head").unflatten(1, (batch, -1))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """[M, T, inputs] → [M, T, outputs] in `dtype`."""
        weight = torch.stack(list(self.weights(f"{name}.weight"))).to(self.dtype)
        return x.to(self.dtype) @ weight.transpose(1, 2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = torch.stack(list(self.weights(f"{name}.weight")))
        return F.rms_norm(x, x.shape[-1:], eps=self.config.norm_eps) * weight[:, None]


def _module(name: str) -> str:
    return name.replace(".", "_")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    assert config.kv_heads == config.num_heads, "num_kv_heads must equal num_heads here"
    width, inner, attended = config.hidden_size, config.ffn_hidden_size, config.num_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers):
        shapes |= {
            f"blocks.{layer}.attention_norm.weight": (width,),
            f"blocks.{layer}.attention.qkv.weight": (3 * attended, width),
            f"blocks.{layer}.attention.out.weight": (width, attended),
            f"blocks.{layer}.mlp_norm.weight": (width,),
            f"blocks.{layer}.mlp.gate_up.weight": (2 * inner, width),
            f"blocks.{layer}.mlp.down.weight": (width, inner),
        }
    return shapes | {"norm.weight": (width,), "head.weight": (config.vocab_size, width)}
