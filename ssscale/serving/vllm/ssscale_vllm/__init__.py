"""A vLLM plugin for the models that ssscale exports. Seen with vLLM 0.32.0.

vLLM calls `register` in each of its processes through the entry point `vllm.general_plugins`. Nothing else happens at
import time, and torch and vLLM are imported only when a model is built.
"""

ARCHITECTURE = "SSScaleForCausalLM"


def register() -> None:
    """Registers the configuration with transformers, and the model and its attention backends with vLLM."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from .config import SSScaleConfig
    from .mixers import MIXERS

    AutoConfig.register(SSScaleConfig.model_type, SSScaleConfig, exist_ok=True)
    for mixer in MIXERS.values():
        if mixer.backend is not None and mixer.backend.name not in AttentionBackendEnum.__members__:
            AttentionBackendEnum.register(mixer.backend.name, mixer.backend.path)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
