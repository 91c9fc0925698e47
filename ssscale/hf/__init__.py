"""Our models as transformers knows them. `register()` lets its Auto classes load them without remote code."""


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know our models in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ssscale.hf.code import exported_module
    from ssscale.hf.configuration_ssscale import SSScaleConfig

    AutoConfig.register(SSScaleConfig.model_type, SSScaleConfig, exist_ok=True)
    AutoModelForCausalLM.register(SSScaleConfig, exported_module().SSScaleForCausalLM, exist_ok=True)
