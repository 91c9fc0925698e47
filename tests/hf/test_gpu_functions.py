"""Exported stick-breaking models on the kernels of ssscale-kernels, which they use on a GPU where it is installed.

Here that package's implementation for CPUs stands for its kernels: the same function, called in the same way.
"""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ssscale_kernels.stickbreaking import stickbreaking_attention
from transformers import DynamicCache, StaticCache

from ssscale.config.schema import Config, DataConfig, ModelConfig, WidthConfig, mixer_config, position_config
from ssscale.hf import code
from ssscale.hf.configuration_ssscale import SSScaleConfig
from ssscale.hf.convert import hf_config

CASES = ("plain", "left", "right", "packed", "pieces", "padded pieces", "static")
MODULE = code.exported_module()
HELPERS = sys.modules[f"{code.PACKAGE}.attention_ssscale"]


@pytest.fixture(scope="module", params=[False, True], ids=["", "remainder"])
def model(request: pytest.FixtureRequest) -> Any:
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=61,
        init_std=0.4,
        mixers=["stickbreaking"],
        mixer=mixer_config("stickbreaking", remainder=request.param),
        position=position_config("nope"),
        width=WidthConfig(attention_scale=0.5),
    )
    torch.manual_seed(0)
    content = hf_config(Config(name="trial", model=config, data=DataConfig(length=32)), "float32")
    return MODULE.SSScaleForCausalLM(SSScaleConfig(**content)).eval()


def logits(model: Any, case: str) -> torch.Tensor:
    """Of all tokens that are no padding."""
    ids = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if case in ("left", "padded pieces"):
        mask[1, :9] = 0
    if case == "right":
        mask[0, 14:] = 0
    if case == "packed":
        lengths = ((8, 1, 14), (5, 18))
        position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        one = model(ids, position_ids=position[:1]).logits  # the same documents in all rows
        return torch.cat((model(ids, position_ids=position).logits, one))
    if case in ("plain", "left", "right"):
        return model(ids, attention_mask=mask).logits[mask.bool()]
    cache = StaticCache(config=model.config, max_cache_len=32) if case == "static" else DynamicCache()
    parts, first = [], 0
    for last in (12, 13, 20, 23):
        given = {"cache_position": torch.arange(first, last)} if case == "static" else {}
        if case == "padded pieces":
            given["attention_mask"] = mask[:, :last]
        parts.append(model(ids[:, first:last], past_key_values=cache, **given).logits)
        first = last
    return torch.cat(parts, 1)[mask.bool()]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(model: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernels(*inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(options)
        return stickbreaking_attention(*inputs, **options)

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        found = logits(model, case)
        if case in ("plain", "left", "packed"):  # a cache is for inference
            found.square().mean().backward()
            return [found, *(p.grad.clone() for p in model.parameters())]
        return [found]

    expected = results()
    monkeypatch.setattr(MODULE, "gpu_function", lambda *_: kernels)
    for got, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert calls
    assert all(options["scale"] == 0.5 and options["skip_below"] == 2**-12 for options in calls)


def test_attention_weights_are_those_of_plain_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(1, 12)[None]
    expected = model(ids, output_attentions=True).attentions
    monkeypatch.setattr(MODULE, "gpu_function", lambda *_: stickbreaking_attention)
    for got, wanted in zip(model(ids, output_attentions=True).attentions, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("installed", ["", "not installed", "another GPU"])
def test_the_package_is_used_on_hopper_and_that_is_said_once(
    installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = ModuleType("some_kernels")
    package.mix = SimpleNamespace()
    if installed != "not installed":
        monkeypatch.setitem(sys.modules, "some_kernels", package)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0) if installed else (9, 0))
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        found = [HELPERS.gpu_function("some_kernels", "mix", device) for _ in range(3)]
    HELPERS.gpu_function.cache_clear()
    assert found == [None if installed else package.mix] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert {"": "the kernels of some-kernels on cuda", "another GPU": "for Hopper"}.get(
        installed, "plain torch"
    ) in line
    assert HELPERS.gpu_function("some_kernels", "mix", torch.device("cpu")) is None
