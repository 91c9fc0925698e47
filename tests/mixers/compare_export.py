"""compare_export.py RUN FOLDER: our logits and cached generation are those of the exported model in transformers."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ssscale.layout import PackedLayout
from ssscale.model.generate import generate
from ssscale.parallel.groups import initialize
from ssscale.train.build import load_for_inference

run, folder = map(Path, sys.argv[1:])
ours, config = load_for_inference(run, initialize())
theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
texts = [list(range(5, 42)), [9, 8, 700]]
with torch.no_grad():
    logits = ours(torch.tensor([t for text in texts for t in text]), PackedLayout.from_lengths(list(map(len, texts))))
    for text, found in zip(texts, logits.split(list(map(len, texts)))):
        torch.testing.assert_close(theirs(torch.tensor([text])).logits[0], found, rtol=1e-4, atol=1e-5)
new = generate(ours, texts, 6)
for text, found in zip(texts, new):
    expected = theirs.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False)[0, len(text) :]
    assert expected.tolist() == found, (expected.tolist(), found)
