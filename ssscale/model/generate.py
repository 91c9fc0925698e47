"""Generation without a key/value cache: each new token costs a forward pass over everything before it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder

Stop = Callable[[list[int]], bool]


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_id: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_length: int | None = None,
    stop: Stop | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the end-of-document token that ends them.

    temperature 0 is greedy; else tokens are drawn from softmax(logits / temperature), restricted to the likeliest ones
    that together hold `top_p` (nucleus sampling, arXiv:1904.09751). Prompt i draws from its own generator, seeded with
    seed + i, so its text depends on nothing else in the batch. max_length: tokens of prompt and text together.
    stop: is given the new tokens after each one and may end the text. Raises ValueError for an empty prompt or
    a temperature or top_p out of range.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token: begin it with the beginning-of-document token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must not be negative and top_p={top_p} must be in (0, 1]")
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    texts: list[list[int]] = [[] for _ in prompts]
    room = [max_new_tokens if max_length is None else min(max_new_tokens, max_length - len(p)) for p in prompts]
    active = [i for i in range(len(prompts)) if room[i] > 0]
    while active:
        logits = next_token_logits(model, [[*prompts[i], *texts[i]] for i in active])
        going = []
        for i, row in zip(active, logits, strict=True):
            token = pick(row, temperature, top_p, generators[i])
            if token == eos_id:
                continue
            texts[i].append(token)
            if len(texts[i]) < room[i] and not (stop and stop(texts[i])):
                going.append(i)
        active = going
    return texts


def next_token_logits(model: Decoder, documents: Sequence[Sequence[int]]) -> Tensor:
    """[documents, vocab_size] float32 on the CPU: the logits after the last token of each, in one packed pass."""
    device = next(model.parameters()).device
    lengths = [len(document) for document in documents]
    ends = torch.tensor(lengths).cumsum(0) - 1
    tokens = [token for document in documents for token in document]
    # Sequence parallelism shares the tokens out evenly; a document behind the others changes none of them.
    filler = -len(tokens) % model.groups.tensor_size
    if filler:
        tokens += [0] * filler
        lengths.append(filler)
    layout = PackedLayout.from_lengths(lengths).to(device)
    return model(torch.tensor(tokens, device=device), layout)[ends.to(device)].float().cpu()


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token from logits [vocab_size] float32."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    # A token is kept while those likelier than it hold less than top_p: the likeliest always is.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
