"""A model that counts what an evaluation would compute, for `eval.benchmarks.suite_tokens`."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.errors import DataError
from data_prep.tokenize import describe
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

    def _generate(self, prompts: dict[int, list[int]], options: dict[str, Any]) -> list[str]:
        self.passes += 1
        self.requests += len(prompts)
        self.counted += sum(map(len, prompts.values()))
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


def show_counts(tokenizer_file: Path, tasks: list[str], eval_data: str, sizes: tuple[int, int, int, int]) -> None:
    """Prints the table. tasks: []: all whose data is there. sizes: length, tokens, rows and cached tokens (`CountingLM`)."""
    try:
        info = describe(str(tokenizer_file))
    except DataError as error:
        raise UserError(str(error)) from error
    tasks = tasks or [task for task in FILES if missing(task, eval_data) is None]
    if not tasks:
        raise UserError(f"--eval-data={eval_data} has the data of none of the tasks {', '.join(FILES)}")
    lm = CountingLM(TextTokenizer(str(tokenizer_file), info.bos_id, info.eos_id), *sizes)
    print("| task | items | requests | tokens | passes | decoding steps | CPU s |\n|---|---|---|---|---|---|---|")
    for task in tasks:
        found = count(lm, task, eval_data)
        whole = " | ".join(f"{found[key]:,}" for key in ("items", "requests", "tokens", "passes", "steps"))
        print(f"| {task} | {whole} | {found['seconds']:.0f} |", flush=True)
