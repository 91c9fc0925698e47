"""Load exported folders as a stranger would: transformers alone, remote code. Arguments: inputs and output as .pt files."""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

given = torch.load(sys.argv[1])
found = {"version": transformers.__version__}
for folder in given["folders"]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mask = given["mask"]
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(given["tokens"], attention_mask=mask).logits
        text = model.generate(given["tokens"], attention_mask=mask, **settings)[:, mask.shape[1] :]
        beams = model.generate(given["tokens"], attention_mask=mask, **settings, num_beams=2)
    copy = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    assert all(weight.isfinite().all() for weight in copy.parameters())
    ids = tokenizer("the stick <|endoftext|>")["input_ids"]
    # As a user calls them: whatever the tokenizer returns goes into the model.
    greedy = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    written = [model.generate(**tokenizer(prompt, return_tensors="pt"), **greedy)[0] for prompt in given["prompts"]]
    together = model.generate(**tokenizer(given["prompts"], return_tensors="pt", padding=True), **greedy)
    inputs = tokenizer(given["prompts"][0], return_tensors="pt")
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    # Other tokenizers of the same texts return token types.
    types = torch.zeros_like(inputs["input_ids"])
    typed = model.generate(**inputs, token_type_ids=types, **greedy)[0]
    found[folder] = {"logits": logits, "text": text.tolist(), "ids": ids, "beams": tuple(beams.shape)}
    found[folder] |= {
        "inputs": sorted(inputs),
        "written": [row[-9:].tolist() for row in written],
        "together": together[:, -9:].tolist(),
        "typed": typed[-9:].tolist(),
        "loss": float(loss),
    }
assert not any(name.split(".")[0] in ("ssscale", "megatron", "deepspeed") for name in sys.modules)
torch.save(found, sys.argv[2])
