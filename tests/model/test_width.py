"""Width transfer: initial weights, learning rates, and the coordinate check of muP (arXiv:2203.03466, Appendix D.1).

A few steps of AdamW change activations by as much at every width; without the transfer, by more the wider the model is.
"""

from dataclasses import replace

import pytest
import torch

from ssscale.config import load_config
from ssscale.config.schema import Config, ModelConfig, WidthConfig, position_config
from ssscale.engine.deepspeed import parameter_groups
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups

BASE, STEPS, LR, VOCAB, TOKENS = 64, 6, 2**-7, 256, 128
TRANSFER = WidthConfig(base_hidden_size=BASE, embedding_multiplier=12, residual_multiplier=0.22, attention_scale=1 / 16)


def config_of(width: int, transfer: WidthConfig | None, core: str) -> Config:
    method = "nope" if core == "stickbreaking" else "rope"
    model = ModelConfig(
        num_layers=3,
        hidden_size=width,
        ffn_hidden_size=2 * width,
        num_heads=width // 16,
        vocab_size=VOCAB,
        tie_embeddings=True,
        init_std=0.02 if transfer is None else 0.1,
        depth_scaled_init=transfer is None,
        width=transfer or WidthConfig(),
        mixers=[core],
        position=position_config(method),
    )
    return replace(Config(), model=model)


def changes(width: int, transfer: WidthConfig | None, core: str, groups: Groups) -> dict[str, float]:
    """Root mean square by which each block's output and the logits differ from the start after STEPS steps."""
    config = config_of(width, transfer, core)
    model = Decoder(config.model, groups, TOKENS)
    initialize_weights(model, config.model, groups, seed=3)
    optimizer = torch.optim.AdamW(
        [group | {"lr": LR * group.pop("lr_scale")} for group in parameter_groups(model, config)], betas=(0.9, 0.95)
    )
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))
    layout = PackedLayout.from_lengths([TOKENS // 2, TOKENS // 2])
    seen: dict[str, torch.Tensor] = {}
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, out, name=f"block {index}": seen.update({name: out[0].detach()}))

    def look() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": model(tokens, layout), **seen}

    before = look()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens, layout, tokens.roll(-1)).mean().backward()
        optimizer.step()
    return {name: float((value - before[name]).pow(2).mean().sqrt()) for name, value in look().items()}


def growth(transfer: WidthConfig | None, core: str, groups: Groups) -> dict[str, float]:
    """By how much the changes grow from the base width to 8 times it."""
    narrow, wide = (changes(width, transfer, core, groups) for width in (BASE, 8 * BASE))
    return {name: wide[name] / narrow[name] for name in narrow}


@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
def test_coordinate_check(core: str, groups: Groups) -> None:
    """Seen: 0.75 to 1.00 with the transfer, 2.9 to 782 without."""
    assert all(0.7 < factor < 1.1 for factor in growth(TRANSFER, core, groups).values())
    assert all(factor > 2 for factor in growth(None, core, groups).values())


@pytest.mark.parametrize("divisor", ["matrix_lr_divisor", "logits_divisor", "matrix_init_divisor"])
def test_each_divisor_is_needed(divisor: str, groups: Groups) -> None:
    found = growth(replace(TRANSFER, **{divisor: 1.0}), "softmax", groups)
    assert max(found.values()) > 3, found  # seen: 3.6 to 5.2


def test_what_follows_from_the_base_width(groups: Groups) -> None:
    config = config_of(4 * BASE, TRANSFER, "softmax")
    model = Decoder(config.model, groups, TOKENS)
    initialize_weights(model, config.model, groups, seed=0)
    weights = dict(model.named_parameters())
    assert config.model.logits_divisor == 4
    assert float(weights["embedding.weight"][:VOCAB].std()) == pytest.approx(0.1, rel=0.02)
    for name in ("blocks.0.attention.qkv.weight", "blocks.0.attention.out.weight", "blocks.2.mlp.down.weight"):
        assert float(weights[name].std()) == pytest.approx(0.1 / 2, rel=0.02), name
    scales = {id(p): group["lr_scale"] for group in parameter_groups(model, config) for p in group["params"]}
    assert {name for name, weight in weights.items() if scales[id(weight)] == 1 / 4} == {
        name for name, weight in weights.items() if weight.dim() == 2 and name != "embedding.weight"
    }
    assert {scales[id(weight)] for weight in weights.values()} == {1.0, 1 / 4}


def test_a_given_divisor_holds() -> None:
    config = load_config(["config=1b_sb", "model.width.matrix_lr_divisor=2", "model.width.logits_divisor=3"])
    assert (config.model.m_width, config.model.matrix_lr_divisor, config.model.logits_divisor) == (6, 2, 3)
    assert config.model.matrix_init_divisor == pytest.approx(6**0.5)


def test_the_learning_rate_of_vectors(groups: Groups) -> None:
    config = load_config(["config=tiny_ssmax", "optimizer.vector_lr_multiplier=0.5"])
    model = Decoder(config.model, groups, TOKENS)
    names = {id(weight): name for name, weight in model.named_parameters()}
    halved = [names[id(p)] for g in parameter_groups(model, config) if g["lr_scale"] == 0.5 for p in g["params"]]
    assert len(halved) == 7 + 3  # two norms per layer and the last one; s of each layer
    assert all(name.endswith(("norm.weight", ".s")) for name in halved)
