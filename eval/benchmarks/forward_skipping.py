"""Measures what skipping saves in evaluation: lm-eval on long texts, one at a time, with and without.

    python -m eval.benchmarks.forward_skipping RUN --texts FILE.jsonl[.zst] [--lengths 4096,8192,16384,32768]
        [--tokens 524288] [--repeats 3]

RUN is a trained stick-breaking model: how much is skipped depends on its training. The forward pass stops at a tile whose
queries have less than `skip_below` of their stick left. The paper reports evaluation that is 9.3 % faster at 16K, with a
batch size of 1 (arXiv:2410.17980, Section 4). Each length reads the same --tokens of the documents, in texts of that length.
A time is that of lm-eval's whole evaluation, the median of --repeats, of which each has one call with and one without; a
call before compiles the kernels. The command prints a table and writes RUN/eval/skipping-step-XXXXXXXX.json.
"""

import argparse
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from eval.checkpoint.command import Parser, sentences, whole_numbers, write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.environment import prepare
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.results import results_file, run_folder
from eval.checkpoint.suite import run_lm_eval
from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups, initialize
from ssscale.train.build import load_model
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.reading import reading

PAPER = {16_384: 9.3}  # percent
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


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.forward_skipping",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="held-out documents, or one text; also .zst")
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=524_288, help="tokens that each length reads")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prepare()
    with sentences():
        lengths = sorted(set(whole_numbers(options.lengths, "--lengths", 2 * SPARE)))
        if options.repeats < 1 or options.tokens < 1:
            raise UserError("--repeats and --tokens must be at least 1")
        found = measure(options.run, options.texts, lengths, options.tokens, options.repeats, initialize())
        print(
            "| length | texts | seconds | without skipping | faster, percent | the paper's | bits per byte | without |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for length, entry in found["lengths"].items():
            took, bits = entry["seconds"], entry["bits_per_byte"]
            faster = 100 * (took["without"] / took["with"] - 1)
            cells = f"{took['with']:.2f} | {took['without']:.2f} | {faster:.1f} | {PAPER.get(int(length), '–')}"
            print(f"| {length} | {entry['texts']} | {cells} | {bits['with']:.5f} | {bits['without']:.5f} |")


if __name__ == "__main__":
    with sentences():
        main()
