"""The exported model on vLLM's layers. Weights keep the names of the export. T: tokens of all sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sequence import IntermediateTensors

from .attention import Attention, Learned
from .config import Model, read_model


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x). W_gate and W_up are one matrix."""

    def __init__(self, model: Model, prefix: str) -> None:
        super().__init__()
        inner = model.intermediate_size
        self.gate_up = MergedColumnParallelLinear(
            model.hidden_size, [inner, inner], bias=False, prefix=f"{prefix}.gate_up"
        )
        self.down = RowParallelLinear(inner, model.hidden_size, bias=False, prefix=f"{prefix}.down")
        self.activation = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)[0]))[0]


class Block(nn.Module):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))"""

    def __init__(self, model: Model, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.multiplier, self.mixer = model.width.residual_multiplier, model.layers[layer].name
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(model, model.layers[layer], vllm_config, f"{prefix}.attention")
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGLU(model, f"{prefix}.mlp")

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, prepared: dict[str, Tensor | None]) -> Tensor:
        x = x + self.multiplier * self.attention(self.attention_norm(x), tables, prepared[self.mixer])
        return x + self.multiplier * self.mlp(self.mlp_norm(x))


class SSScaleForCausalLM(nn.Module):
    """The decoder with its head.

    Raises ValueError for an export, or for options of vLLM, that cannot be served (`read_model`, `_check_options`).
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model = self.model = read_model(vllm_config.model_config.hf_config.to_dict())
        _check_options(vllm_config, model)
        self.embedding = VocabParallelEmbedding(model.vocab_size, model.hidden_size, prefix="embedding")
        learned = {name: mixer.shared_weights(model.length) for name, mixer in model.mixers.items()}
        self.shared = nn.ModuleDict({name: Learned(shapes, split=False) for name, shapes in learned.items() if shapes})
        self.blocks = nn.ModuleList(Block(model, i, vllm_config, f"blocks.{i}") for i in range(len(model.layers)))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.head = ParallelLMHead(model.vocab_size, model.hidden_size, prefix="head")
        if model.tied:
            self.head = self.head.tie_weights(self.embedding)
        self.logits_processor = LogitsProcessor(model.vocab_size)
        # The export lists the ids without an entry in the tokenizer, and vLLM itself does not read this key.
        self.suppressed: list[int] = vllm_config.model_config.try_get_generation_config().get("suppress_tokens") or []

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Returns the last hidden states [T, D]. positions: [T], each within its own sequence."""
        model = self.model
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * model.width.embedding_multiplier
        tables = model.position.tables(positions, model.head_dim)
        prepared = {}
        for name, mixer in model.mixers.items():
            shared = self.shared[name].all() if name in self.shared else {}
            prepared[name] = mixer.prepare(positions, model.position.window, shared)
        for block in self.blocks:
            x = block(x, tables, prepared)
        return self.norm(x) / model.width.logits_divisor

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits = self.logits_processor(self.head, hidden_states)
        if logits is not None and self.suppressed:  # the other ranks of tensor parallelism have no logits
            logits[..., self.suppressed] = -torch.inf
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Raises ValueError if the folder's weights are not exactly those of the model."""
        parameters = dict(self.named_parameters())
        missing = set(parameters) - ({"head.weight"} if self.model.tied else set())
        loaded = set()
        for name, weight in weights:
            if name not in missing:
                raise ValueError(f"the folder has a weight {name}, which its config.json does not account for")
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], weight)
            loaded.add(name)
            missing.remove(name)
        if missing:
            raise ValueError(f"the folder has no weight {min(missing)}")
        return set(parameters)


def _check_options(vllm_config: VllmConfig, model: Model) -> None:
    """Refuses options of vLLM that this model would run with and not honour."""
    if vllm_config.quant_config is not None:
        raise ValueError(f"quantization={vllm_config.quant_config.get_name()} is not supported for these models")
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if model.num_heads % ranks:
        raise ValueError(f"--tensor-parallel-size {ranks} does not divide the {model.num_heads} heads of the model")
