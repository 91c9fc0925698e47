"""The small models that are compiled or whose activations are counted, and the length of their row."""

from ssscale.config.schema import ModelConfig, position_config

TOKENS = 256


def make_model(core: str, layers: int) -> ModelConfig:
    """core: a mixer, or a mixer and `_norm`: with biases and norms of q and k."""
    core, extra, _ = core.partition("_norm")
    return ModelConfig(
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=192,
        num_heads=4,
        vocab_size=128,
        qkv_bias=bool(extra),
        qk_norm=bool(extra),
        mixers=[core],
        position=position_config("nope" if core == "stickbreaking" else "rope"),
    )
