"""Text generation with cached keys and values.

Prompts are processed in one pass or in chunks. After that, each pass adds one token to every text.
"""

from collections.abc import Callable, Sequence

import torch
from ssscale_kernels.upload import upload
from torch import Tensor

from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder

PREFILL_TOKENS = 16_384  # in one pass, over all prompts
# Finished sequences leave the cache when less than this share still grows. Dropping them copies the cache, so it is
# done rarely.
GROWING = 0.75


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_id: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    max_length: int | None = None,
    vocab_size: int | None = None,
    stop: Callable[[list[list[int]]], list[bool]] | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, without the end-of-document token.

    temperature: 0 takes the most likely token. Otherwise tokens are drawn from softmax(logits / temperature),
    restricted to the most likely ones that together hold `top_p` (nucleus sampling, arXiv:1904.09751). seed: prompt i
    has a generator of its own, seeded with seed + i, or with seed[i], so its text does not depend on the rest of the
    batch. max_length: the limit for prompt and text together. vocab_size: the tokenizer's, if the model has more entries;
    ids from it on are never chosen. stop: called with the texts that have just grown; returns for each whether it ends.

    Raises ValueError for an empty prompt, or for a temperature or top_p out of range.
    """
    if not all(prompts):
        raise ValueError("a prompt needs at least one token: begin it with the beginning-of-document token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must not be negative and top_p={top_p} must be in (0, 1]")
    seeds = range(seed, seed + len(prompts)) if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(own) for own in seeds]
    texts: list[list[int]] = [[] for _ in prompts]
    room = [max_new_tokens if max_length is None else min(max_new_tokens, max_length - len(p)) for p in prompts]
    active = [i for i in range(len(prompts)) if room[i] > 0]
    if not active:
        return texts
    cache = KVCache(model, [len(prompts[i]) + room[i] for i in active])
    logits = prefill(model, cache, [prompts[i] for i in active], prefill_tokens)
    slots: list[int | None] = [*active]  # the text in each slot of the cache, None if it has ended
    while active:
        tokens = _pick_all(logits[:, :vocab_size], slots, temperature, top_p, generators)
        for slot, (i, token) in enumerate(zip(slots, tokens, strict=True)):
            if i is None:
                continue
            if token == eos_id:
                slots[slot] = None
                continue
            texts[i].append(token)
            if len(texts[i]) == room[i]:
                slots[slot] = None
        active = [i for i in slots if i is not None]
        if stop and active:
            ended = {i for i, ends in zip(active, stop([texts[i] for i in active]), strict=True) if ends}
            slots = [None if i in ended else i for i in slots]
            active = [i for i in active if i not in ended]
        if len(active) < GROWING * len(slots):
            cache.keep([slot for slot, i in enumerate(slots) if i is not None])
            slots = [*active]
        if active:
            logits = extend(model, cache, [[] if i is None else texts[i][-1:] for i in slots])
    return texts


def _pick_all(
    logits: Tensor, slots: list[int | None], temperature: float, top_p: float, generators: list[torch.Generator]
) -> list[int]:
    """Returns one token per slot. Tokens of empty slots are meaningless."""
    if temperature == 0:
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    rows = logits.cpu()
    return [
        0 if i is None else pick(row, temperature, top_p, generators[i]) for row, i in zip(rows, slots, strict=True)
    ]


def prefill(model: Decoder, cache: KVCache, prompts: Sequence[Sequence[int]], chunk: int = PREFILL_TOKENS) -> Tensor:
    """Fills the cache with the prompts. Returns the logits after each prompt, [prompts, vocab_size] float32.

    A pass takes about `chunk` tokens, the same number of each unfinished prompt and at least one.
    """
    done = [0] * len(prompts)
    logits: list[Tensor | None] = [None] * len(prompts)
    while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
        left = [len(prompt) - n for n, prompt in zip(done, prompts, strict=True)]
        share = max(1, chunk // sum(n > 0 for n in left))
        parts = [prompt[n : n + share] for n, prompt in zip(done, prompts, strict=True)]
        found = extend(model, cache, parts)
        done = [n + len(part) for n, part in zip(done, parts, strict=True)]
        for row, prompt in enumerate(prompts):
            if parts[row] and done[row] == len(prompt):
                logits[row] = found[row]
    return torch.stack([row for row in logits if row is not None])


@torch.no_grad()
def extend(model: Decoder, cache: KVCache, parts: Sequence[Sequence[int]]) -> Tensor:
    """Appends parts[b] to each cached sequence b. Returns the logits after it, [sequences, vocab_size] float32.

    The logits of a sequence with an empty part are meaningless.
    """
    layout = cache.begin([len(part) for part in parts])
    device = layout.positions.device
    tokens = [token for part in parts for token in part]
    tokens += [0] * (len(layout.positions) - len(tokens))  # the padding of sequence parallelism
    ends = torch.tensor([len(part) for part in parts]).cumsum(0) - 1
    rows = upload(ends.clamp(min=0), device)
    return model(upload(torch.tensor(tokens), device), layout, cache=cache, rows=rows).float()


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws one token from logits [vocab_size] float32 on the CPU. temperature must be positive."""
    probabilities, tokens = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    # A token stays if the more likely ones hold less than top_p together. The most likely token always stays.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
