"""Evaluations of a stick-breaking model with and without skipping, for `eval.benchmarks.forward_skipping`."""

import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from eval.checkpoint.command import write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.results import results_file, run_folder
from eval.checkpoint.suite import run_lm_eval
from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.train.build import load_model
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.reading import reading

SPARE = 8  # tokens by which a decoded text may be longer than its tokens
WITHOUT = "model.mixer.stickbreaking.skip_below=0"


def texts_of(tokens: list[int], length: int, tokenizer: TextTokenizer) -> list[str]:
    """Cut tokens into texts of `length` tokens, BOS included."""
    size = length - 1 - SPARE
    return [tokenizer.decode(tokens[first : first + size]) for first in range(0, len(tokens) - size + 1, size)]


def definition(texts: list[str], length: int) -> dict[str, Any]:
    """Return an lm-eval task that reads whole texts."""
    return {
        "task": f"texts@{length}",
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list([{"text": text} for text in texts])}),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }


def evaluate(lm: PackedLM, texts: list[str]) -> tuple[float, float]:
    """Return the seconds of an evaluation through lm-eval, and bits per byte."""
    began = time.perf_counter()
    (result,) = run_lm_eval(lm, [definition(texts, lm.length)], TaskManager(include_defaults=False))
    return time.perf_counter() - began, result.value


def measure(
    run: Path, tokens_of: Path, lengths: list[int], tokens: int, repeats: int, groups: Groups
) -> dict[str, Any]:
    """Raises UserError if the model has no stick-breaking attention, or if the documents are too short."""
    with reading(run, groups, "RUN") as checkpoint:
        config = saved_config(checkpoint)
        if "stickbreaking" not in config.model.used:
            raise UserError(f"{run} has no stick-breaking attention, so nothing is skipped")
        models = {
            name: load_model(checkpoint, groups, changes=keys)[0]
            for name, keys in (("with", []), ("without", [WITHOUT]))
        }
        tokenizer = TextTokenizer.of_checkpoint(checkpoint)
    words = (token for text in read_documents(tokens_of) for token in tokenizer.encode(text))
    read = list(islice(words, tokens))
    if len(read) < lengths[-1]:
        raise UserError(f"--lengths: {lengths[-1]:,} tokens exceed the {len(read):,} tokens of --texts")
    found: dict[str, Any] = {}
    for length in lengths:
        texts = texts_of(read, length, tokenizer)
        lms = {name: PackedLM(model, tokenizer, length, batch_tokens=length) for name, model in models.items()}
        for lm in lms.values():
            evaluate(lm, texts[:2])
        runs = [{name: evaluate(lm, texts) for name, lm in lms.items()} for _ in range(repeats)]
        seconds = {name: median(one[name][0] for one in runs) for name in lms}
        bits = {name: runs[0][name][1] for name in lms}
        found[str(length)] = {"texts": len(texts), "seconds": seconds, "bits_per_byte": bits}
    about = {"kind": "skipping", "run": run_folder(checkpoint).resolve().name, "checkpoint": checkpoint.name}
    result = about | {"texts": tokens_of.name, "tokens": len(read), "repeats": repeats, "lengths": found}
    file = results_file(checkpoint)
    write(file.with_name(f"skipping-{file.name}"), result)
    return result
