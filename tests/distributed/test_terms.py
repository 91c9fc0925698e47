"""Terms beside the losses: the z-loss and a mixer's own, against plain torch in float64 and under tensor parallelism."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.jobs import make_batch
from tests.distributed.terms_jobs import SIZE_WEIGHT, Z_WEIGHT
from tests.models import MODELS
from tests.plain_model import plain_logits, rms
from tests.pool import Pool
from tests.train.ranks import Ranks

# 500 rows are padded to 512 by one rank and by two.
MODEL = replace(MODELS["softmax"], vocab_size=500, num_layers=1)


@pytest.fixture(scope="module")
def alone(pool1: Pool) -> dict:
    return pool1.run("tests.distributed.terms_jobs:passed", model=MODEL)[0]


def test_values_and_gradients_are_plain_torchs(alone: dict) -> None:
    tokens, layout, labels = make_batch([0, 1])
    w = {name: weight.double().requires_grad_() for name, weight in alone["weights"].items()}
    logits = plain_logits(w, MODEL, tokens, layout)
    z = (logits.logsumexp(-1).square() * (labels != -100)).sum()
    x = rms(w["embedding.weight"][tokens], w["blocks.0.attention_norm.weight"], MODEL.norm_eps)
    size = (x @ w["blocks.0.attention.qkv.weight"][: MODEL.hidden_size].T).square().sum()
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    assert alone["terms"] == pytest.approx({"z_loss": z.item(), "size": size.item()}, rel=1e-5)
    assert alone["loss"] == pytest.approx(loss.item(), rel=1e-5)
    (loss + Z_WEIGHT * z + SIZE_WEIGHT * size).backward()
    for name, weight in w.items():
        scale = weight.grad.abs().max()
        torch.testing.assert_close(alone["gradients"][name].double(), weight.grad, rtol=0, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize(("sequence", "whole"), [(False, False), (True, False), (True, True)])
def test_tensor_parallel_ranks_have_the_same(alone: dict, sequence: bool, whole: bool, pool2: Pool) -> None:
    """whole: the blocks are compiled, with the sum over heads in their graph."""
    answers = pool2.run(
        "tests.distributed.terms_jobs:differences",
        model=MODEL,
        expected=alone["gradients"],
        tensor=2,
        sequence=sequence,
        whole=whole,
    )
    for found in answers:
        assert found["terms"] == pytest.approx(alone["terms"], rel=1e-5)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert max(found["errors"].values()) < 1e-5, found["errors"]


def test_compiled_parts_have_the_same(alone: dict, pool1: Pool) -> None:
    (found,) = pool1.run("tests.distributed.terms_jobs:passed", model=MODEL, compiled=True)
    assert found["terms"] == pytest.approx(alone["terms"], rel=1e-5)
    for name, gradient in alone["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_a_run_logs_it_and_trains_with_it(corpus: Path, tmp_path: Path) -> None:
    """Two ranks log the mean of ln²Z over all target tokens: one rank's, but for rounding. With a weight the norm differs."""
    found = {}
    for name, count, weight in (("one", 1, 1e-3), ("two", 2, 1e-3), ("none", 1, 0.0)):
        keys = [f"data.path={corpus}", "train.max_steps=3", "train.eval_every=0", "train.save_every=0"]
        ranks = Ranks([*keys, f"train.z_loss={weight}"], tmp_path / name, count)
        ranks.finish()
        found[name] = [record for record in ranks.records() if "loss" in record]
    # ln²Z of the first step: logits are nearly 0, so that Z is nearly the size of the vocabulary.
    first = found["one"][0]["term/z_loss"]
    assert first == pytest.approx(torch.tensor(1024.0).log().square().item(), rel=0.05)
    assert [r["term/z_loss"] for r in found["two"]] == pytest.approx([r["term/z_loss"] for r in found["one"]], rel=1e-4)
    assert "term/z_loss" not in found["none"][0]
    assert found["none"][0]["loss"] == found["one"][0]["loss"]
    assert found["none"][0]["grad_norm"] != found["one"][0]["grad_norm"]
