"""bf16 with fp32 master weights, as GPUs train, against float32."""

import pytest
import torch

from ssscale.config import load_config
from ssscale.engine.deepspeed import ALIGNED_ELEMENTS, GROUP_ELEMENTS, parameter_groups
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import Groups
from tests.models import MODELS
from tests.pool import Pool


@pytest.mark.parametrize("name", ["3b_ssmax", "162m_ssmax_bias", "1b_sb", "with_biases"])
def test_every_weight_starts_on_16_bytes_and_only_matrices_decay(name: str, groups: Groups) -> None:
    # Biases of 85 and 17 elements, and norms of 17.
    odd = [
        "model.qkv_bias=true",
        "model.qk_norm=true",
        "model.num_heads=5",
        "model.num_kv_heads=1",
        "model.head_dim=17",
    ]
    given = ["config=tiny_softmax", *odd, "model.position.method=nope"] if name == "with_biases" else [f"config={name}"]
    config = load_config(given)
    with torch.device("meta"):
        decoder = Decoder(config.model, groups, config.data.length)
    made = parameter_groups(decoder, config)
    assert sum(len(group["params"]) for group in made) == len(list(decoder.parameters()))
    for group in made:
        sizes = [weight.numel() for weight in group["params"]]
        assert all(sum(sizes[:i]) % ALIGNED_ELEMENTS == 0 for i in range(len(sizes)))
        assert len(sizes) == 1 or sum(sizes) <= GROUP_ELEMENTS + max(sizes)
        assert all((weight.dim() >= 2) == (group["weight_decay"] == 0.1) for weight in group["params"])


def test_the_host_does_not_wait_for_the_gpu_within_a_step(pool1: Pool) -> None:
    assert pool1.run("tests.distributed.jobs:waits_of_deepspeed", model=MODELS["ssmax"]) == [0]


def test_bf16_training_follows_fp32(pool1: Pool) -> None:
    arguments = {"model": MODELS["ssmax"], "microbatch": 2, "steps": 4}
    (exact,) = pool1.run("tests.distributed.jobs:train", **arguments)
    (rounded,) = pool1.run("tests.distributed.jobs:train", **arguments, bf16=True)
    for a, b in zip(exact["losses"], rounded["losses"]):
        assert abs(a - b) < 0.03  # bf16 keeps 8 bits: losses around 6 are known to 0.02
    for a, b in zip(exact["norms"], rounded["norms"]):
        assert abs(a - b) < 0.05 * a
