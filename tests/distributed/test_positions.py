"""Positions, windows and the cache under tensor and sequence parallelism, beside one process."""

import dataclasses
from typing import Any

import pytest
import torch

from ssscale.config.schema import ModelConfig, position_config
from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache
from ssscale.model.decoder import Decoder
from ssscale.model.generate import extend, generate
from ssscale.model.init import initialize_weights
from ssscale.parallel.splits import global_shape, local_part
from tests.distributed.jobs import TRAIN, regroup
from tests.models import MODELS, SETTINGS
from tests.pool import Pool

POSITIONS = {
    "softmax_fire": position_config("fire"),
    "softmax_alibi": position_config("alibi", window=9),
    "ssmax_window": position_config("rope", window=5),
    "ssmax_pn": position_config(),
    "stickbreaking_remainder": position_config("nope"),
    "softmax_llama3": SETTINGS["rope_llama3"],
}
CASES = {
    name: dataclasses.replace(MODELS[name if name in MODELS else name.split("_")[0]], position=position)
    for name, position in POSITIONS.items()
}
CASES["ssmax_bias_norm"] = dataclasses.replace(MODELS["ssmax"], qkv_bias=True, qk_norm=True)


def passes(models: dict[str, ModelConfig], tensor: int, sequence: bool) -> dict[str, list[Any]]:
    """Of each model: logits of a document in one pass, in chunks beside another, and behind another; greedy texts."""
    groups, found = regroup(tensor), {}
    for name, model in models.items():
        decoder = Decoder(model, groups, 64, sequence_parallel=sequence)
        initialize_weights(decoder, model, groups, seed=3)
        decoder.requires_grad_(False)
        for key, weight in decoder.named_parameters():
            if ".projection_weights." in key:  # biases begin at 0
                size = global_shape(weight, groups.tensor_size)
                weight += local_part(torch.linspace(0, 1, *size), weight, groups.tensor_rank, groups.tensor_size)
        tokens = torch.randint(0, 300, (28,), generator=torch.Generator().manual_seed(0))
        whole = decoder(tokens, PackedLayout.from_lengths([28]))
        cache = KVCache(decoder, [28, 40])
        parts = [[tokens[:13], [1, 2]], [tokens[13:14], [3]], [tokens[14:15], []], [tokens[15:], [4]]]
        rows = [extend(decoder, cache, [list(map(int, part)) for part in pair])[0] for pair in parts]
        behind = decoder(torch.cat((tokens.flip(0), tokens)), PackedLayout.from_lengths([28, 28]))[28:]
        found[name] = [whole.tolist(), torch.stack(rows).tolist(), behind.tolist()]
        found[name].append(generate(decoder, [[5, 6, 7], [8]], 9))
    return found


def test_logits_and_texts_are_those_of_one_process(pool1: Pool, pool2: Pool) -> None:
    job = "tests.distributed.test_positions:passes"
    (one,) = pool1.run(job, models=CASES, tensor=1, sequence=False)
    for name in CASES:
        whole = torch.tensor(one[name][0])
        torch.testing.assert_close(torch.tensor(one[name][1]), whole[[12, 13, 14, 27]], rtol=0, atol=2e-5)
        torch.testing.assert_close(torch.tensor(one[name][2]), whole, rtol=0, atol=2e-5)
    for sequence in (False, True):
        for two in pool2.run(job, models=CASES, tensor=2, sequence=sequence):
            for name in CASES:
                *logits, texts = two[name]
                for ours, theirs in zip(logits, one[name]):
                    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=2e-5)
                assert texts == one[name][3]


@pytest.mark.parametrize("name", ["softmax_fire", "softmax_alibi", "ssmax_window"])
def test_training_is_that_of_one_process(name: str, pool1: Pool, pool2: Pool) -> None:
    (one,) = pool1.run(TRAIN, model=CASES[name], microbatch=2, steps=8)
    for two in pool2.run(TRAIN, model=CASES[name], steps=8, tensor=2, sequence=True):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
