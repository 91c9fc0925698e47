"""Writes the attention of trained MQRAR models on one sequence, for Figure 4 of arXiv:2410.17980."""

import json
from string import ascii_uppercase

import torch

from eval.checkpoint.command import write
from eval.papers.attention_weights import recorded, weights
from eval.papers.mqrar.model import Bank
from eval.papers.mqrar.task import TEST_SEED, Task
from eval.papers.mqrar.train import Experiment


def symbols(task: Task, tokens: list[int]) -> list[str]:
    """Return keys as letters and values as digits."""
    return [ascii_uppercase[t] if t < task.num_keys else str(t - task.num_keys) for t in tokens]


@torch.no_grad()
def write_picture(experiment: Experiment) -> None:
    """Add to the result file a test sequence, the answers of the best model, and its attention weights by layer."""
    task, bank, groups = experiment.task, experiment.bank, experiment.groups
    result = json.loads(experiment.file.read_text(encoding="utf-8"))
    best = result["accuracy"].index(result["best"])
    alone = Bank(bank.config, 1, groups, torch.float32)
    for name in bank.names:
        alone.weights(name)[0].copy_(bank.weights(name)[best])
    examples = task.examples(1, TEST_SEED - 1, groups.device)
    with recorded([alone.layer]) as calls:
        found = alone(examples.tokens, experiment.rows).argmax(-1)[0, 0]
    result |= {
        "tokens": symbols(task, examples.tokens[0].tolist()),
        "queries": experiment.rows.tolist(),
        "answers": symbols(task, examples.answers[0].tolist()),
        "found": symbols(task, found.tolist()),
        "weights": [[[round(x, 4) for x in row] for row in weights(call)[0].tolist()] for call in calls],
    }
    result["name"] = "softmax + RoPE" if bank.config.mixers == ["softmax"] else "stick-breaking"
    write(experiment.file, result)
