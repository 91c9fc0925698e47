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
    found[folder] = {"logits": logits, "text": text.tolist(), "ids": ids, "beams": tuple(beams.shape)}
assert not any(name.split(".")[0] in ("ssscale", "megatron", "deepspeed") for name in sys.modules)
torch.save(found, sys.argv[2])
