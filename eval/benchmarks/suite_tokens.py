"""Counts what an evaluation computes, without a trained model or a GPU: requests, tokens and passes of each task.

    python -m eval.benchmarks.suite_tokens --tokenizer tokenizer.json [--tasks NAME,...] [--eval-data data/eval]
        [--length 2048] [--tokens 131072] [--rows 34000] [--cached 1000000]

Requests are made, grouped and packed as by launch/evaluate.py, and every pass is counted instead of computed. --tokens,
--rows and --cached bound the tokens of a pass, its rows of logits, and the cache during generation; the defaults are those
of a 162M model on an H200. A shared context counts once.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.errors import DataError
from data_prep.tokenize import describe
from eval.checkpoint.command import Parser, sentences
from eval.checkpoint.environment import prepare
from eval.checkpoint.harness import PackedLM, Scores
from eval.checkpoint.questions import Question
from eval.checkpoint.suite import find_tasks, run_tasks
from eval.checkpoint.tasks.local.files import FILES, missing
from eval.checkpoint.text import TextTokenizer
from ssscale.config.schema import ModelConfig
from ssscale.errors import UserError
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import initialize


class CountingLM(PackedLM):
    """Counts passes and tokens. Answers are random."""

    def __init__(self, tokenizer: TextTokenizer, length: int, tokens: int, rows: int, cached: int) -> None:
        sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_heads": 1}
        model = ModelConfig(**sizes, vocab_size=tokenizer.vocab_size, tie_embeddings=True)
        super().__init__(Decoder(model, initialize(), length), tokenizer, length, batch_tokens=tokens)
        self.batch_rows, self.cached_tokens = rows, cached
        self.requests = self.passes = self.counted = self.steps = 0

    def _score(self, questions: list[Question], answers: list[np.ndarray]) -> Scores:
        self.passes += 1
        families = {question.family: question.header for question in questions if question.header}
        self.counted += sum(families.values())
        for question in questions:
            self.counted += len(question.context) - question.header + sum(len(answers[i]) - 1 for i in question.members)
        members = [index for question in questions for index in question.members]
        self.requests += len(members)
        counts = [len(answers[index]) for index in members]
        return Scores(
            members, counts, torch.randn(sum(counts), dtype=torch.float64), torch.zeros(sum(counts), dtype=torch.bool)
        )

    def _generate(self, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
        self.passes += 1
        self.requests += len(prompts)
        self.counted += sum(map(len, prompts))
        self.steps += options["max_gen_toks"]
        return [""] * len(prompts)


def count(lm: CountingLM, task: str, eval_data: str) -> dict[str, float]:
    """Return the counts of one task. seconds: of the whole evaluation without a model, on this machine's CPU."""
    lm.requests = lm.passes = lm.counted = lm.steps = 0
    began = time.perf_counter()
    outcome = run_tasks(lm, [task], find_tasks([task], {"eval_data": eval_data}))
    outcome.check("")
    seconds = time.perf_counter() - began
    counts = {"items": outcome.results[0].items, "requests": lm.requests, "tokens": lm.counted, "passes": lm.passes}
    return counts | {"steps": lm.steps, "seconds": seconds}


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.suite_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tasks", help="comma-separated; by default all whose data is there")
    parser.add_argument("--eval-data", default="data/eval")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest text")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=34_000)
    parser.add_argument("--cached", type=int, default=1_000_000)
    options = parser.parse_args()
    prepare()
    with sentences():
        try:
            info = describe(str(options.tokenizer))
        except DataError as error:
            raise UserError(str(error)) from error
        there = [task for task in FILES if missing(task, options.eval_data) is None]
        tasks = options.tasks.split(",") if options.tasks else there
        if not tasks:
            raise UserError(f"--eval-data={options.eval_data} has the data of none of the tasks {', '.join(FILES)}")
        tokenizer = TextTokenizer(str(options.tokenizer), info.bos_id, info.eos_id)
        lm = CountingLM(tokenizer, options.length, options.tokens, options.rows, options.cached)
        print("| task | items | requests | tokens | passes | decoding steps | CPU s |\n|---|---|---|---|---|---|---|")
        for task in tasks:
            found = count(lm, task, options.eval_data)
            whole = " | ".join(f"{found[key]:,}" for key in ("items", "requests", "tokens", "passes", "steps"))
            print(f"| {task} | {whole} | {found['seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    with sentences():
        main()
