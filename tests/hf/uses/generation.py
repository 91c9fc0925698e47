"""Modes of generation, against loops over the reference."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, TextIteratorStreamer

from tests.hf.uses.caches import GREEDY, check_generation
from tests.hf.uses.subject import PROMPTS, TEXTS, Reference, Subject, equal, padded, refused, same, use

NEW = 9


def prompt_of(s: Subject) -> dict[str, Tensor]:
    return dict(s.tokenizer(PROMPTS[0], return_tensors="pt"))


def new_tokens(s: Subject, model: Any = None, **settings: Any) -> list[int]:
    inputs = prompt_of(s)
    found = (model or s.model).generate(**inputs, **(GREEDY | settings))
    return found[0, inputs["input_ids"].shape[1] :].tolist()


def ids_of(s: Subject) -> list[int]:
    return prompt_of(s)["input_ids"][0].tolist()


@use("greedy")
def greedy(s: Subject) -> None:
    same(new_tokens(s), s.greedy(ids_of(s), NEW))


@use("greedy, a batch padded on the left")
def greedy_batch(s: Subject) -> None:
    check_generation(s)


@use("a batch without `attention_mask`: it follows from the pad token")
def inferred_mask(s: Subject) -> None:
    ids = s.tokenizer(PROMPTS, return_tensors="pt", padding=True)["input_ids"]
    found = s.model.generate(ids, **GREEDY)[:, ids.shape[1] :]
    same(found, [s.greedy(s.tokenizer(prompt)["input_ids"], NEW) for prompt in PROMPTS])


@use("beyond the training length")
def beyond(s: Subject) -> None:
    text = [(7 * i) % 300 for i in range(s.model.config.max_position_embeddings - 2)]
    found = s.model.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **GREEDY)
    same(found[0, len(text) :], s.greedy(text, NEW))


@use("sampling")
def sampling(s: Subject) -> None:
    torch.manual_seed(5)
    found = new_tokens(s, do_sample=True, temperature=0.7, top_k=0)
    torch.manual_seed(5)
    draw = lambda text, scores: int(torch.multinomial((scores / 0.7).softmax(-1).float()[None], 1))  # noqa: E731
    same(found, s.reference().continued(ids_of(s), NEW, draw))


@use("sampling with `top_k` and `top_p`")
def nucleus(s: Subject) -> None:
    def draw(text: list[int], scores: Tensor) -> int:
        scores = scores.masked_fill(scores < scores.topk(20).values[-1], -torch.inf)
        ordered, order = scores.softmax(-1).sort(descending=True)
        scores[order[ordered.cumsum(-1) - ordered >= 0.8]] = -torch.inf
        return int(torch.multinomial(scores.softmax(-1).float()[None], 1))

    torch.manual_seed(6)
    found = new_tokens(s, do_sample=True, top_k=20, top_p=0.8)
    torch.manual_seed(6)
    same(found, s.reference().continued(ids_of(s), NEW, draw))


@use("sampling never gives an id without a text")
def suppressed(s: Subject) -> None:
    ids = torch.tensor([TEXTS[2]] * 40)
    found = s.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=9.0, top_k=0, max_new_tokens=9
    )
    new = found[:, ids.shape[1] :]
    ended = (new == s.model.config.eos_token_id).cumsum(-1) > 0
    assert new[~ended].max() < s.text_ids


def beams(reference: Reference, prompt: list[int], width: int, new: int) -> list[tuple[float, list[int]]]:
    """The best continuations by the sum of their log-probabilities, keeping `width` at each step."""
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(new):
        grown = []
        for score, text in kept:
            scores = reference([*prompt, *text]).logits[-1].log_softmax(-1)
            best = scores[: reference.real_ids].topk(width)
            grown += [(score + float(v), [*text, int(t)]) for v, t in zip(best.values, best.indices)]
        kept = sorted(grown, reverse=True)[:width]
    return kept


@use("beam search")
def beam_search(s: Subject) -> None:
    same(new_tokens(s, num_beams=3, max_new_tokens=5), beams(s.reference(), ids_of(s), 3, 5)[0][1])


@use("beam search, `num_return_sequences`, scores")
def all_beams(s: Subject) -> None:
    inputs = prompt_of(s)
    settings = GREEDY | {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 3}
    found = s.model.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    expected = beams(s.reference(), ids_of(s), 3, 4)
    same(found.sequences[:, -4:], [text for _, text in expected])
    equal(found.sequences_scores, [score / 4 for score, _ in expected])


@use("beam sampling")
def beam_sampling(s: Subject) -> None:
    inputs = prompt_of(s)
    settings = GREEDY | {"max_new_tokens": 4, "num_beams": 3, "do_sample": True, "top_k": 0}
    found = s.model.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    text, prompt = found.sequences[0, -4:].tolist(), ids_of(s)
    scores = s.reference()([*prompt, *text]).logits.log_softmax(-1)[len(prompt) - 1 : -1]
    equal(found.sequences_scores[0], scores[range(4), text].mean())


@use("`num_return_sequences` when sampling")
def several(s: Subject) -> None:
    inputs = prompt_of(s)
    found = s.model.generate(**inputs, **(GREEDY | {"do_sample": True}), num_return_sequences=4)
    same(list(found.shape), [4, inputs["input_ids"].shape[1] + NEW])
    assert len({tuple(row) for row in found.tolist()}) > 1


@use("`repetition_penalty`, `no_repeat_ngram_size`, `bad_words_ids`")
def penalties(s: Subject) -> None:
    banned = s.greedy(ids_of(s), 1)[0]

    def choose(text: list[int], scores: Tensor) -> int:
        seen = torch.tensor(sorted(set(text)))
        scores[seen] = torch.where(scores[seen] < 0, scores[seen] * 1.7, scores[seen] / 1.7)
        for i in range(len(text) - 1):
            if text[i] == text[-1]:
                scores[text[i + 1]] = -torch.inf
        scores[banned] = -torch.inf
        return int(scores.argmax())

    found = new_tokens(s, repetition_penalty=1.7, no_repeat_ngram_size=2, bad_words_ids=[[banned]])
    same(found, s.reference().continued(ids_of(s), NEW, choose))


@use("`guidance_scale`")
def guidance(s: Subject) -> None:
    reference, prompt = s.reference(), ids_of(s)

    def choose(text: list[int], scores: Tensor) -> int:
        # Without a negative prompt, the text without condition begins with the prompt's last token.
        alone = reference.next_scores(text[len(prompt) - 1 :]).log_softmax(-1)
        with_prompt = scores.log_softmax(-1)
        mixed = 1.5 * (with_prompt - alone) + alone
        mixed[reference.real_ids :] = -torch.inf
        return int(mixed.argmax())

    same(new_tokens(s, guidance_scale=1.5), reference.continued(prompt, NEW, choose))


@use("assisted decoding (`assistant_model`)")
def assisted(s: Subject) -> None:
    assistant = s.load()
    with torch.no_grad():
        assistant.blocks[1].mlp.down.weight.mul_(0.3)  # agrees sometimes
    same(new_tokens(s, s.load(), assistant_model=assistant), s.greedy(ids_of(s), NEW))


@use("prompt lookup (`prompt_lookup_num_tokens`)")
def prompt_lookup(s: Subject) -> None:
    text = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    found = s.model.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, 10),
        prompt_lookup_num_tokens=3,
        # transformers 4.57 needs an id; this one is never generated.
        **GREEDY | {"eos_token_id": 303},
    )
    same(found[0, 10:], s.greedy(text, NEW))


@use("contrastive search (`penalty_alpha`)")
def contrastive(s: Subject) -> str:
    return refused(lambda: new_tokens(s, penalty_alpha=0.6, top_k=4), "ontrastive")


@use("group beam search (`num_beam_groups`)")
def group_beams(s: Subject) -> str:
    settings = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
    return refused(lambda: new_tokens(s, **settings), "eam")


@use("a streamer")
def streamer(s: Subject) -> None:
    stream = TextIteratorStreamer(s.tokenizer, skip_prompt=True)
    new_tokens(s, streamer=stream)
    same("".join(stream), s.tokenizer.decode(s.greedy(ids_of(s), NEW)))


@use("`stop_strings`")
def stop_strings(s: Subject) -> None:
    text = s.greedy(ids_of(s), 40)
    first = next(i for i in range(2, 40) if (word := s.tokenizer.decode(text[i : i + 1])).isascii() and word.strip())
    stop = s.tokenizer.decode(text[first : first + 1])
    expected = next(text[: i + 1] for i in range(40) if stop in s.tokenizer.decode(text[: i + 1]))
    same(new_tokens(s, stop_strings=[stop], tokenizer=s.tokenizer, max_new_tokens=40), expected)


@use("a stopping criterion of one's own")
def stopping(s: Subject) -> None:
    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(ids_of(s)) + 5)

    same(new_tokens(s, stopping_criteria=[AfterFive()]), s.greedy(ids_of(s), 5))


@use("a logits processor of one's own")
def processor(s: Subject) -> None:
    class Even(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            odd = torch.arange(scores.shape[-1]) % 2 == 1
            return scores.masked_fill(odd, -torch.inf)

    expected = s.reference().continued(ids_of(s), NEW, lambda text, scores: 2 * int(scores[::2].argmax()))
    same(new_tokens(s, logits_processor=[Even()]), expected)


@use("a text ends at EOS, its batch is padded")
def ends(s: Subject) -> None:
    prompts = [s.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    end = s.greedy(prompts[0], 4)[-1]
    inputs = s.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    found = s.model.generate(**inputs, **(GREEDY | {"eos_token_id": end}))[:, inputs["input_ids"].shape[1] :].tolist()
    for prompt, row in zip(prompts, found):
        text = s.greedy(prompt, NEW)
        text = text[: text.index(end) + 1] if end in text else text
        same(row, [*text, *[s.tokenizer.pad_token_id] * (len(row) - len(text))])


@use("`max_length`, `min_new_tokens`")
def lengths(s: Subject) -> None:
    prompt = ids_of(s)
    first = s.greedy(prompt, 1)[0]
    same(new_tokens(s, max_new_tokens=None, max_length=len(prompt) + 4), s.greedy(prompt, 4))

    def choose(text: list[int], scores: Tensor) -> int:
        scores[first] = -torch.inf
        return int(scores.argmax())

    found = new_tokens(s, eos_token_id=first, min_new_tokens=NEW)
    same(found, s.reference().continued(prompt, NEW, choose))


@use("a saved `GenerationConfig`")
def generation_config(s: Subject) -> None:
    GenerationConfig.from_pretrained(s.folder, max_new_tokens=6, do_sample=False).save_pretrained(s.scratch)
    config = GenerationConfig.from_pretrained(s.scratch)
    config.eos_token_id = None
    inputs = prompt_of(s)
    found = s.model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :]
    same(found, s.greedy(ids_of(s), 6))


@use("`inputs_embeds` in `generate`")
def from_embeddings(s: Subject) -> None:
    inputs = prompt_of(s)
    embedded = s.model.get_input_embeddings()(inputs["input_ids"]).detach()
    found = s.model.generate(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], **GREEDY)
    same(found[0], s.greedy(ids_of(s), NEW))


@use("`output_logits`, `output_hidden_states`, `output_attentions` in `generate`")
def outputs(s: Subject) -> None:
    inputs, prompt = prompt_of(s), ids_of(s)
    wanted = {"output_logits": True, "output_hidden_states": True, "output_attentions": True}
    found = s.model.generate(**inputs, **(GREEDY | {"max_new_tokens": 3}), **wanted, return_dict_in_generate=True)
    run = s.reference()([*prompt, *s.greedy(prompt, 3)])
    for step in range(3):
        equal(found.logits[step][0], run.logits[len(prompt) - 1 + step])
        for layer in range(2):
            place = len(prompt) - 1 + step
            equal(found.hidden_states[step][layer][0, -1], run.states[layer][place])
            equal(found.attentions[step][layer][0, :, -1], run.weights[layer][:, place, : place + 1])


@use("`compute_transition_scores`")
def transition_scores(s: Subject) -> None:
    inputs, prompt = prompt_of(s), ids_of(s)
    found = s.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    scores = s.model.compute_transition_scores(found.sequences, found.logits, normalize_logits=True)
    text = s.greedy(prompt, NEW)
    expected = s.reference()([*prompt, *text]).logits.log_softmax(-1)[len(prompt) - 1 : -1][range(NEW), text]
    equal(scores[0], expected)


@use("`position_ids` in `generate`: positions follow from the mask")
def positions(s: Subject) -> None:
    ids, mask = torch.tensor([TEXTS[2]]), torch.ones(1, 8)
    found = s.model.generate(ids, attention_mask=mask, position_ids=torch.arange(8)[None], **GREEDY)
    same(found[0, 8:], s.greedy(TEXTS[2], NEW))


@use("greedy, a batch padded on the right")
def right_padded(s: Subject) -> None:
    """Its texts continue after the padding, which no token sees."""
    ids, mask = padded([TEXTS[0], TEXTS[2]], left=False)
    found = s.model.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
    same(found[0], s.greedy(TEXTS[0], NEW))
