"""Pipelines, chat templates and other tools around a model."""

import copy
import pickle
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests.hf.uses.caches import GREEDY
from tests.hf.uses.subject import PROMPTS, TEXTS, TRUST, Subject, equal, refused, same, use


@use("pipeline text-generation")
def text_generation(s: Subject) -> None:
    write = pipeline("text-generation", model=s.load(), tokenizer=s.tokenizer)
    found = write(PROMPTS[0], **GREEDY, return_full_text=False)[0]["generated_text"]
    expected = s.greedy(s.tokenizer(PROMPTS[0])["input_ids"], 9)
    same(found, s.tokenizer.decode(expected, skip_special_tokens=True))


@use("pipeline text-generation from the folder, in batches")
def batches(s: Subject) -> None:
    write = pipeline("text-generation", model=str(s.folder), **TRUST)
    found = write(PROMPTS, batch_size=2, **GREEDY, return_full_text=False)
    for prompt, row in zip(PROMPTS, found):
        expected = s.greedy(s.tokenizer(prompt)["input_ids"], 9)
        same(row[0]["generated_text"], s.tokenizer.decode(expected, skip_special_tokens=True))


@use("pipeline feature-extraction")
def features(s: Subject) -> None:
    model = AutoModel.from_pretrained(s.folder, **TRUST)
    found = pipeline("feature-extraction", model=model, tokenizer=s.tokenizer)(PROMPTS[0])
    equal(found[0], s.reference()(s.tokenizer(PROMPTS[0])["input_ids"]).states[-1])


@use("pipeline text-classification")
def classification(s: Subject) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(s.folder, **TRUST, num_labels=3)
    found = pipeline("text-classification", model=model, tokenizer=s.tokenizer)(PROMPTS[0], top_k=None)
    state = s.reference()(s.tokenizer(PROMPTS[0])["input_ids"]).states[-1][-1]
    expected = (state @ model.score.weight.detach().double().T).softmax(-1)
    for row in found:
        equal(row["score"], expected[model.config.label2id[row["label"]]])


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@use("`apply_chat_template` without a template")
def no_template(s: Subject) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return refused(lambda: s.tokenizer.apply_chat_template(messages), "chat_template")


@use("`apply_chat_template` with a template of one's own, saved")
def template(s: Subject) -> None:
    tokenizer = AutoTokenizer.from_pretrained(s.folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(s.scratch)
    tokenizer = AutoTokenizer.from_pretrained(s.scratch)
    messages = [{"role": "user", "content": "the stick"}, {"role": "assistant", "content": "breaks"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    same(text, "user: the stick\nassistant: breaks\n")
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
    same(found["input_ids"][0], s.tokenizer(text, add_special_tokens=False)["input_ids"])
    equal(s.model(**found).logits[0], s.reference()(found["input_ids"][0].tolist()).logits)


@use("`copy.deepcopy`, `pickle` of the weights")
def copies(s: Subject) -> None:
    model = copy.deepcopy(s.model)
    with torch.no_grad():
        s.load().load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    equal(model(torch.tensor([TEXTS[0]])).logits[0], s.reference()(TEXTS[0]).logits)


@use("`torch.export`", slow=True)
def exported_program(s: Subject) -> None:
    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, use_cache=False).logits

    program = torch.export.export(Logits(s.load()), (torch.tensor([TEXTS[0]]),))
    equal(program.module()(torch.tensor([TEXTS[0][::-1]]))[0], s.reference()(TEXTS[0][::-1]).logits)


@use("a forward hook on a block, as probes use it")
def hooks(s: Subject) -> None:
    model, kept = s.load(), []
    model.blocks[0].register_forward_hook(lambda module, given, output: kept.append(output[0]))
    model(torch.tensor([TEXTS[0]]))
    equal(kept[0][0], s.reference()(TEXTS[0]).states[1])
