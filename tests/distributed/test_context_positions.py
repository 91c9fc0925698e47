"""Positions and windows under context parallelism: losses and gradients of two ranks beside those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssscale.config.schema import ModelConfig, position_config
from ssscale.data.batch import Batch, take_share
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.model.positions.rope import RopeScaling
from tests.distributed.jobs import regroup
from tests.pool import Pool

LENGTH, VOCAB = 48, 300
DOCUMENTS = [[48], [1, 30, 17], [5, 43], [24, 24]]
POSITIONS = {
    "alibi": position_config("alibi"),
    "alibi_window": position_config("alibi", window=9),
    "fire": position_config("fire"),
    "window": position_config("rope", window=5),
    "ntk": position_config("rope", scaling=RopeScaling.ntk, factor=4.0),
    "dynamic_ntk": position_config("rope", scaling=RopeScaling.dynamic_ntk, factor=2.0, train_length=12),
}
CASES = [("softmax", name) for name in POSITIONS] + [("ssmax", name) for name in ("window", "dynamic_ntk")]
IN_A_RING = [(core, name) for core, name in CASES if "ntk" in name]


def gradients(mixer: str, position: str, ulysses: int = 1, ring: int = 1) -> dict[str, Any]:
    """Losses by token, and the sums of all ranks' gradients."""
    groups = regroup(1, ulysses, ring)
    model = ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
        init_std=0.15, mixers=[mixer], position=POSITIONS[position],
    )  # fmt: skip
    decoder = Decoder(model, groups, LENGTH)
    initialize_weights(decoder, model, groups, seed=3)
    tokens = torch.randint(0, VOCAB, (len(DOCUMENTS) * LENGTH,), generator=torch.Generator().manual_seed(0))
    layout = PackedLayout.from_lengths([length for row in DOCUMENTS for length in row], LENGTH)
    sources = torch.zeros(len(DOCUMENTS), dtype=torch.int64)
    share = take_share(Batch(tokens, tokens.roll(-1), layout, sources, len(tokens)), groups)
    losses = decoder(share.tokens, share.layout, share.labels)
    losses.sum().backward()
    found = {}
    for name, weight in decoder.named_parameters():
        found[name] = weight.grad.clone()
        dist.all_reduce(found[name])
    # The share of each rank, put back to where it is in the batch.
    number = torch.arange(len(tokens))
    mine = take_share(Batch(number, number, layout, sources, len(tokens)), groups).tokens
    found["losses"] = torch.zeros(len(tokens)).index_copy(0, mine, losses.detach())
    dist.all_reduce(found["losses"])
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.parametrize(
    ("mixer", "position", "way"),
    [(*case, "ulysses") for case in CASES] + [(*case, "ring") for case in IN_A_RING],
)
def test_two_context_ranks_compute_what_one_process_does(
    mixer: str, position: str, way: str, pool1: Pool, pool2: Pool
) -> None:
    job = "tests.distributed.test_context_positions:gradients"
    (one,) = pool1.run(job, mixer=mixer, position=position)
    for two in pool2.run(job, mixer=mixer, position=position, **{way: 2}):
        assert two.keys() == one.keys()
        for name, wanted in one.items():
            wanted = torch.tensor(wanted)
            # Gradients add up to hundreds. That of FIRE's constant b2 is 0 but for rounding.
            assert (torch.tensor(two[name]) - wanted).norm() < 1e-5 * wanted.norm() + 1e-5, name


def test_dynamic_ntk_depends_on_whole_documents(pool1: Pool) -> None:
    """Else the test above would not notice lengths of pieces."""
    job = "tests.distributed.test_context_positions:gradients"
    (plain,), (scaled,) = (pool1.run(job, mixer="softmax", position=name) for name in ("ntk", "dynamic_ntk"))
    assert plain["losses"] != scaled["losses"]
