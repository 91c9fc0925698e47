"""What transformers generates greedily from each export, as JSON: `python -m tests.serving.reference FOLDER FILE`.

Also the log-probabilities of each prompt's next token, in float32 and in bfloat16.
A process of its own, which knows neither vLLM nor this package: the exported code is the reference.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

NEW = 16
TEXT = "The stick breaks where it is"


def prompts() -> list[list[int]]:
    """Longer and shorter than a training row, a window and a block of the cache; the last two begin with the same 70."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1, 257, (n,), generator=generator).tolist() for n in (150, 41, 1, 7, 70)]
    shared = drawn.pop()
    return [*drawn, [*shared, 5, 6, 7], [*shared, 9]]


@torch.no_grad()
def next_token(model: Any) -> list[list[float]]:
    return [model(torch.tensor([row])).logits[0, -1].float().log_softmax(-1).tolist() for row in prompts()]


def main(folder: str, file: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = {}
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for export in sorted(Path(folder).iterdir()):
        model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True, dtype=torch.float32)
        text = AutoTokenizer.from_pretrained(export)(TEXT)["input_ids"]
        rows = [*prompts(), text]
        new = []
        for row in rows:
            # Without a mask, `generate` takes BOS for padding, which has the same id.
            inputs = {"inputs": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
            new.append(model.generate(**inputs, **settings)[0, len(row) :].tolist())
        found[export.name] = {"ids": new[:-1], "text": new[-1], "float32": next_token(model)}
        found[export.name]["bfloat16"] = next_token(model.to(torch.bfloat16))
    assert not any(name.split(".")[0] in ("ssscale", "ssscale_vllm", "vllm") for name in sys.modules)
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
