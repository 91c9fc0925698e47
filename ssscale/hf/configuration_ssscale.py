"""The configuration of an exported model. This file is saved with the weights and needs only transformers."""

from typing import Any

from transformers import PretrainedConfig


class SSScaleConfig(PretrainedConfig):
    """The configuration of a Llama-2-style decoder with a mixer per layer.

    qkv_bias: biases of the query, key and value projections. qk_norm: norms of each head of q and k, before rotation.
    mixers: names of the mixers, a pattern that repeats over the layers. mixer: the options of each mixer by name.
    position: method, window, and the options of each method by name. width: embedding_multiplier, residual_multiplier,
    logits_divisor, attention_scale, ... learned: the weights that mixers and the position method declare, as
    [[name, shape, start], ...]. max_position_embeddings: the training length; longer inputs are accepted.
    """

    model_type = "ssscale"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - as transformers declares it

    def __init__(
        self,
        vocab_size: int = 50_257,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 1024,
        mixers: list[str] | None = None,
        mixer: dict[str, dict[str, Any]] | None = None,
        learned: list[Any] | None = None,
        position: dict[str, Any] | None = None,
        width: dict[str, Any] | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.mixers = mixers or []
        self.mixer = mixer or {}
        self.learned = learned or []
        self.position: dict[str, Any] = {"method": "nope", "window": None} | (position or {})
        self.width: dict[str, Any] = {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_divisor": 1.0,
            "attention_scale": None,
        } | (width or {})
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
