"""The model in plain torch for transformers. This file is saved with the weights and needs only torch and transformers.

The weights have the names and shapes of the trained model, without the padding of the vocabulary. `ssscale.hf.code`
inserts the functions of the model's mixers. The layers are in layers_ssscale.py. x: [B, T, D]; q: [B, N, T, H]; k, v:
[B, K, S, H], S: cached and new tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from .attention_ssscale import (
    Batch,
    Part,
    attend_in_tiles,
    biased,
    boundaries,
    fused,
    gpu_function,
    make_batch,
    packed,
)
from .configuration_ssscale import SSScaleConfig
from .layers_ssscale import Attention, Block, Learned, SSScaleRMSNorm
from .positions_ssscale import rope_tables

# Mixers use the functions of attention_ssscale.py under these names.
__all__ = [
    "Attention",
    "Batch",
    "SSScaleForCausalLM",
    "SSScaleForSequenceClassification",
    "SSScaleModel",
    "attend_in_tiles",
    "biased",
    "boundaries",
    "fused",
    "gpu_function",
    "packed",
]
DEFAULT_NEW_TOKENS = 20  # the default of transformers if neither max_new_tokens nor max_length is given


# the model's mixers
MIXERS: dict[str, Part] = {}
# the end of the model's mixers


class SSScaleModel(PreTrainedModel):
    """The decoder without a head. Texts may be padded on either side; attention_mask marks the padding."""

    config_class = SSScaleConfig
    base_model_prefix = "decoder"  # no module has this name: weights have the same names with and without a head
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"^head\.weight$"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = {name: Learned(config, f"shared.{name}") for name in config.mixers}
        self.shared = nn.ModuleDict({name: own for name, own in learned.items() if any(True for _ in own.parameters())})
        parts = [MIXERS[name] for name in config.mixers]
        self.blocks = nn.ModuleList(
            Block(config, layer, parts[layer % len(parts)]) for layer in range(config.num_hidden_layers)
        )
        self.norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: SSScaleConfig) -> None:
        """Adds the modules of a task."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = cast(nn.Embedding, value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        final_length: int | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Returns the normed output of the last block, last_hidden_state [B, T, D].

        attention_mask: [B, cached + T], 0 for padding. position_ids: [B, T]. Without attention_mask and cache, a token
        whose position does not follow that of the token before starts a document of its own, which sees no other, and
        no cache is made. Rotary positions are taken from position_ids; all else counts the tokens that are no padding.
        inputs_embeds: [B, T, D] in place of input_ids. token_type_ids: ignored. cache_position: [T] columns of a static
        cache. output_hidden_states: also the input of each block and, last, last_hidden_state. output_attentions: also
        the attention weights [B, N, T, S] of each block, which take memory for all of them. final_length: for
        dynamic_ntk, the final number of tokens of cached texts, padding included; `generate` sets it.

        Raises ValueError if attention_mask has another shape, or without exactly one of input_ids and inputs_embeds.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        batch = make_batch(x.shape[:2], x.device, attention_mask, position_ids, past_key_values, cache_position)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and batch.document is None and not self.training:
            past_key_values = DynamicCache()
        self.share(batch, position_ids, final_length)
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, weights = [], []
        x = x * self.config.width["embedding_multiplier"]
        for block in self.blocks:
            states.append(x)
            x, found = block(x, batch, wants_weights, past_key_values=past_key_values)
            weights.append(found)
        x = self.norm(x)
        result = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if wants_states else None,
            attentions=tuple(weights) if wants_weights else None,
        )
        return result.to_tuple() if return_dict is False else result

    def share(self, batch: Batch, position_ids: Tensor | None, final_length: int | None) -> None:
        """Computes what all layers share."""
        if self.config.position["method"] == "rope":
            lengths = torch.full((len(batch.j), 1), float(final_length or batch.j.shape[1]), device=batch.j.device)
            if batch.real is not None:
                lengths = lengths - (~batch.real).sum(-1, keepdim=True)
            elif batch.document is not None:
                lengths = torch.zeros_like(batch.document, dtype=lengths.dtype)
                lengths = lengths.scatter_add(1, batch.document, torch.ones_like(lengths)).gather(1, batch.document)
            positions = batch.i if position_ids is None else position_ids
            rope = self.config.position["rope"]
            batch.rotation = rope_tables(rope, self.config.head_dim, positions, lengths.double())
        for name in dict.fromkeys(self.config.mixers):
            prepare = MIXERS[name].prepare
            batch.own[name] = prepare(batch, self) if prepare else None


