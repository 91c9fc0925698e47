"""Trainer and what it calls. The reference takes the same steps of SGD in float64."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tests.hf.uses.subject import TEXTS, TRUST, Subject, equal, same, use

RATE = 0.1
ROWS = [TEXTS[0], TEXTS[2], [0, 40, 41, 42, 43], [0, 7, 9, 11, 13, 15, 17]]


class Pad:
    """A collator: pads with 0 under the mask, labels −100, as for the first token, which Trainer would count."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        given: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            text, pad = list(row["input_ids"]), longest - len(row["input_ids"])
            given["input_ids"].append(text + [0] * pad)
            given["attention_mask"].append([1] * len(text) + [0] * pad)
            given["labels"].append([-100, *text[1:]] + [-100] * pad)
        return {key: torch.tensor(value) for key, value in given.items()}


def trainer(s: Subject, model: Any, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": str(s.scratch / "trainer"),
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "train_sampling_strategy" if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__ else "seed": (
            "sequential" if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__ else 0
        ),
    }
    collator = settings.pop("data_collator", Pad())
    arguments = TrainingArguments(**(defaults | settings))
    rows = rows or [{"input_ids": text} for text in ROWS]
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)


def expected_weights(s: Subject, batches: list[list[list[int]]]) -> dict[str, Tensor]:
    """Returns the weights after one step of SGD per batch."""
    reference = s.reference()
    weights = reference.trainable()
    for batch in batches:
        loss = reference.loss(batch)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients):
                weight -= RATE * gradient
    return weights


def check_weights(model: Any, expected: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        equal(weight, expected[name], name)


def check_training(s: Subject, **settings: Any) -> None:
    """One step over all rows: the mean is over all of their tokens, whatever the microbatches."""
    model = s.load()
    trainer(s, model, gradient_accumulation_steps=2, **settings).train()
    check_weights(model, expected_weights(s, [ROWS]))


@use("`Trainer`, one step over a batch")
def one_step(s: Subject) -> None:
    model = s.load()
    trainer(s, model, per_device_train_batch_size=4).train()
    check_weights(model, expected_weights(s, [ROWS]))


@use("`Trainer` with gradient accumulation: the mean over all tokens")
def accumulation(s: Subject) -> None:
    check_training(s)


@use("`Trainer` with gradient checkpointing")
def checkpointing(s: Subject) -> None:
    check_training(s, gradient_checkpointing=True)


@use("`Trainer` with reentrant gradient checkpointing")
def reentrant(s: Subject) -> None:
    check_training(s, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


@use("gradient checkpointing computes the blocks again")
def checkpointing_calls(s: Subject) -> None:
    model = s.load().train()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    calls = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(torch.tensor([TEXTS[0]]), labels=torch.tensor([TEXTS[0]])).loss.backward()
    same(len(calls), 2)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@use("`Trainer.evaluate`, `Trainer.predict`")
def evaluate(s: Subject) -> None:
    tester = trainer(s, s.load(), per_device_eval_batch_size=1)
    losses = [float(s.reference().loss([text])) for text in ROWS]
    equal(tester.evaluate()["eval_loss"], sum(losses) / len(losses), rtol=1e-4, atol=1e-4)
    found = trainer(s, s.load(), per_device_eval_batch_size=1).predict([{"input_ids": ROWS[0]}])
    equal(found.predictions[0], s.reference()(ROWS[0]).logits)


@use("`Trainer` saves a checkpoint, which loads and resumes")
def resume(s: Subject) -> None:
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}
    trainer(s, s.load(), **settings).train()
    folder = s.scratch / "trainer/checkpoint-1"
    expected = expected_weights(s, [ROWS])
    check_weights(AutoModelForCausalLM.from_pretrained(folder, **TRUST), expected)
    model = s.load()
    trainer(s, model, **settings | {"max_steps": 2}).train(resume_from_checkpoint=str(folder))
    check_weights(model, expected_weights(s, [ROWS, ROWS]))


@use("`DataCollatorForLanguageModeling` keeps the labels of EOS")
def collator(s: Subject) -> None:
    collate = DataCollatorForLanguageModeling(s.tokenizer, mlm=False)
    end = s.tokenizer.eos_token_id
    rows = [{"input_ids": [*text, end]} for text in ROWS]
    batch = collate(rows)
    for row, text in zip(batch["labels"], ROWS):
        same(row[row != -100], [*text, end])
    equal(s.model(**batch).loss, s.reference().loss([[*text, end] for text in ROWS]))


@use("`DataCollatorWithFlattening`: packed texts do not see each other")
def flattening(s: Subject) -> None:
    model = s.load()
    rows = [{"input_ids": text} for text in ROWS]
    trainer(s, model, rows, per_device_train_batch_size=4, data_collator=DataCollatorWithFlattening()).train()
    check_weights(model, expected_weights(s, [ROWS]))


@use("training a classifier with `Trainer`")
def classifier(s: Subject) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(s.folder, **TRUST, num_labels=3)
    score = model.score.weight.detach().double().requires_grad_()
    labels = [2, 0, 1, 2]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return Pad()(rows) | {"labels": torch.tensor([row["label"] for row in rows])}

    rows = [{"input_ids": text, "label": label} for text, label in zip(ROWS, labels)]
    trainer(s, model, rows, per_device_train_batch_size=4, data_collator=collate, remove_unused_columns=False).train()
    states = torch.stack([s.reference()(text).states[-1][-1] for text in ROWS])
    (gradient,) = torch.autograd.grad(F.cross_entropy(states @ score.T, torch.tensor(labels)), score)
    equal(model.score.weight, score - RATE * gradient)


@use("freezing the model but its norms")
def freeze(s: Subject) -> None:
    model = s.load()
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)
    trainer(s, model, per_device_train_batch_size=4).train()
    stepped, start = expected_weights(s, [ROWS]), s.reference().w
    check_weights(model, {name: stepped[name] if "norm" in name else start[name] for name in start})


@use("`Trainer` in bfloat16 (`bf16=True`)")
def bf16(s: Subject) -> None:
    model, environment = s.load(), dict(os.environ)
    try:
        trainer(s, model, per_device_train_batch_size=4, bf16=True).train()
    finally:  # transformers 4.57 sets the precision of all later trainers
        os.environ.clear()
        os.environ.update(environment)
    expected, start = expected_weights(s, [ROWS]), s.reference().w
    for name, weight in model.named_parameters():
        step, wanted = weight.detach().double() - start[name], expected[name].detach() - start[name]
        assert (step - wanted).norm() < 0.1 * wanted.norm() + 1e-6, name
