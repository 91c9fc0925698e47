"""Position formulas against transformers'."""

import dataclasses

import pytest
import torch

from ssscale.config.schema import ModelConfig, position_config
from ssscale.layout import PackedLayout
from ssscale.model.positions.alibi import alibi_slopes
from ssscale.model.positions.rope import RopeScaling


@pytest.mark.parametrize("num_heads", [1, 2, 12, 24, 32, 36])
def test_alibi_slopes_are_blooms(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads, range(num_heads), theirs.device), theirs, rtol=1e-6, atol=0)
    if num_heads % 2 == 0:
        half = alibi_slopes(num_heads, range(num_heads // 2, num_heads), theirs.device)
        torch.testing.assert_close(half, theirs[num_heads // 2 :], rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("length", [1000, 2048, 3000, 16_384])
def test_dynamic_base_is_transformers(factor: float, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    position = position_config("rope", scaling=RopeScaling.dynamic_ntk, factor=factor, train_length=2048)
    model = ModelConfig(hidden_size=64, num_heads=2, position=position)
    layout = PackedLayout.from_lengths([3, length])
    base = model.place.scaled_base(32, layout)
    assert isinstance(base, torch.Tensor)
    assert (base[:3] == position.rope.base).all()  # each document by its own length
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_theta=position.rope.base,
        rope_scaling={"rope_type": "dynamic", "factor": factor},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=length)
    ours = base[-1] ** (-torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    growing = dataclasses.replace(layout, final_lengths=torch.tensor([length, length]))
    assert torch.equal(model.place.scaled_base(32, growing)[0], base[-1])