class SSScaleForCausalLM(SSScaleModel, GenerationMixin):
    """The decoder with its head, logits = W_head last_hidden_state / divisor."""

    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected: list[str] = []  # noqa: RUF012
    accepts_loss_kwargs = True  # Trainer gives num_items_in_batch
    head: nn.Linear

    def add_head(self, config: SSScaleConfig) -> None:
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = cast(nn.Linear, new_embeddings)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        final_length: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Returns logits [B, T, vocab_size] and, with labels (−100: none), the mean loss of each token's successor.

        Padding has no successor.
        logits_to_keep: number of last tokens with logits, 0 for all; or the indices of the tokens. num_items_in_batch:
        divides the sum of the losses in place of the number of labels. The rest is as in `SSScaleModel.forward`.
        """
        found = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            token_type_ids,
            use_cache,
            output_attentions,
            output_hidden_states,
            cache_position=cache_position,
            final_length=final_length,
        )
        output = cast(BaseModelOutputWithPast, found)
        x = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x[:, kept] / self.config.width["logits_divisor"])
        loss = None
        if labels is not None:
            if logits.shape[1] != labels.shape[1]:
                raise ValueError("labels need the logits of all tokens: leave out logits_to_keep")
            if attention_mask is not None and past_key_values is None:  # the first token of a text follows no other
                follows = F.pad(attention_mask[:, :-1], (1, 0)).bool()
                labels = labels.masked_fill(~follows, -100)
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, num_items_in_batch=num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        return result.to_tuple() if return_dict is False else result

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Calls transformers' generate. With dynamic_ntk, texts are rotated for their final length from the start.

        Positions follow from attention_mask; position_ids are ignored.
        """
        rope = self.config.position.get("rope", {})
        if rope.get("scaling") == "dynamic_ntk" and kwargs.get("final_length") is None:
            config = generation_config or self.generation_config
            given = kwargs.get("input_ids") if inputs is None else inputs
            given = kwargs.get("inputs_embeds") if given is None else given
            prompt = 1 if given is None else given.shape[1]
            new = kwargs.get("max_new_tokens", config.max_new_tokens)
            # The model's own setting counts if it is none of transformers' default.
            chosen = generation_config is not None or config.max_length != GenerationConfig().max_length
            length = kwargs.get("max_length", config.max_length if chosen else None)
            if new is None and length is not None:
                kwargs["final_length"] = max(length, prompt + 1)
            else:
                kwargs["final_length"] = prompt + (DEFAULT_NEW_TOKENS if new is None else new)
        return super().generate(inputs, generation_config, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Drops what `forward` does not take, and position_ids, which transformers does not always make from the mask."""
        for name in ("tokenizer", "assistant_tokenizer"):
            kwargs.pop(name, None)
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs | {"position_ids": None}

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Keeps the mask [B, cached + T] with a static cache; the layers make their own from it."""
        return attention_mask


class SSScaleForSequenceClassification(SSScaleModel):
    """The decoder with a linear head, W_score, on the last token of each text."""

    score: nn.Linear

    def add_head(self, config: SSScaleConfig) -> None:
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Returns logits [B, num_labels] and, with labels [B], the loss of `config.problem_type`.

        Without attention_mask, every token is part of its text. The rest is as in `SSScaleModel.forward`.
        """
        found = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            token_type_ids,
            bool(use_cache),
            output_attentions,
            output_hidden_states,
        )
        output = cast(BaseModelOutputWithPast, found)
        x = output.last_hidden_state
        last = torch.full((len(x),), x.shape[1] - 1, device=x.device)
        if attention_mask is not None:
            column = torch.arange(x.shape[1], device=x.device)
            last = (attention_mask[:, -x.shape[1] :].bool() * column).argmax(-1)
        logits = self.score(x[torch.arange(len(x), device=x.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        result = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        return result.to_tuple() if return_dict is False else result
