"""The plugin's reading of config.json: every key of an export is used, has no effect outside of training, or is refused.

Needs no vLLM. What the keys then do is compared in test_vllm.py.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ssscale.config.schema import Config, DataConfig
from ssscale.hf.convert import hf_config
from ssscale.serving.vllm.ssscale_vllm.config import Model, SSScaleConfig, read_model
from tests.serving.exports import LENGTH, REFUSED, SERVED

# All that may change without an effect.
NO_EFFECT = {
    # for transformers and vLLM, which read them by themselves
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    # initialization and learning rates
    "depth_scaled_init",
    "initializer_range",
    "mixer.ssmax.bias",
    "mixer.ssmax.scale",  # but for variant=fixed
    "width.base_hidden_size",
    "width.matrix_init_divisor",
    "width.matrix_lr_divisor",
    # kernels in training
    "mixer.softmax.backend",
    "mixer.ssmax.backend",
}
# Read by the scaling llama3 only, and train_length by dynamic_ntk, which is refused.
LLAMA3 = {f"position.rope.{key}" for key in ("train_length", "low_freq_factor", "high_freq_factor")}


def content(name: str) -> dict[str, Any]:
    """config.json as `launch/export.py` writes it."""
    model = (SERVED | REFUSED)[name]
    config = Config(name="trial", model=model, data=DataConfig(length=LENGTH))
    return json.loads(json.dumps(hf_config(config, "float32"))) | {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "auto_map":
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def section(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        tree = tree[key]
    return tree


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1] if value else [["a_weight", [1], 0.0]]
    return {} if isinstance(value, dict) else 7


def outcome(tree: dict[str, Any]) -> Model | str:
    try:
        return read_model(tree)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", SERVED)
def test_every_key_has_an_effect_or_is_known_to_have_none(name: str) -> None:
    tree, without = content(name), set()
    before = read_model(tree)
    for path in leaves(tree):
        other = deepcopy(tree)
        part = section(other, path[:-1])
        part[path[-1]] = changed(part[path[-1]])
        if outcome(other) == before:
            without.add(".".join(path))
    without -= {"bos_token_id", "eos_token_id", "pad_token_id"}
    fixed = {"mixer.ssmax.scale"} if name == "ssmax-fixed" else set()
    others = set() if name == "softmax-llama3" else LLAMA3
    assert without == {key for key in NO_EFFECT | others if section_exists(tree, key)} - fixed


def section_exists(tree: dict[str, Any], key: str) -> bool:
    return key in {".".join(path) for path in leaves(tree)}


@pytest.mark.parametrize("name", ["hybrid", "hybrid-pn-window", "softmax-alibi"])
def test_keys_that_are_not_known_or_missing_are_refused(name: str) -> None:
    tree = content(name)
    sections = {path[:i] for path in leaves(tree) for i in range(len(path))}
    assert len(sections) >= 5
    for path in sections:
        other = deepcopy(tree)
        section(other, path)["a_new_key"] = 1
        assert "a_new_key" in str(outcome(other))
    for path in leaves(tree):
        other = deepcopy(tree)
        del section(other, path[:-1])[path[-1]]
        missing = outcome(other)
        key = ".".join(path)
        assert (
            missing == read_model(tree)
            if key in (NO_EFFECT | LLAMA3) - {"mixer.ssmax.scale"} or "token" in key
            else key in missing
        )


LLAMA3_ROPE = {"base": 500, "scaling": "llama3", "factor": 4, "train_length": 24, "high_freq_factor": 4}
REFUSALS = {
    "position.method=fire cannot be served: FIRE": ("softmax-fire", {}),
    "position.rope.scaling=dynamic_ntk rotates": ("softmax-dynamic", {}),
    "mixers has mean": ("softmax", {"mixers": ["mean"]}),
    "does not serve alibi in layers of ssmax": (
        "ssmax",
        {"position": {"method": "alibi", "window": None, "alibi": {}}},
    ),
    "variant='other'": ("ssmax", {"mixer": {"ssmax": {"variant": "other"}}}),
    "variant='learned' is not": ("softmax", {"mixer": {"softmax": {"variant": "learned"}}}),
    "attention_bias=True is not known": ("softmax", {"attention_bias": True}),
    "hidden_size='64'": ("softmax", {"hidden_size": "64"}),
    "skip_below=1 is not": ("stickbreaking", {"mixer": {"stickbreaking": {"skip_below": 1}}}),
    "position.window=0": ("softmax", {"position": {"window": 0}}),
    "learned=None": ("softmax", {"learned": None}),
    "mixers=[]": ("softmax", {"mixers": []}),
    "the weight blocks.0.attention.weights.s": ("ssmax", {"learned": []}),
    "the weight blocks.0.attention.projection_weights.q_bias": ("softmax", {"qkv_bias": True}),
    "the weight blocks.0.attention.projection_weights.q_norm": ("stickbreaking-norm", {"learned": []}),
    "position.rope.low_freq_factor=4 is not below high_freq_factor=4": (
        "softmax-llama3",
        {"position": {"rope": LLAMA3_ROPE | {"low_freq_factor": 4}}},
    ),
    "chunk_size_feed_forward=4 is not": ("softmax", {"chunk_size_feed_forward": 4}),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refusals_name_the_key(sentence: str) -> None:
    name, change = REFUSALS[sentence]
    tree = content(name)
    merge(tree, change)
    if "alibi" in sentence:
        tree["mixer"]["ssmax"]["positions"].append("alibi")
    assert sentence in str(outcome(tree))


def merge(tree: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and key in tree and key != "position":
            merge(tree[key], value)
        elif key == "position":
            tree[key] = value if "method" in value else tree[key] | value
        else:
            tree[key] = value


@pytest.mark.parametrize("name", SERVED)
def test_a_folder_reads_as_its_config(name: str, tmp_path: Path) -> None:
    """Through transformers, which adds keys of its own."""
    (tmp_path / "config.json").write_text(json.dumps(content(name)))
    config = SSScaleConfig.from_pretrained(tmp_path)
    assert read_model(config.to_dict()) == read_model(content(name))
    config.update({"a_new_key": 1})
    assert "a_new_key" in str(outcome(config.to_dict()))


def test_positions_are_those_of_the_trained_model() -> None:
    """Slopes and angles against the functions of training, bit for bit."""
    import torch

    from ssscale.model.positions.alibi import alibi_slopes
    from ssscale.model.positions.rope import frequencies, llama3_frequencies, rope_tables

    slopes = read_model(content("softmax-alibi")).position.slopes(6)
    assert torch.equal(torch.tensor(slopes), alibi_slopes(6, range(6), torch.device("cpu")))
    positions = torch.arange(200)
    for name, scale, base in (
        ("softmax", 1.0, 1e4),
        ("softmax-linear", 2.5, 500.0),
        ("softmax-ntk", 1.0, 500 * 4 ** (32 / 30)),
        ("softmax-llama3", 1.0, 500.0),
    ):
        tables = read_model(content(name)).position.tables(positions, 32)
        theta = frequencies(32, base, torch.device("cpu"))
        if name == "softmax-llama3":
            kept, theta = theta, llama3_frequencies(theta, 4.0, 0.5, 2.0, 24)
            assert len({0.25, 1.0} & set((theta / kept).tolist())) == 2, "no frequency is kept, or none is divided"
        for got, wanted in zip(tables or (), rope_tables(positions / scale, theta), strict=True):
            assert torch.equal(got[:, 0], wanted)
