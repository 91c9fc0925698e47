"""The update in one pass on a GPU, within DeepSpeed's engine, beside DeepSpeed's own step with torch's fused AdamW.

`pytest -m gpu tests/gpu/test_update.py`: some 20 seconds, most of it imports.
"""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ssscale.config import load_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.optim.adamw import AdamW
from ssscale.parallel.groups import Groups

pytestmark = pytest.mark.gpu
LENGTHS = [1, 63, 100, 92]  # of the documents of each of the two microbatches
LR = 0.001


class Trained:
    """Two microbatches of training on one GPU. counts: how many steps they are, for each step."""

    def __init__(self, groups: Groups, one_pass: bool, counts: tuple[int, ...], broken: int | None = None) -> None:
        """broken: the step in which a gradient is NaN."""
        keys = ["config=tiny_ssmax", "train.batch_size=2", "train.microbatch=1", "optimizer.clip=0.5"]
        config = load_config([*keys, "train.precision=bf16"])
        with torch.device(groups.device):
            decoder = Decoder(config.model, groups, sum(LENGTHS), dtype=torch.bfloat16)
            initialize_weights(decoder, config.model, groups, seed=1)
        with nullcontext() if one_pass else patch.object(AdamW, "one_pass", False):
            self.engine = DeepSpeedEngine(decoder, config, groups)
        assert (self.engine.update is not None) == one_pass
        self.engine.engine.communication_data_type = torch.float32  # DeepSpeed rounds sums to bf16 otherwise
        self.masters, self.losses, self.norms, self.skipped = [self.state("weight")], [], [], []
        layout = PackedLayout.from_lengths(LENGTHS).to(groups.device)
        for step, count in enumerate(counts):
            self.engine.set_batch_size(count, 1)
            for part in range(count):
                tokens = (torch.arange(sum(LENGTHS), device=groups.device) * (part + 3)) % config.model.vocab_size
                labels = (7 * tokens + 3) % config.model.vocab_size
                factor = torch.nan if step == broken else 1.0
                hook = decoder.norm.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
                found = self.engine.forward_backward(tokens, layout, labels, count * sum(LENGTHS))
                hook.remove()
            self.losses.append(float(found.losses.mean()))
            result = self.engine.step(LR)
            self.norms.append(result.grad_norm)
            self.skipped.append(result.skipped)
            self.masters.append(self.state("weight"))

    def state(self, name: str) -> dict[str, Tensor]:
        return {f.name: f.tensor.detach().clone() for f in self.engine.fragments() if f.state == name}


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2)])
def test_updates_are_those_of_deepspeeds_step(groups: Groups, counts: tuple[int, ...]) -> None:
    ours, theirs = Trained(groups, True, counts), Trained(groups, False, counts)
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-3)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-2)
    assert min(ours.norms) > 0.5, "nothing was clipped"
    for name, before in ours.masters[0].items():
        assert torch.equal(before, theirs.masters[0][name])
        change = ours.masters[1][name] - before
        # Kernels of the backward pass may add in another order, which matters for gradients that are nearly 0.
        assert (change - (theirs.masters[1][name] - before)).norm() < 0.1 * change.norm(), name
    weights = dict(ours.engine.module.named_parameters())
    assert all(torch.equal(weights[name].flatten(), x.bfloat16()) for name, x in ours.masters[-1].items())
    sums = ours.engine.engine.optimizer.fp32_groups_gradients_flat
    assert all((flat.untyped_storage().nbytes() > 0) == (counts[-1] > 1) for flat in sums)


def test_launching_a_step_does_not_wait_for_the_gpu(groups: Groups) -> None:
    found = Trained(groups, True, (1, 1))
    tokens = torch.arange(sum(LENGTHS), device=groups.device)
    found.engine.forward_backward(tokens, PackedLayout.from_lengths(LENGTHS).to(groups.device), tokens, sum(LENGTHS))
    assert found.engine.update is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.engine.update.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_with_nan_changes_nothing(groups: Groups) -> None:
    found = Trained(groups, True, (1, 1, 2, 1), broken=2)
    assert found.skipped == [False, False, True, False]
    assert found.norms[2] == torch.inf
    for name, before in found.masters[2].items():
        assert torch.equal(before, found.masters[3][name])
        assert found.masters[4][name].isfinite().all()
    assert {float(state["step"]) for state in found.engine.optimizer.state.values()} == {3.0}
