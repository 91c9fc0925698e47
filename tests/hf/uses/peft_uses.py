"""Adapters of PEFT. A merged adapter must equal the reference with W + B A · alpha / r."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tests.hf.uses.caches import GREEDY
from tests.hf.uses.subject import PROMPTS, TEXTS, TRUST, Subject, equal, refused, same, use
from tests.hf.uses.training import ROWS, check_weights, trainer

TARGETS = ["qkv", "down"]


def adapted(s: Subject, **settings: Any) -> Any:
    """Returns the model with adapters whose B is not zero."""
    config = LoraConfig(**({"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "target_modules": TARGETS} | settings))
    model = get_peft_model(s.load(), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def merged(s: Subject, model: Any) -> Any:
    """Returns the reference with the adapters of the model."""
    reference = s.reference()
    named = dict(model.named_parameters())
    for name, weight in named.items():
        if "lora_A" in name:
            target = name.split("base_model.model.")[1].split(".lora_A")[0] + ".weight"
            change = named[name.replace("lora_A", "lora_B")] @ weight
            reference.w[target] = reference.w[target] + 3.0 * change.detach().double()
    return reference


@use('LoRA with `task_type="CAUSAL_LM"`')
def lora(s: Subject) -> None:
    model = adapted(s)
    expected = merged(s, model)(TEXTS[0]).logits
    equal(model(input_ids=torch.tensor([TEXTS[0]])).logits[0], expected)
    assert (expected - s.reference()(TEXTS[0]).logits).abs().max() > 0.1
    with model.disable_adapter():
        equal(model(input_ids=torch.tensor([TEXTS[0]])).logits[0], s.reference()(TEXTS[0]).logits)


@use("LoRA, `generate`")
def lora_generate(s: Subject) -> None:
    model = adapted(s)
    inputs = s.tokenizer(PROMPTS[0], return_tensors="pt")
    found = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    same(found, merged(s, model).continued(inputs["input_ids"][0].tolist(), 9))


@use('LoRA on all linear layers (`target_modules="all-linear"`)')
def all_linear(s: Subject) -> None:
    model = adapted(s, target_modules="all-linear")
    targets = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    same(targets, {"qkv", "out", "gate_up", "down"})
    equal(model(input_ids=torch.tensor([TEXTS[0]])).logits[0], merged(s, model)(TEXTS[0]).logits)


@use("LoRA, `merge_and_unload`")
def merge(s: Subject) -> None:
    model = adapted(s)
    reference = merged(s, model)
    plain = model.merge_and_unload()
    same(type(plain).__name__, "SSScaleForCausalLM")
    check_weights(plain, reference.w)
    plain.save_pretrained(s.scratch)
    equal(s.reference(s.scratch)(TEXTS[0]).logits, reference(TEXTS[0]).logits)


@use("LoRA, saved and loaded")
def lora_saved(s: Subject) -> None:
    model = adapted(s)
    model.save_pretrained(s.scratch)
    files = {file.name for file in Path(s.scratch).iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    again = PeftModel.from_pretrained(s.load(), s.scratch)
    equal(again(input_ids=torch.tensor([TEXTS[0]])).logits[0], merged(s, model)(TEXTS[0]).logits)


def check_lora_training(s: Subject, inputs_require_grads: bool = False, **settings: Any) -> None:
    model = adapted(s)
    if inputs_require_grads:
        model.enable_input_require_grads()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    reference = merged(s, model)
    # The step of A and B, with gradients that pass through the merged weight in float64.
    factors: dict[str, Tensor] = {}
    for name, weight in before.items():
        if "lora" in name:
            factors[name] = weight.double().requires_grad_()
    base = s.reference()
    for name in factors:
        if "lora_A" in name:
            target = name.split("base_model.model.")[1].split(".lora_A")[0] + ".weight"
            reference.w[target] = base.w[target] + 3.0 * factors[name.replace("lora_A", "lora_B")] @ factors[name]
    gradients = torch.autograd.grad(reference.loss(ROWS), list(factors.values()))
    expected = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(factors.items(), gradients)}
    trainer(s, model, gradient_accumulation_steps=2, label_names=["labels"], **settings).train()
    for name, weight in model.named_parameters():
        equal(weight, expected.get(name, before[name]), name)


@use("LoRA with `Trainer`: only the adapters change")
def lora_training(s: Subject) -> None:
    check_lora_training(s)


@use("LoRA with `Trainer` and gradient checkpointing")
def lora_checkpointing(s: Subject) -> None:
    check_lora_training(s, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


@use("LoRA with reentrant gradient checkpointing and `enable_input_require_grads`")
def lora_reentrant(s: Subject) -> None:
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    check_lora_training(s, inputs_require_grads=True, **settings)


@use('LoRA with `task_type="SEQ_CLS"`')
def lora_classifier(s: Subject) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(s.folder, **TRUST, num_labels=3)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=TARGETS)
    model = get_peft_model(model, config)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("score" in name for name in trained)
    score = next(weight for name, weight in model.named_parameters() if "score" in name and weight.requires_grad)
    found = model.eval()(input_ids=torch.tensor([TEXTS[0]])).logits
    equal(found[0], s.reference()(TEXTS[0]).states[-1][-1] @ score.detach().double().T)


@use("prompt tuning")
def prompt_tuning(s: Subject) -> None:
    model = get_peft_model(s.load(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    prompt = next(weight for name, weight in model.named_parameters() if weight.requires_grad).detach().double()
    found = model(input_ids=torch.tensor([TEXTS[0]])).logits[0]
    reference = s.reference()
    expected = reference(torch.cat((prompt, reference.embed(TEXTS[0])))).logits
    equal(found[-len(TEXTS[0]) :], expected[-len(TEXTS[0]) :])


@use("prefix tuning")
def prefix_tuning(s: Subject) -> None:
    model = get_peft_model(s.load(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    ids = torch.tensor([TEXTS[0]])
    found = model(input_ids=ids).logits
    # The same keys and values, given by hand.
    prefix = next(weight for name, weight in model.named_parameters() if weight.requires_grad).detach()
    from transformers import DynamicCache

    cache, layers = DynamicCache(), prefix.view(4, 4, 2, 8).transpose(0, 1).transpose(1, 2)
    for layer in range(2):
        cache.update(layers[2 * layer][None], layers[2 * layer + 1][None], layer)
    equal(found, s.model(ids, past_key_values=cache).logits)


@use("LoRA on the embedding and the head")
def lora_embedding(s: Subject) -> str | None:
    if not s.model.config.tie_word_embeddings:
        model = adapted(s, target_modules=["head"])
        equal(model(input_ids=torch.tensor([TEXTS[0]])).logits[0], merged(s, model)(TEXTS[0]).logits)
    model = adapted(s, target_modules=["embedding"])
    named = dict(model.named_parameters())
    a = next(weight for name, weight in named.items() if "lora_embedding_A" in name).detach().double()
    b = next(weight for name, weight in named.items() if "lora_embedding_B" in name)
    with torch.no_grad():
        b.copy_(0.1 * torch.ones_like(b))
    reference = s.reference()
    x = reference.embed(TEXTS[0]) + 3.0 * (b.detach().double() @ a).T[torch.tensor(TEXTS[0])]
    equal(model(input_ids=torch.tensor([TEXTS[0]])).logits[0], reference(x).logits)
    return None


@use("LoRA on a layer that the model does not have")
def wrong_target(s: Subject) -> str:
    text = refused(lambda: adapted(s, target_modules=["q_proj"]), "q_proj", "not found")
    return text
