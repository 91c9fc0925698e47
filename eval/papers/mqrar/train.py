"""Trains the models of one core on one number of pairs, with all learning rates at once. Resumes at any step."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eval.checkpoint.command import write
from eval.papers.mqrar.model import Bank
from eval.papers.mqrar.recipe import Deadline, Recipe
from eval.papers.mqrar.task import TEST_SEED, Task
from ssscale.config.schema import ModelConfig, position_config
from ssscale.errors import UserError
from ssscale.json_object import read_json
from ssscale.parallel.groups import Groups

SOLVED = 0.99


def model_config(core: str, task: Task, width: int = 256, head_dim: int | None = None, layers: int = 2) -> ModelConfig:
    """Return the config of a model with one head, which by default is as wide as the model.

    The feed-forward width of 8/3 times the model's width is our choice.
    """
    return ModelConfig(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=-(-8 * width // 3 // 16) * 16,
        num_heads=1,
        head_dim=head_dim,
        vocab_size=task.vocab_size,
        init_std=width**-0.5,  # our choice. With 0.02, small models learn far later.
        mixers=[core],
        position=position_config("rope" if core == "softmax" else "nope"),
    )


def _losses(bank: Bank, x: Tensor, answers: Tensor) -> Tensor:
    """Return the mean loss of each model, [M]. x: output of `Bank.hidden`. answers: [B, R]."""
    logits = bank.read_out(x, len(answers)).float()
    every = answers.expand(bank.count, -1, -1)
    losses = F.cross_entropy(logits.flatten(0, 2), every.flatten(), reduction="none")
    return losses.unflatten(0, (bank.count, -1)).mean(1)


class Experiment:
    """The training for one point of Figure 3. The result goes to `file`, the state of a stopped training next to it."""

    def __init__(self, config: ModelConfig, task: Task, recipe: Recipe, groups: Groups, file: Path) -> None:
        self.config, self.task, self.recipe, self.groups, self.file = config, task, recipe, groups, file
        self.state_file = file.with_suffix(".safetensors")
        dtype = torch.bfloat16 if groups.device.type == "cuda" else torch.float32
        self.bank = Bank(config, len(recipe.lrs), groups, dtype, recipe.seed)
        models = [{"params": self.bank.of_model(index), "lr": lr} for index, lr in enumerate(recipe.lrs)]
        self.optimizer = torch.optim.AdamW(models, weight_decay=recipe.weight_decay, fused=True)
        self.rows = task.query_positions(groups.device)
        self._losses = _losses
        if groups.device.type == "cuda":
            self.compile_parts()
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        if self.state_file.is_file():
            self._load()

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that a resumed training must share with the stopped one."""
        core = self.config.mixers[0]
        return {"core": core, "width": self.config.hidden_size, **asdict(self.task), **asdict(self.recipe)}

    def has_result(self) -> bool:
        """Return whether the result is on file. Raises UserError if it is one of other settings."""
        if not self.file.is_file():
            return False
        before, identity = read_json(self.file), json.loads(json.dumps(self.identity))
        other = [key for key, value in identity.items() if before.get(key) != value]
        if other:
            what = ", ".join(f"{key}={before.get(key)}, not {identity[key]}" for key in other)
            raise UserError(f"{self.file} holds a result of {what}: give another --out, or remove it")
        return True

    def run(self, until: Deadline | None = None) -> bool:
        """Train until the task is solved, until the last step, or until the deadline has passed, when the state is saved.

        Returns whether the training has ended and the result is written.
        """
        while not self._finished():
            if until is not None and until.passed:
                self._save()
                return False
            began = time.monotonic()
            losses = self._train_step()
            if self.step % self.recipe.test_every == 0 or self.step == self.recipe.steps:
                self.history.append({"step": self.step, "accuracy": self.accuracy(), "loss": losses.tolist()})
            self.seconds += time.monotonic() - began
        self._write()
        return True

    def _finished(self) -> bool:
        solved = bool(self.history) and max(self.history[-1]["accuracy"]) >= SOLVED
        return solved or self.step >= self.recipe.steps

    def _train_step(self) -> Tensor:
        """Train one step. Returns the loss of each model, [M]."""
        recipe = self.recipe
        self.step += 1
        task, count = recipe.at(self.step, self.task)
        examples = task.examples(count, recipe.seed * 2**32 + self.step, self.groups.device)
        rows = task.query_positions(self.groups.device)
        losses = self._losses(self.bank, self.bank.hidden(examples.tokens, rows), examples.answers)
        losses.sum().backward()
        for group, lr in zip(self.optimizer.param_groups, recipe.lrs, strict=True):
            torch.nn.utils.clip_grad_norm_(group["params"], recipe.clip)
            group["lr"] = lr * recipe.factor(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.detach()

    def compile_parts(self) -> None:
        """Compile if the heads use `DenseCore`. Narrower heads run their own kernels."""
        if self.bank.layer.dense is not None:
            self.bank.compile_parts()
            self._losses = torch.compile(_losses, dynamic=True)  # the number of rows depends on the number of pairs

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Return the share of test questions that each model answers correctly."""
        right = torch.zeros(self.bank.count, dtype=torch.float64, device=self.groups.device)
        asked = 0
        for first in range(0, self.recipe.test_examples, self.recipe.batch):
            count = min(self.recipe.batch, self.recipe.test_examples - first)
            examples = self.task.examples(count, TEST_SEED + first, self.groups.device)
            found: Tensor = self.bank(examples.tokens, self.rows).argmax(-1)
            right += (found == examples.answers).sum((1, 2))
            asked += examples.answers.numel()
        return [float(x) / asked for x in right]

    def _save(self) -> None:
        optimizer = self.optimizer.state_dict()
        tensors = {f"bank/{name}": weight for name, weight in self.bank.state_dict().items()}
        for index, moments in optimizer["state"].items():
            tensors |= {f"optimizer/{index}/{name}": moment for name, moment in moments.items()}
        values = {"identity": self.identity, "groups": optimizer["param_groups"]}
        values |= {"progress": [self.step, self.seconds, self.history]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.state_file.with_suffix(".tmp")
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"values": json.dumps(values)})
        os.replace(temporary, self.state_file)

    def _load(self) -> None:
        try:
            with safe_open(self.state_file, framework="pt", device=str(self.groups.device)) as opened:
                values = json.loads(opened.metadata()["values"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self.state_file} is broken ({error}): remove it to train from the beginning") from error
        if values["identity"] != json.loads(json.dumps(self.identity)):
            return  # a state of other settings is ignored, and overwritten when this training stops
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                index, _, name = rest.partition("/")
                moments.setdefault(int(index), {})[name] = tensor
        bank = {name.removeprefix("bank/"): tensor for name, tensor in tensors.items() if name.startswith("bank/")}
        self.bank.load_state_dict(bank)
        self.optimizer.load_state_dict({"state": moments, "param_groups": values["groups"]})
        self.step, self.seconds, self.history = values["progress"]

    def _write(self) -> None:
        accuracy = self.history[-1]["accuracy"]
        best = max(range(len(accuracy)), key=accuracy.__getitem__)
        result = self.identity | {
            "trained_steps": self.step,
            "accuracy": accuracy,
            "best": accuracy[best],
            "best_lr": self.recipe.lrs[best],
            "history": self.history,
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if self.groups.device.type == "cuda" else "cpu",
        }
        write(self.file, result, indent=1)
        self.state_file.unlink(missing_ok=True)
