"""MQRAR: its rules against a plain loop, the batched models against the decoder, training that resumes and learns."""

import json
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_reference

from eval.papers.attention_weights import recorded, weights
from eval.papers.mqrar.__main__ import main
from eval.papers.mqrar.model import Bank, DenseCore
from eval.papers.mqrar.recipe import Deadline, Recipe
from eval.papers.mqrar.task import Task
from eval.papers.mqrar.train import Experiment, model_config
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder

CPU = torch.device("cpu")
CORES = ("softmax", "stickbreaking")


@pytest.mark.parametrize("task", [Task(5, 40, 9, 3), Task(1, 4, 1, 2), Task(192)])
def test_answers_are_the_latest_values(task):
    examples = task.examples(3, seed=4, device=CPU)
    assert torch.equal(examples.tokens, task.examples(3, seed=4, device=CPU).tokens)
    rows = task.query_positions(CPU).tolist()
    assert rows[-1] == task.length - 2
    for tokens, answers in zip(examples.tokens.tolist(), examples.answers.tolist(), strict=True):
        memory = {}
        for key, value in zip(tokens[: 2 * task.pairs : 2], tokens[1 : 2 * task.pairs : 2], strict=True):
            assert key < task.num_keys <= value < task.vocab_size
            assert memory.setdefault(key, value) is value, "keys must be distinct"
        expected = []
        for row in rows:
            expected.append(memory[tokens[row]])
            memory[tokens[row]] = tokens[row + 1]
        assert answers == expected


@pytest.mark.parametrize(
    ("key", "bad"), [("pairs", (0, 40)), ("pairs", (10, 40, 9)), ("length", (5, 10)), ("length", (5, 13))]
)
def test_impossible_tasks(key, bad):
    with pytest.raises(UserError, match=f"^{key}="):
        Task(*bad)


