"""One exported model under one version of transformers, and what the uses need of it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hf.uses.reference import Reference

PROMPTS = ["the stick breaks where", "the soft max"]
TEXTS = [list(range(5, 27)), [0, 9], [0, 200, 3, 77, 8, 150, 299, 41]]
TRUST: dict[str, Any] = {"trust_remote_code": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Use:
    name: str
    run: Callable[["Subject"], "str | None"]
    slow: bool
    group: str


USES: list[Use] = []


def use(name: str, slow: bool = False) -> Callable[[Callable[["Subject"], "str | None"]], Any]:
    """Registers what a user does. The function fails, or returns the sentence that refuses the use, or None."""

    def register(run: Callable[["Subject"], "str | None"]) -> Callable[["Subject"], "str | None"]:
        USES.append(Use(name, run, slow, run.__module__.rpartition(".")[2]))
        return run

    return register


@dataclass
class Subject:
    """Folders: the export; the same in bfloat16; the export of another mixer; an empty one for what a use writes."""

    mixer: str
    folder: Path
    bfloat16: Path
    other: Path
    scratch: Path
    text_ids: int = 300  # entries of the tokenizer without the pad token
    kept: dict[str, Any] = field(default_factory=dict)

    def load(self, **settings: Any) -> Any:
        """Returns a model of its own."""
        return AutoModelForCausalLM.from_pretrained(self.folder, **TRUST, **settings)

    @functools.cached_property
    def model(self) -> Any:
        """The model that no use changes."""
        return self.load()

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def reference(self, folder: Path | None = None) -> Reference:
        return Reference(folder or self.folder, self.text_ids)

    def greedy(self, prompt: Sequence[int], new: int) -> list[int]:
        key = f"{list(prompt)}"
        if len(self.kept.get(key, [])) < new:
            self.kept[key] = self.reference().continued(prompt, max(new, 12))
        return self.kept[key][:new]


def padded(texts: Sequence[Sequence[int]], left: bool, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Returns ids and mask of a batch."""
    longest = max(map(len, texts))
    rows, masks = [], []
    for text in texts:
        pad, ones, zeros = [filler] * (longest - len(text)), [1] * len(text), [0] * (longest - len(text))
        rows.append(pad + list(text) if left else list(text) + pad)
        masks.append(zeros + ones if left else ones + zeros)
    return torch.tensor(rows), torch.tensor(masks)


def equal(found: Any, expected: Any, what: str = "", **tolerance: float) -> None:
    """Compares numbers to float32 rounding, in float64."""
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    torch.testing.assert_close(found, expected, **(tolerance or CLOSE), msg=lambda text: f"{what}: {text}")


def same(found: Any, expected: Any) -> None:
    """Compares tokens or other exact values."""
    found, expected = (x.tolist() if isinstance(x, Tensor) else x for x in (found, expected))
    assert found == expected, f"{found} is not {expected}"


def refused(action: Callable[[], Any], *words: str) -> str:
    """Returns the sentence of the error that the action raises. Fails if it has not these words."""
    try:
        action()
    except Exception as error:  # any error of transformers; its sentence is what is compared
        name, text = type(error).__name__, " ".join(str(error).split())
    else:
        raise AssertionError("nothing was refused")
    assert all(word in text for word in words), f"{name}: {text[:500]}"
    return text
