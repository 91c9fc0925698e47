"""Registration of our models with transformers, so that its Auto classes load them without remote code."""


def register() -> None:
    """Registers our models with the Auto classes in this process."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from ssscale.hf.code import exported_module
    from ssscale.hf.configuration_ssscale import SSScaleConfig

    AutoConfig.register(SSScaleConfig.model_type, SSScaleConfig, exist_ok=True)
    code = exported_module()
    AutoModel.register(SSScaleConfig, code.SSScaleModel, exist_ok=True)
    AutoModelForCausalLM.register(SSScaleConfig, code.SSScaleForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(SSScaleConfig, code.SSScaleForSequenceClassification, exist_ok=True)
