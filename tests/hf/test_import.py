"""Import of small random models of transformers' own classes: logits, weights on the way back, tokenizers, refusals."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.hf import register
from ssscale.hf.convert import export_checkpoint, import_checkpoint
from ssscale.hf.plain import native_tree
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from tests.hf.families import LLAMA_3_1, MODELS, QWEN, SIZES, SMOLLM, logits_of, save_theirs
from tests.hf.import_table import FIVE, PAGE, of_version, our_logits, read_page, there_and_back, write_page
from tests.hf.jobs import write_checkpoint
from tests.models import make_model
from tests.pool import Pool
from tests.train.disks import small_disk

FLOAT32 = 3e-6  # more than float32 rounding gives here, of the largest logit
ROUNDING = 6e-7  # what another machine may add to it


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_theirs_and_the_weights_come_back(
    name: str, groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    import transformers

    kind, keys, form = MODELS[name]
    theirs = save_theirs(kind, keys, tmp_path / "hf", tokenizer_file)
    expected = logits_of(theirs)
    difference = there_and_back(name, tmp_path / "hf", expected, groups, tmp_path)
    assert difference < FLOAT32
    assert difference <= max(ROUNDING, 3 * read_page()[transformers.__version__][name])
    register()
    again = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"))
    if form == "ssscale":
        assert (again - expected).abs().max() < FLOAT32 * expected.abs().max()
    else:
        assert torch.equal(again, expected)


def test_the_page_reads_as_it_was_written() -> None:
    found = read_page()
    assert len(found) == 2
    assert write_page(found) == PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_models_of_transformers_5_go_there_and_back(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    packages = os.environ.get(FIVE, "")
    if not packages:
        pytest.skip(f"{FIVE} names no folder of `pip install --target` with transformers 5")
    found = of_version(packages, groups, tmp_path, tokenizer_file)
    (version,) = (name for name in read_page() if name.startswith("5."))
    for name, difference in found.items():
        assert difference <= max(ROUNDING, 3 * read_page()[version][name]), name
    content = json.loads((tmp_path / "theirs/Llama 3.1/config.json").read_text())
    assert content["rope_parameters"]["rope_type"] == "llama3"


@pytest.mark.parametrize(("name", "mixer"), [("Qwen2", "ssmax"), ("Qwen3, tied", "softmax"), ("Llama 3.1", "ssmax")])
def test_an_imported_model_trains_and_is_exported(
    name: str, mixer: str, groups: Groups, pool1: Pool, corpus: Path, tmp_path: Path
) -> None:
    """As docs/guide/ssmax_your_model.md does it, with steps of the trainer itself."""
    from transformers import AutoModelForCausalLM

    kind, keys, form = MODELS[name]
    tokenizer = corpus / "tokenizer.json"
    save_theirs(kind, keys | {"vocab_size": 1024, "initializer_range": 0.02}, tmp_path / "hf", tokenizer)
    checkpoint = import_checkpoint(tmp_path / "hf", tmp_path / "imported", groups)
    changes = {"init_from": str(tmp_path / "imported"), "model.mixers": [mixer], "train.max_steps": 3}
    given = f"config={tmp_path / 'imported/config.yaml'}"
    run = tmp_path / "run"
    assert pool1.run("tests.train.jobs:continue_run", given=given, data=str(corpus), run=str(run), **changes) == [""]
    trained = list_checkpoints(run / "checkpoints")[-1]
    before, after = CheckpointReader(checkpoint), CheckpointReader(trained)
    for key in before.weights:
        changed = not torch.equal(before.whole(key, "weight"), after.whole(key, "weight"))
        assert changed, f"{key} is not trained"
    form = "ssscale" if mixer == "ssmax" else form
    export_checkpoint(trained, tmp_path / "exported", 1, 2, form=form)
    register()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    expected = our_logits(trained, groups)
    assert (logits_of(theirs) - expected).abs().max() < FLOAT32 * expected.abs().max()


def test_stored_in_bf16_and_in_several_files(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_theirs("llama", SMOLLM, tmp_path / "one", tokenizer_file).bfloat16().save_pretrained(
        tmp_path / "hf", max_shard_size="20kB"
    )
    shutil.copy(tokenizer_file, tmp_path / "hf/tokenizer.json")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = logits_of(theirs)
    found = our_logits(import_checkpoint(tmp_path / "hf", tmp_path / "run", groups), groups)
    assert (found - expected).abs().max() < FLOAT32 * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "mistral", "granite", "qwen2", "qwen3"])
def test_missing_keys_have_the_values_of_transformers(kind: str) -> None:
    """config.json as an author may write it: any key may be missing for which transformers has a default."""
    from transformers import AutoConfig

    needed = {key: SIZES[key] for key in list(SIZES)[:5]} | {"num_attention_heads": 8, "max_position_embeddings": 16}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    content = needed | {"model_type": kind} | ids
    whole = AutoConfig.for_model(kind, **needed).to_dict()
    if kind not in ("qwen2", "qwen3"):
        whole.pop("layer_types", None)
    assert native_tree(content, "config.json") == native_tree(content | whole | ids, "config.json")


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


SLIDING = ["sliding_attention"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "smollm3"}, "it has layers without rotary positions (no_rope_layers)"),
        ({"model_type": "ministral"}, "it has windows in some layers only (layer_types)"),
        ({"model_type": "gpt_oss"}, "it has experts (num_local_experts), attention sinks, and windows"),
        ({"model_type": "qwen3_moe"}, "it has experts (num_experts)"),
        ({"model_type": "bert"}, "model_type 'bert', not 'ssscale', 'llama', 'mistral', 'granite', 'qwen2', 'qwen3'"),
        ({"attention_bias": True}, "attention_bias=true adds a bias to the output projection too"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=true adds a bias to the output projection"),
        ({"model_type": "qwen2"}, "is not whole: only config.json describes blocks."),
        (QWEN | {"model_type": "qwen3", "use_sliding_window": True}, "with this max_window_layers layers differ"),
        (
            QWEN | {"model_type": "qwen2", "use_sliding_window": True, "layer_types": [*SLIDING, "full_attention"]},
            "with this layer_types layers differ, and in this decoder all layers have the same window",
        ),
        ({"mlp_bias": True}, "mlp_bias=true, and this decoder has no biases in the MLP"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', and this decoder has silu only"),
        ({"sliding_window": 32}, "sliding_window=32, which transformers does not apply in a model of type llama"),
        ({"model_type": "mistral", "sliding_window": 0}, "model.position.window must be"),
        ({"layer_types": ["full_attention", *SLIDING]}, "with this layer_types layers differ"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type='yarn' is not imported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope' is not imported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama model: KeyError('low_freq_factor')"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters differ by the type of a layer"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn"}},
            "rope_scaling.rope_type and rope_scaling.type differ",
        ),
        (
            {"rope_scaling": LLAMA_3_1["rope_scaling"] | {"low_freq_factor": 4}},
            "model.position.rope.low_freq_factor=4 must be above 0 and below model.position.rope.high_freq_factor=4",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "does not describe a llama model: KeyError('factor')"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, and this decoder rotates whole heads only"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ({"eos_token_id": [1, 2]}, "eos_token_id=[1, 2]: set it to the one token that ends a document"),
        ({"eos_token_id": 5000}, "config.json has eos_token_id=5000, which is not an id below vocab_size=300"),
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


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(
    groups: Groups, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Such a model was imported, and an evaluation ended with an IndexError. Ids may have gaps: the largest one counts."""
    write_checkpoint(make_model("softmax"), groups, tmp_path / "run", tokenizer_file)
    checkpoint = tmp_path / "run/checkpoints/step-00000007"
    export_checkpoint(checkpoint, tmp_path / "hf", 0, 0, form="llama")
    tokenizer = json.loads(tokenizer_file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    assert vocabulary[last] == 299
    vocabulary[last] = 400
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(tokenizer))
    said = "tokenizer.json has ids up to 400, but config.json has vocab_size=300: resize the model's embedding to at least "
    with pytest.raises(UserError) as error:
        import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    assert f"{said}401 rows, or remove the added tokens from tokenizer.json" in str(error.value)
    assert not (tmp_path / "back").exists()
    shutil.copy(tmp_path / "hf/tokenizer.json", checkpoint)
    for use in (
        lambda: export_checkpoint(checkpoint, tmp_path / "out", 0, 0),
        lambda: TextTokenizer.of_checkpoint(checkpoint),  # as every evaluation opens it
    ):
        with pytest.raises(UserError) as error:
            use()
        assert said.replace("json has v", "yaml has v") in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    groups: Groups, tokenizer_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was said that training continues, and the import ended with exit code 0 and a run without a checkpoint."""
    write_checkpoint(make_model("softmax"), groups, tmp_path / "run", tokenizer_file)
    export_checkpoint(tmp_path / "run/checkpoints/step-00000007", tmp_path / "hf", 0, 0, form="llama")
    with small_disk(tmp_path / "small", "64k") as disk:
        out = disk / "back"
        with pytest.raises(UserError) as error:
            import_checkpoint(tmp_path / "hf", out, groups)
        assert str(error.value) == f"{out}.partial/checkpoints/step-00000000 cannot be written: No space left on device"
        assert capfd.readouterr() == ("", "")
        assert not list(disk.glob("back*"))
