"""Exports as plain Llamas, Mistrals, Granites and Qwens, and the way back: logits in stock transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssscale.config import load_config
from ssscale.config.schema import ModelConfig, WidthConfig, position_config
from ssscale.errors import UserError
from ssscale.hf.convert import export_checkpoint, import_checkpoint
from ssscale.hf.families import check_exportable
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.positions.rope import RopeScaling
from ssscale.parallel.groups import Groups
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import CheckpointReader
from tests.hf.jobs import write_checkpoint
from tests.models import SETTINGS, make_model

WIDTH = WidthConfig(16, 3.0, 0.5, 0.1)
PLAIN = make_model("softmax")
LLAMA3 = SETTINGS["rope_llama3"]
EXPORTED: dict[str, tuple[str, ModelConfig]] = {
    "llama": ("llama", PLAIN),
    "tied": ("llama", replace(PLAIN, tie_embeddings=True, head_dim=12)),
    "linear": (
        "llama",
        replace(PLAIN, position=position_config("rope", scaling=RopeScaling.linear, factor=2.5, base=500.0)),
    ),
    "ntk": ("llama", replace(PLAIN, position=position_config("rope", scaling=RopeScaling.ntk, factor=4.0))),
    "llama3": ("llama", replace(PLAIN, position=LLAMA3)),
    "qwen2": ("qwen2", replace(PLAIN, qkv_bias=True)),
    "qwen2_tied": ("qwen2", replace(PLAIN, qkv_bias=True, tie_embeddings=True, num_kv_heads=1, position=LLAMA3)),
    "qwen3": ("qwen3", replace(PLAIN, qk_norm=True, head_dim=12)),
    "qwen3_tied": ("qwen3", replace(PLAIN, qk_norm=True, tie_embeddings=True, num_kv_heads=4)),
    "mistral": ("mistral", replace(PLAIN, position=position_config("rope", 6, base=500.0))),
    "mistral_without_window": ("mistral", replace(PLAIN, tie_embeddings=True, num_kv_heads=1)),
    "granite": ("granite", replace(PLAIN, width=WIDTH)),
    "granite_tied": ("granite", replace(PLAIN, width=WIDTH, tie_embeddings=True, head_dim=12, num_kv_heads=1)),
    "granite_without_width": ("granite", PLAIN),
}
TEXT = [0, 200, 3, 77, 8, 150, 299, 41, *range(5, 27)]


def test_the_shipped_softmax_models_are_granites() -> None:
    for name in ("1b_softmax", "3b_softmax"):
        model = load_config([f"config={name}"]).model
        check_exportable(model, "granite")
        with pytest.raises(UserError, match="use format=granite"):
            check_exportable(model, "llama")


def logits(decoder: Decoder, tokens: list[int] = TEXT) -> torch.Tensor:
    with torch.no_grad():
        return decoder(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)]))


@pytest.mark.parametrize("name", EXPORTED)
def test_stock_transformers_gives_the_same_logits_and_back(
    name: str, groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    form, model = EXPORTED[name]
    decoder = write_checkpoint(model, groups, tmp_path / "run", tokenizer_file)
    checkpoint = tmp_path / "run/checkpoints/step-00000007"
    export_checkpoint(checkpoint, tmp_path / "hf", 0, 0, form=form)
    assert not list((tmp_path / "hf").glob("*.py"))
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(theirs).__name__.lower().startswith(form)
    with torch.no_grad():
        found = theirs(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(found, logits(decoder), rtol=1e-4, atol=1e-5)
    text = AutoTokenizer.from_pretrained(tmp_path / "hf")("the stick breaks")["input_ids"]
    assert text[0] == 0

    back = import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    before, after = CheckpointReader(checkpoint), CheckpointReader(back)
    for key in before.weights:
        assert torch.equal(before.whole(key, "weight"), after.whole(key, "weight")), key
    again, config = load_for_inference(back, groups)
    torch.testing.assert_close(logits(again), logits(decoder), rtol=1e-4, atol=1e-5)  # NTK comes back as its base
    assert config.model.mixers == ["softmax"]
    export_checkpoint(back, tmp_path / "again", 0, 0, form=form)
    once, twice = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "again"))
    assert once == twice


@pytest.mark.parametrize(
    ("model", "form", "said"),
    [
        (make_model("ssmax"), "llama", "format=llama has no layers of ssmax, which model.mixers has"),
        (make_model("stickbreaking"), "granite", "format=granite has no layers of stickbreaking"),
        (
            replace(PLAIN, width=WIDTH),
            "llama",
            "no model.width.embedding_multiplier, which this model sets: use format=granite",
        ),
        (replace(PLAIN, position=position_config("alibi")), "llama", "this model has model.position.method=alibi"),
        (
            replace(PLAIN, position=position_config("rope", 6)),
            "llama",
            "format=llama has no model.position.window=6: use format=mistral or format=ssscale",
        ),
        (
            replace(PLAIN, width=WIDTH, position=position_config("rope", 6)),
            "mistral",
            "format=mistral has no model.width.embedding_multiplier, which this model sets: use format=ssscale",
        ),
        (
            replace(PLAIN, position=position_config("rope", scaling=RopeScaling.dynamic_ntk, train_length=48)),
            "llama",
            "format=llama has no model.position.rope.scaling=dynamic_ntk, which this model sets: use format=ssscale",
        ),
        (
            replace(PLAIN, qkv_bias=True),
            "llama",
            "format=llama has no model.qkv_bias, which this model sets: use format=qwen2 or format=ssscale",
        ),
        (
            replace(PLAIN, qk_norm=True),
            "granite",
            "format=granite has no model.qk_norm, which this model sets: use format=qwen3 or format=ssscale",
        ),
        (
            replace(PLAIN, qk_norm=True, qkv_bias=True),
            "qwen3",
            "format=qwen3 has no model.qkv_bias, which this model sets: use format=ssscale",
        ),
        (
            replace(PLAIN, qkv_bias=True, head_dim=12),
            "qwen2",
            "format=qwen2 has heads of hidden_size / num_heads dimensions, and this model has model.head_dim=12: use",
        ),
        (
            PLAIN,
            "qwen2",
            "format=qwen2 needs model.qkv_bias=true, and this model has qkv_bias=false: use format=llama or format=mistral",
        ),
    ],
)
def test_other_models_are_refused(
    model: ModelConfig, form: str, said: str, groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    write_checkpoint(model, groups, tmp_path / "run", tokenizer_file)
    with pytest.raises(UserError) as error:
        export_checkpoint(tmp_path / "run/checkpoints/step-00000007", tmp_path / "hf", 0, 0, form=form)
    assert said in str(error.value)
    assert not (tmp_path / "hf").exists()