@pytest.mark.parametrize("core", CORES)
def test_bank_is_the_decoder(core, groups):
    task = Task(3, 14, 100, 28)
    config = model_config(core, task, 32, 16)
    bank = Bank(config, 2, groups)
    with torch.no_grad():
        for name in bank.names:
            bank.weights(name)[1].mul_(1.3)
    tokens = task.examples(2, 0, CPU).tokens
    rows = torch.tensor([5, 8, 13])
    found = bank(tokens, rows)
    assert found.shape == (2, 2, 3, 128)
    for index in range(2):
        decoder = Decoder(config, groups, task.length)
        assert sorted(bank.names) == sorted(name for name, _ in decoder.named_parameters())
        with torch.no_grad():
            for name, weight in decoder.named_parameters():
                weight.copy_(bank.weights(name)[index])
        layout = PackedLayout.from_lengths([task.length] * 2)
        exact = decoder(tokens.flatten(), layout).unflatten(0, (2, -1))[:, rows]
        torch.testing.assert_close(found[index], exact, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("std", [1.0, 20.0])
def test_wide_heads(core, std):
    q, k, v = (torch.randn(3 * 17, 2, 160, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q = (q * std).requires_grad_()
    layout = PackedLayout.from_lengths([17] * 3)
    o = DenseCore(core)(q, k, v, layout)
    o.sum().backward()
    grad, q.grad = q.grad, None
    wide = [x.double() for x in (q, k, v)]
    if core == "stickbreaking":
        exact = stickbreaking_reference(*wide, cu_seqlens_q=layout.cu_seqlens)[0]
    else:
        parts = zip(*(x.split(17) for x in wide), strict=True)
        future = torch.ones(17, 17, dtype=torch.bool).triu(1)
        exact = torch.cat(
            [
                torch.einsum(
                    "nij,jnh->inh",
                    (torch.einsum("inh,jnh->nij", a, b) * 160**-0.5).masked_fill(future, -torch.inf).softmax(-1),
                    c,
                )
                for a, b, c in parts
            ]
        )
    exact.sum().backward()
    assert grad.isfinite().all()
    torch.testing.assert_close(o.double(), exact, atol=3e-5 * std, rtol=1e-4)
    torch.testing.assert_close(grad, q.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("core", CORES)
def test_recorded_weights(core, groups):
    """The weights that a core gives away through values of 0 and 1 are those of the definition."""
    bank = Bank(model_config(core, Task(3, 14, 4, 4), 32, 8), 1, groups)
    with recorded([bank.layer]) as calls:
        bank(Task(3, 14, 4, 4).examples(1, 0, CPU).tokens, torch.tensor([13]))
    assert len(calls) == 2
    q, k = calls[1].q.double(), calls[1].k.double()
    z = torch.einsum("inh,jnh->nij", q, k) * 8**-0.5
    if core == "softmax":
        exact = z.masked_fill(torch.ones(14, 14, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    else:
        exact = torch.zeros_like(z)
        for i in range(14):
            stick = 1.0
            for j in reversed(range(i)):
                beta = z[0, i, j].sigmoid()
                exact[0, i, j], stick = stick * beta, stick * (1 - beta)
    torch.testing.assert_close(weights(calls[1]).double(), exact, atol=1e-5, rtol=1e-4)


def test_short_sequences_come_first(groups, tmp_path):
    """Their shares of the steps, a batch's tokens, and nothing longer or with more pairs than the task."""
    recipe, task = Recipe(steps=1000), Task(32)
    first, count = recipe.at(1, task)
    assert (first.length, first.pairs, first.num_keys, count * first.length) == (8, 2, 4096, 64 * 768)
    assert [recipe.at(step, task)[0].length for step in (150, 151, 251, 350, 351)] == [8, 16, 64, 64, 768]
    assert recipe.at(1000, task) == (task, 64)
    assert recipe.at(151, Task(3, 768)) == (Task(3, 768), 64)
    assert recipe.at(251, Task(16, 64)) == (Task(16, 64), 64)
    # The loss of a first step on them, by hand.
    recipe = Recipe(steps=2, batch=3, lrs=(1e-3,), short_first=((0.5, 8, 2),))
    experiment = Experiment(
        model_config("softmax", Task(5, 24, 9, 4), 16, 8), Task(5, 24, 9, 4), recipe, groups, tmp_path
    )
    short = Task(2, 8, 9, 4)
    examples = short.examples(9, 1, CPU)
    logits = experiment.bank(examples.tokens, short.query_positions(CPU))
    exact = torch.nn.functional.cross_entropy(logits[0].flatten(0, 1), examples.answers.flatten())
    torch.testing.assert_close(experiment._train_step()[0], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("head_dim", [None, 32])
def test_bank_on_a_gpu(core, head_dim, groups, tmp_path):
    """bfloat16 products, heads of 256 in plain torch and of 32 by the kernels, against float32 on the CPU."""
    task = Task(8, 64, 24, 24)
    config = model_config(core, task, 256, head_dim)
    recipe = Recipe(steps=4, batch=4, lrs=(1e-3, 1e-2), test_every=2, test_examples=6)
    experiment = Experiment(config, task, recipe, groups, tmp_path / "a.json")
    plain = Bank(config, 2, replace(groups, device=CPU))
    tokens, rows = task.examples(3, 1, CPU).tokens, task.query_positions(CPU)
    exact = plain(tokens, rows)
    found = experiment.bank(tokens.to(groups.device), rows.to(groups.device)).float().cpu()
    assert (found - exact).abs().max() <= 0.03 * exact.abs().max()
    experiment._train_step()
    assert not experiment.run(Deadline(0))
    again = Experiment(config, task, recipe, groups, tmp_path / "a.json")
    assert again.step == 1
    assert again.run()
    losses = [loss for entry in again.history for loss in entry["loss"]]
    assert np.isfinite(losses).all()


def test_stopped_training_goes_on(groups, tmp_path):
    task = Task(2, 8, 4, 4)
    recipe = Recipe(steps=6, batch=4, lrs=(1e-3, 1e-2), test_every=3, test_examples=6)
    config = model_config("softmax", task, 16, 8)
    straight = Experiment(config, task, recipe, groups, tmp_path / "a.json")
    assert straight.run()
    stopped = Experiment(config, task, recipe, groups, tmp_path / "b.json")
    for _ in range(4):
        stopped._train_step()
    assert not stopped.run(Deadline(0))
    assert not (tmp_path / "b.json").exists()
    again = Experiment(config, task, recipe, groups, tmp_path / "b.json")
    assert again.step == 4
    assert again.run()
    assert not (tmp_path / "b.safetensors").exists()
    for name in straight.bank.names:
        for one, other in zip(straight.bank.weights(name), again.bank.weights(name), strict=True):
            assert torch.equal(one, other)
    other = Experiment(config, task, replace(recipe, batch=5), groups, tmp_path / "b.json")
    assert other.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
def test_compiled_training_is_the_same(core, groups, tmp_path):
    """What a GPU runs, on the CPU: other pairs, which have other rows, and passes without gradients too."""
    for pairs in (2, 5):
        task = Task(pairs, 32, 16, 16)
        recipe = Recipe(3, 4, short_first=((0.4, 16, 2),), lrs=(1e-3, 1e-2), test_every=3, test_examples=4)
        config = model_config(core, task, 160)
        plain, compiled = (Experiment(config, task, recipe, groups, tmp_path / f"{name}{pairs}.json") for name in "ab")
        compiled.compile_parts()
        assert plain.run()
        assert compiled.run()
        losses = (torch.tensor(experiment.history[-1]["loss"]) for experiment in (compiled, plain))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for name in plain.bank.names:
            for one, other in zip(plain.bank.weights(name), compiled.bank.weights(name), strict=True):
                # Where a gradient is nearly 0, Adam's step is as large as elsewhere.
                assert (one - other).norm() <= 1e-4 * one.norm(), name


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mqrar", *map(str, arguments)])
    main()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--width", 7], "--width must be even and at least 2"),
        (["--width", 0], "--width must be even and at least 2"),
        (["--minutes", "nan"], "--minutes must be at least 0, not nan"),
        (["--minutes", -1], "--minutes must be at least 0, not -1"),
        (["--values", 0], "num_values=0 must be at least 1"),
        (["--seed", 256], "--seed=256 must be from 0 to 255"),
    ],
)
def test_bad_input(arguments, said, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "curve", "--out", tmp_path, *arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_commands_in_miniature(groups, tmp_path, monkeypatch, capsys):
    """Stick-breaking learns two pairs; figures of both come out of the result files."""
    from eval.papers.figures import recall

    size = ["--out", tmp_path, "--length", 16, "--keys", 4, "--values", 4, "--width", 32, "--batch", 32]
    call(monkeypatch, "curve", *size, "--pairs", 2, "--cores", "stickbreaking", "--steps", 250)
    result = json.loads((tmp_path / "stickbreaking-002.json").read_text())
    assert result["best"] > 0.95
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "curve", *size, "--pairs", 2, "--cores", "stickbreaking", "--steps", 300)
    assert stop.value.code == 2
    assert "stickbreaking-002.json holds a result of steps=250, not 300: give another --out" in capsys.readouterr().err
    call(monkeypatch, "curve", *size, "--pairs", 2, "--cores", "stickbreaking", "--steps", 250)
    assert json.loads((tmp_path / "stickbreaking-002.json").read_text()) == result
    assert recall.before(result) is None  # 250 steps are one test
    tests = [{"step": step, "accuracy": [0.1, step / 1000]} for step in (250, 500, 750)]
    stages = [[0.5, 8, 2], [0.1, 64, 2]]  # of 1,000 steps
    assert recall.before({"steps": 1000, "short_first": stages, "history": tests}) == (0.5, 64)
    monkeypatch.setattr("eval.papers.mqrar.experiments.LETTERS", Task(4, 20, 26, 10))
    call(monkeypatch, "picture", *size, "--steps", 2)
    picture = json.loads((tmp_path / "attention-softmax.json").read_text())
    assert len(picture["tokens"]) == 20
    assert np.array(picture["weights"]).shape == (2, 20, 20)
    assert np.array(picture["weights"]).sum(-1) == pytest.approx(1, abs=2e-3)
    for figure in (recall.curve(tmp_path), recall.attention(tmp_path)):
        figure.savefig(tmp_path / "figure.png")
        plt.close(figure)
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "curve", *size, "--pairs", 3, "--minutes", 0)
    assert stop.value.code == 75
    capsys.readouterr()
    for word, bad in (
        ("--pairs", ["--pairs", "a"]),
        ("--cores", ["--pairs", 3, "--cores", "ssmax"]),
        ("pairs=5", ["--pairs", 5]),
    ):
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, "curve", *size, *bad)
        assert stop.value.code == 2
        assert word in capsys.readouterr().err
