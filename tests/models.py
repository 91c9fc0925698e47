"""The tests' small models, in one place: every mixer with every position method that it takes, hybrids; and packed rows."""

import itertools
from dataclasses import replace

import torch
from torch import nn

from ssscale.config.registry import MIXERS, POSITIONS
from ssscale.config.schema import ModelConfig, mixer_config, position_config
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.mixers.ssmax import Variant
from ssscale.model.positions.rope import RopeScaling

VOCAB = 300
WINDOW, TRAIN_LENGTH = 6, 12


def make_model(
    mixer: str = "ssmax", variant: str = "learned", tied: bool = False, remainder: bool = False
) -> ModelConfig:
    """Two layers of 32 with four query and two key heads; stick-breaking reads every key."""
    options = {"ssmax": {"variant": Variant(variant)}, "stickbreaking": {"remainder": remainder, "skip_below": 0.0}}
    return ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=40,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB,
        tie_embeddings=tied,
        init_std=0.2,
        mixers=[mixer],
        mixer=mixer_config(mixer, **options.get(mixer, {})),
        position=position_config(method_of(mixer)),
    )


def method_of(mixer: str) -> str:
    """Rotary positions where the mixer takes any."""
    return "rope" if "rope" in MIXERS[mixer].positions else "nope"


MODELS = {
    "softmax": make_model("softmax"),
    "ssmax": make_model("ssmax", tied=True),
    "ssmax_pn": make_model("ssmax", "pn"),
    "stickbreaking": make_model("stickbreaking", tied=True),
    "stickbreaking_remainder": make_model("stickbreaking", remainder=True),
}
SETTINGS = {method: position_config(method) for method in POSITIONS}
SETTINGS |= {
    "rope_linear": position_config("rope", scaling=RopeScaling.linear, factor=2.5),
    "rope_ntk": position_config("rope", scaling=RopeScaling.ntk, factor=4.0),
    "rope_dynamic": position_config(
        "rope", scaling=RopeScaling.dynamic_ntk, factor=2.0, train_length=TRAIN_LENGTH, base=100.0
    ),
    # 2.5, 0.8, 0.25, ... turns in 16 tokens: one frequency is kept, one is between, the others are divided.
    "rope_llama3": position_config(
        "rope",
        scaling=RopeScaling.llama3,
        factor=4.0,
        train_length=16,
        base=100.0,
        low_freq_factor=0.5,
        high_freq_factor=2.0,
    ),
}
VARIANTS = {"stickbreaking": ("stickbreaking", "stickbreaking_remainder"), "ssmax": ("ssmax", "ssmax_bias", "ssmax_pn")}
VARIANTS |= {"softmax": ("softmax",)}


def models() -> dict[str, ModelConfig]:
    """Every variant of every mixer with every position method, scaling and window that it allows, and patterns of two."""
    found = {}
    for mixer, (name, setting) in itertools.product(VARIANTS, SETTINGS.items()):
        if setting.method not in MIXERS[mixer].positions:
            continue
        for variant, window in itertools.product(VARIANTS[mixer], (None, WINDOW)):
            plain_rope = setting.rope.scaling == RopeScaling.none
            # One variant is enough for the scalings, which know nothing of mixers.
            if (window and MIXERS[mixer].no_window) or not (plain_rope or variant in ("softmax", "ssmax")):
                continue
            base = MODELS.get(variant) or make_model("ssmax", "bias")
            label = f"{variant}-{name}" + ("-window" if window else "")
            found[label] = replace(base, position=replace(setting, window=window))
    sticks = make_model("stickbreaking", remainder=True)
    found["hybrid-rope"] = replace(sticks, mixers=["stickbreaking", "ssmax"], position=position_config("rope"))
    found["softmax-rope-bias"] = replace(MODELS["softmax"], qkv_bias=True)
    found["ssmax-rope-bias_norm"] = replace(MODELS["ssmax"], qkv_bias=True, qk_norm=True, head_dim=16)
    found["stickbreaking-nope-norm"] = replace(MODELS["stickbreaking"], qk_norm=True)
    found["hybrid-alibi-window"] = replace(
        sticks, mixers=["softmax", "stickbreaking"], position=position_config("alibi", window=WINDOW)
    )
    return found


CASES = models()


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Move what mixers and positions learn, so that each number of it matters."""
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        if hasattr(weight, "declared"):
            weight += 0.3 * torch.rand(weight.shape, generator=generator)


def packed(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, PackedLayout, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 300, (sum(lengths),), generator=generator)
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    return tokens, PackedLayout.from_lengths(lengths), labels
