"""The small models that are compiled or whose activations are counted, and the length of their row."""

from ssscale.config.schema import ModelConfig, position_config

TOKENS = 256


def make_model(core: str, layers: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=192,
        num_heads=4,
        vocab_size=128,
        mixers=[core],
        position=position_config("nope" if core == "stickbreaking" else "rope"),
    )
