"""One process trains like plain torch; test_matrix.py has every parallel layout beside one process."""

from typing import Any

import pytest
import torch

from ssscale.config.schema import Config, ModelConfig
from ssscale.engine.deepspeed import parameter_groups
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from tests.distributed.jobs import LENGTH, ROWS, TRAIN, make_batch
from tests.models import MODELS
from tests.plain_model import plain_losses
from tests.pool import Pool


def plain_training(model: ModelConfig, groups: Groups, steps: int) -> dict[str, list[Any]]:
    """Losses and gradient norms by plain torch: one batch, torch's AdamW and clipping."""
    decoder = Decoder(model, groups, LENGTH)
    initialize_weights(decoder, model, groups, seed=3)
    weights = dict(decoder.named_parameters())
    optimizer = torch.optim.AdamW(parameter_groups(decoder, Config(model=model)), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    result: dict[str, list[Any]] = {"losses": [], "norms": []}
    for step in range(steps):
        tokens, layout, labels = make_batch([step * ROWS + i for i in range(ROWS)])
        loss = plain_losses(weights, model, tokens, layout, labels).sum() / (labels != -100).sum()
        loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(torch.nn.utils.clip_grad_norm_(decoder.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


@pytest.mark.parametrize("name", MODELS)
def test_one_process_trains_like_plain_torch(name: str, groups: Groups, pool1: Pool) -> None:
    expected = plain_training(MODELS[name], groups, 4)
    (ours,) = pool1.run(TRAIN, model=MODELS[name], microbatch=2)
    assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-4)
