"""Import of small random models of transformers' own classes: logits, weights on the way back, tokenizers, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from eval.checkpoint.text import TextTokenizer
from ssscale.config.schema import ModelConfig
from ssscale.errors import UserError
from ssscale.hf.convert import export_checkpoint, import_checkpoint
from ssscale.hf.plain import native_tree
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import CheckpointReader
from tests.hf.jobs import write_checkpoint
from tests.models import make_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.2,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}
# What SmolLM and SmolLM2 write beside their sizes.
SMOLLM: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
# name → (model type, its keys, the format of the way back)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "llama"),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}, "llama"),
    "llama_all_heads": ("llama", {"num_key_value_heads": 4, "head_dim": 6}, "llama"),
    "llama_3": ("llama", {"rope_theta": 500_000.0, "num_key_value_heads": 1}, "llama"),
    "llama_linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, "llama"),
    "llama_linear_1": ("llama", {"rope_scaling": {"type": "linear", "factor": 1.0}}, "llama"),
    "llama_dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, "ssscale"),
    "smollm2": ("llama", SMOLLM, "llama"),
    "mistral": ("mistral", {"sliding_window": None}, "llama"),
    "mistral_window": ("mistral", {"sliding_window": 6, "tie_word_embeddings": True}, "mistral"),
    "mistral_window_1": ("mistral", {"sliding_window": 1}, "mistral"),
    "mistral_wide": ("mistral", {"sliding_window": 4096, "head_dim": 16}, "mistral"),
    "granite": ("granite", MULTIPLIERS, "granite"),
    "granite_tied": ("granite", MULTIPLIERS | {"tie_word_embeddings": True}, "granite"),
    "granite_linear": (
        "granite",
        MULTIPLIERS | {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "granite",
    ),
}
TEXT = [0, 200, 3, 77, 8, 150, 299, 41, *range(5, 27)]  # longer than max_position_embeddings


def save_theirs(kind: str, keys: dict[str, Any], folder: Path, tokenizer_file: Path) -> torch.nn.Module:
    """Writes a random model of transformers, in float32, and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | keys)).eval()
    for name, weight in theirs.named_parameters():
        if "norm" in name:  # 1 in a new model, which would hide norms that are swapped
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    theirs.save_pretrained(folder)
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    return theirs


def logits(folder: Path, groups: Groups) -> tuple[torch.Tensor, ModelConfig]:
    ours, config = load_for_inference(folder, groups)
    with torch.no_grad():
        return ours(torch.tensor(TEXT), PackedLayout.from_lengths([len(TEXT)])), config.model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_theirs_and_the_weights_come_back(
    name: str, groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    kind, keys, form = MODELS[name]
    theirs = save_theirs(kind, keys, tmp_path / "hf", tokenizer_file)
    checkpoint = import_checkpoint(tmp_path / "hf", tmp_path / "run", groups)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXT])).logits[0]
    found, model = logits(checkpoint, groups)
    # Float32 rounding gives at most 9.3e-7 of the largest logit here.
    assert (found - expected).abs().max() < 3e-6 * expected.abs().max()
    assert model.tie_embeddings == keys.get("tie_word_embeddings", False)

    export_checkpoint(checkpoint, tmp_path / "again", 1, 2, form=form)
    if form != "ssscale":
        before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "again/model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    twice = import_checkpoint(tmp_path / "again", tmp_path / "twice", groups)
    once, again = CheckpointReader(checkpoint), CheckpointReader(twice)
    assert all(torch.equal(once.whole(key, "weight"), again.whole(key, "weight")) for key in once.weights)
    assert torch.equal(logits(twice, groups)[0], found)


def test_stored_in_bf16_and_in_several_files(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_theirs("llama", SMOLLM, tmp_path / "one", tokenizer_file).bfloat16().save_pretrained(
        tmp_path / "hf", max_shard_size="20kB"
    )
    shutil.copy(tokenizer_file, tmp_path / "hf/tokenizer.json")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXT])).logits[0]
    found, _ = logits(import_checkpoint(tmp_path / "hf", tmp_path / "run", groups), groups)
    assert (found - expected).abs().max() < 3e-6 * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "mistral", "granite"])
def test_missing_keys_have_the_values_of_transformers(kind: str) -> None:
    """config.json as an author may write it: any key may be missing for which transformers has a default."""
    from transformers import AutoConfig

    needed = {key: SIZES[key] for key in list(SIZES)[:5]} | {"num_attention_heads": 8, "max_position_embeddings": 16}
    content = needed | {"model_type": kind, "bos_token_id": 1, "eos_token_id": 2}
    whole = AutoConfig.for_model(kind, **needed).to_dict()
    whole.pop("layer_types", None)
    assert native_tree(content, "config.json") == native_tree(content | whole, "config.json")


def test_a_sentencepiece_tokenizer_comes_along(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    """As Llama 2 and Mistral have it: a space before the text, ▁ for spaces, unknown characters as bytes."""
    from transformers import AutoTokenizer

    save_theirs("llama", {}, tmp_path / "hf", tokenizer_file)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thesickbra", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    model = models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "hf/tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(settings))

    checkpoint = import_checkpoint(tmp_path / "hf", tmp_path / "run", groups)
    ours, theirs = TextTokenizer.of_checkpoint(checkpoint), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    for text in ("the stick breaks", " the", "ä stick\nbreaks the"):
        assert [1, *ours.encode(text)] == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2"}, "it has biases of the query, key and value projections"),
        ({"model_type": "qwen3"}, "it has norms of queries and keys"),
        ({"model_type": "smollm3"}, "it has layers without rotary positions (no_rope_layers)"),
        ({"model_type": "ministral"}, "it has windows in some layers only (layer_types)"),
        ({"model_type": "bert"}, "is of a model_type 'bert', not 'ssscale', 'llama', 'mistral', 'granite'"),
        ({"attention_bias": True}, "attention_bias=true, and this decoder has no biases"),
        ({"mlp_bias": True}, "mlp_bias=true, and this decoder has no biases"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', and this decoder has silu only"),
        ({"sliding_window": 32}, "sliding_window=32, which transformers does not apply in a model of type llama"),
        ({"model_type": "mistral", "sliding_window": 0}, "model.position.window must be"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types differ"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type='yarn' is not imported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.rope_type='llama3' is not"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "does not describe a llama model: KeyError('factor')"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, and this decoder rotates whole heads only"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ({"eos_token_id": [1, 2]}, "eos_token_id=[1, 2]: set it to the one token that ends a document"),
        ({"bos_token_id": None}, "bos_token_id=null: set it to the one token that begins a document"),
        ({"num_attention_heads": None}, "model.num_heads must be a whole number, not null"),
        ({"hidden_size": [1]}, "model.hidden_size must be a whole number"),
        ({"num_hidden_layers": 3}, "is not whole: only config.json describes blocks.2."),
        ({"num_hidden_layers": 1}, "is not whole: only the folder has model.layers.1."),
    ],
)
def test_what_is_not_imported_is_one_sentence(
    change: dict, said: str, groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    write_checkpoint(make_model("softmax"), groups, tmp_path / "run", tokenizer_file)
    export_checkpoint(tmp_path / "run/checkpoints/step-00000007", tmp_path / "hf", 0, 0, form="llama")
    file = tmp_path / "hf/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as error:
        import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    assert said in str(error.value)
    assert not (tmp_path / "back").exists()
