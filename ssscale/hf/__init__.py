"""Registration of our models with transformers, so that its Auto classes load them without remote code."""


def register() -> None:
    """Registers our models with AutoConfig and AutoModelForCausalLM in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ssscale.hf.code import exported_module
    from ssscale.hf.configuration_ssscale import SSScaleConfig

    AutoConfig.register(SSScaleConfig.model_type, SSScaleConfig, exist_ok=True)
    AutoModelForCausalLM.register(SSScaleConfig, exported_module().SSScaleForCausalLM, exist_ok=True)
