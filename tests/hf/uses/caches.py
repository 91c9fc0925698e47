"""Key/value caches: which ones a model takes, and that they change nothing."""

from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from tests.hf.uses.subject import PROMPTS, TEXTS, Subject, equal, padded, refused, same, use

GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}


def check_generation(s: Subject, **settings: Any) -> None:
    """Of two prompts, padded on the left."""
    inputs = s.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    found = s.load().generate(**inputs, **GREEDY, **settings)[:, inputs["input_ids"].shape[1] :]
    same(found, [s.greedy(s.tokenizer(prompt)["input_ids"], 9) for prompt in PROMPTS])


@use("`use_cache=False`")
def no_cache(s: Subject) -> None:
    assert s.model(torch.tensor([TEXTS[0]]), use_cache=False).past_key_values is None
    check_generation(s, use_cache=False)


@use("a text in pieces, through `past_key_values`")
def pieces(s: Subject) -> None:
    cache, found = DynamicCache(), []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 15), (15, 22)):
            output = s.model(torch.tensor([TEXTS[0][first:last]]), past_key_values=cache)
            found.append(output.logits[0])
    equal(torch.cat(found), s.reference()(TEXTS[0]).logits)


@use("padded texts in pieces, through `past_key_values`")
def padded_pieces(s: Subject) -> None:
    ids, mask = padded(TEXTS, left=True)
    with torch.no_grad():
        first = s.model(ids[:, :9], attention_mask=mask[:, :9])
        second = s.model(ids[:, 9:], attention_mask=mask, past_key_values=first.past_key_values)
    found = torch.cat((first.logits, second.logits), 1)[mask.bool()]
    equal(found, torch.cat([s.reference()(text).logits for text in TEXTS]))


@use("a second turn: `generate` continues from `past_key_values`")
def second_turn(s: Subject) -> None:
    cache = DynamicCache()
    prompt = s.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    first = s.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **GREEDY)
    longer = torch.cat((first, torch.tensor([[9, 8, 7]])), 1)
    second = s.model.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, **GREEDY)
    same(second[0, longer.shape[1] :], s.greedy(longer[0].tolist(), 9))


@use('`cache_implementation="dynamic"`')
def dynamic(s: Subject) -> None:
    check_generation(s, cache_implementation="dynamic")


@use('`cache_implementation="static"`')
def static(s: Subject) -> None:
    check_generation(s, cache_implementation="static")


@use('`cache_implementation="offloaded"` without a GPU')
def offloaded(s: Subject) -> str:
    sentence = refused(lambda: check_generation(s, cache_implementation="offloaded"), "CUDA")
    assert "compiled" in sentence or "available" in sentence
    return "Torch not compiled with CUDA enabled (or, with a build for CUDA: no GPU is available)"


@use('`cache_implementation="quantized"`')
def quantized(s: Subject) -> str:
    return refused(lambda: check_generation(s, cache_implementation="quantized"), "quanto")


@use("`prefill_chunk_size`")
def chunked_prefill(s: Subject) -> None:
    check_generation(s, prefill_chunk_size=3)


@use("`StaticCache` and `cache_position` in a loop of one's own")
def own_loop(s: Subject) -> None:
    cache = StaticCache(config=s.model.config, max_cache_len=32)
    text, place = list(TEXTS[2]), 0
    with torch.no_grad():
        given = torch.tensor([text])
        for _ in range(6):
            columns = torch.arange(place, place + given.shape[1])
            output = s.model(given, past_key_values=cache, cache_position=columns)
            place += given.shape[1]
            given = output.logits[:, -1:].argmax(-1)
            text.append(int(given))
    same(text[len(TEXTS[2]) :], s.greedy(TEXTS[2], 6))


@use("`torch.compile(fullgraph=True)` with a static cache", slow=True)
def compiled_static(s: Subject) -> None:
    model = s.load()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=32)
    text = list(TEXTS[2])
    with torch.no_grad():
        output = model(torch.tensor([text]), past_key_values=cache, cache_position=torch.arange(len(text)))
        for _ in range(6):
            given = output.logits[:, -1:].argmax(-1)
            text.append(int(given))
            columns = torch.tensor([len(text) - 1])
            output = forward(given, past_key_values=cache, cache_position=columns)
    same(text[len(TEXTS[2]) :], s.greedy(TEXTS[2], 6))
