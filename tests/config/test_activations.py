"""The activation arithmetic against what autograd really keeps of our decoder's compiled blocks."""

import pytest
import torch

from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.schema import (
    AttentionConfig,
    Config,
    Core,
    DataConfig,
    ModelConfig,
    PositionConfig,
    PositionMethod,
    TrainConfig,
)
from ssscale.train.estimate import activation_bytes_per_token

TOKENS = 256


def kept_bytes_per_token(model: ModelConfig, groups: Groups) -> float:
    torch._dynamo.reset()
    decoder = Decoder(model, groups, TOKENS, dtype=torch.bfloat16)
    initialize_weights(decoder, model, groups, 0)
    for block in decoder.blocks:
        # The partitioner that decides what backward keeps, without code generation.
        block.compile(backend="aot_eager_decomp_partition")
    ours = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, so that its address is not used again
        return tensor

    tokens = torch.randint(0, model.vocab_size, (TOKENS,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(tokens, PackedLayout.from_lengths([TOKENS]), tokens)
    return sum(size for size, _ in kept.values()) / TOKENS


@pytest.mark.parametrize("core", [Core.ssmax, Core.stickbreaking])  # softmax keeps what ssmax does
def test_each_layer_keeps_what_the_formula_says(core, groups):
    method = PositionMethod.nope if core is Core.stickbreaking else PositionMethod.rope

    def model(layers: int) -> ModelConfig:
        return ModelConfig(
            num_layers=layers,
            hidden_size=64,
            ffn_hidden_size=192,
            num_heads=4,
            vocab_size=128,
            attention=AttentionConfig(core=core),
            position=PositionConfig(method=method),
        )

    def formula(layers: int) -> float:
        return activation_bytes_per_token(
            Config(model=model(layers), data=DataConfig(length=TOKENS), train=TrainConfig())
        )

    kept = kept_bytes_per_token(model(2), groups) - kept_bytes_per_token(model(1), groups)
    assert kept == pytest.approx(formula(2) - formula(1), rel=0.05)
