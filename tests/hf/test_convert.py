"""Exported models against ours: every mixer with every position method, padded batches, cached generation, the way back."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eval.checkpoint.text import TextTokenizer
from launch.export import main as export_main
from launch.import_hf import main as import_main
from ssscale.config.schema import ModelConfig, WidthConfig
from ssscale.errors import UserError
from ssscale.hf import convert, register
from ssscale.hf.convert import export_checkpoint, import_checkpoint
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.generate import generate
from ssscale.parallel.groups import Groups
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import CheckpointReader
from tests.hf.jobs import LENGTH, write_checkpoint
from tests.models import CASES, make_model
from tests.pool import Pool

MODELS = dict(CASES)
MODELS["ssmax_fixed"] = make_model("ssmax", "fixed")
MODELS["softmax_width"] = ModelConfig(
    **{**vars(make_model("softmax")), "head_dim": 12, "width": WidthConfig(16, 3.0, 0.5, 0.1)}
)
TEXTS = [list(range(5, 27)), [9], [0, 200, 3, 77, 8, 150, 299, 41]]
NEW = 9
PROMPTS = ["the stick breaks where", "the soft max"]


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, TEXTS))
    rows, masks = [], []
    for text in TEXTS:
        filler = longest - len(text)
        parts = ([0] * filler, text) if left else (text, [0] * filler)
        rows.append(parts[0] + parts[1])
        ones, zeros = [1] * len(text), [0] * filler
        masks.append(zeros + ones if left else ones + zeros)
    return torch.tensor(rows), torch.tensor(masks)


def our_logits(decoder: Decoder) -> torch.Tensor:
    """Of all texts, one behind the other."""
    lengths = [len(text) for text in TEXTS]
    with torch.no_grad():
        return decoder(torch.tensor([t for text in TEXTS for t in text]), PackedLayout.from_lengths(lengths))


# Scalings know nothing of mixers, and patterns of two have windows, too.
PAIRS = [
    name
    for name in MODELS
    if name.startswith("softmax-rope_") or (name.endswith("-window") and not name.startswith("hybrid"))
]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PAIRS])
def test_logits_generation_and_round_trip(name: str, groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    check_export(MODELS[name], groups, tokenizer_file, tmp_path)


@pytest.mark.parametrize("name", PAIRS)
def test_windows_and_scalings_with_every_mixer(name: str, groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    check_export(MODELS[name], groups, tokenizer_file, tmp_path)


def check_export(model: ModelConfig, groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    """Logits, generation and the way back."""
    from transformers import AutoModelForCausalLM

    decoder = write_checkpoint(model, groups, tmp_path / "run", tokenizer_file)
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007", tmp_path / "hf", 0, 0)
    register()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = our_logits(decoder)
    with torch.no_grad():
        if model.position.rope.scaling != "dynamic_ntk":  # its base depends on the length, padding is known after it
            for left in (True, False):
                tokens, mask = padded(left)
                got = theirs(tokens, attention_mask=mask).logits[mask.bool()]
                assert (got - expected).abs().max() < 1e-5
        bounds = torch.tensor([0, *map(len, TEXTS)]).cumsum(0).tolist()
        for text, first in zip(TEXTS, bounds, strict=False):
            got = theirs(torch.tensor([text])).logits[0]
            assert (got - expected[first : first + len(text)]).abs().max() < 1e-5

        # Positions that start again mark documents.
        packed = torch.tensor([[token for text in TEXTS for token in text]])
        positions = torch.tensor([[i for text in TEXTS for i in range(len(text))]])
        assert (theirs(packed, position_ids=positions).logits[0] - expected).abs().max() < 1e-5

    tokens, mask = padded(left=True)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = theirs.generate(tokens, attention_mask=mask, **settings)[:, tokens.shape[1] :]
    assert text.tolist() == generate(decoder, TEXTS, NEW)
    for way in ({"cache_implementation": "static"}, {"prefill_chunk_size": 5}):
        again = theirs.generate(tokens, attention_mask=mask, **settings, **way)[:, tokens.shape[1] :]
        assert again.tolist() == text.tolist(), way
    theirs.generation_config.max_length = tokens.shape[1] + NEW
    own = settings | {"max_new_tokens": None}
    again = theirs.generate(tokens, attention_mask=mask, **own)[:, tokens.shape[1] :]
    assert again.tolist() == text.tolist()
    # Without the cache every token is computed anew from the whole text.
    whole = theirs.generate(tokens, attention_mask=mask, use_cache=False, **settings)[:, tokens.shape[1] :]
    assert whole.tolist() == text.tolist()

    back = import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    before = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000007")
    after = CheckpointReader(back)
    assert before.weights == after.weights
    for key in before.weights:
        assert torch.equal(before.whole(key, "weight"), after.whole(key, "weight")), key
    again, config = load_for_inference(back, groups)
    assert config.data.length == LENGTH
    assert torch.equal(our_logits(again), expected)


def test_ids_beyond_the_tokenizer_are_never_generated(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    """A model may have more rows than its tokenizer has entries; those of untrained weights are as likely as any."""
    from transformers import AutoModelForCausalLM

    model = replace(make_model("softmax"), vocab_size=1000)
    decoder = write_checkpoint(model, groups, tmp_path / "run", tokenizer_file)
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007", tmp_path / "hf", 0, 0)
    register()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.config.vocab_size == 1000
    assert max(token for text in generate(decoder, TEXTS, NEW) for token in text) >= 300
    tokens, mask = padded(left=True)
    settings = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    text = theirs.generate(tokens, attention_mask=mask, do_sample=False, **settings)[:, tokens.shape[1] :]
    assert text.tolist() == generate(decoder, TEXTS, NEW, vocab_size=300)
    drawn = theirs.generate(tokens, attention_mask=mask, do_sample=True, temperature=3.0, **settings)
    assert drawn.max() < 300


@pytest.mark.parametrize("name", ["softmax-fire", "ssmax_pn-rope", "stickbreaking-nope", "ssmax-rope-bias_norm"])
def test_tensor_parallel_checkpoints_export_the_same_bytes(
    name: str, pool1: Pool, pool2: Pool, tokenizer_file: Path, tmp_path: Path
) -> None:
    weights = []
    for tensor, pool in ((1, pool1), (2, pool2)):
        folder = tmp_path / f"tp{tensor}"
        pool.run(
            "tests.hf.jobs:write", model=MODELS[name], tensor=tensor, folder=str(folder), tokenizer=str(tokenizer_file)
        )
        (checkpoint,) = (folder / "checkpoints").iterdir()
        export_checkpoint(checkpoint, folder / "hf", 0, 0)
        weights.append((folder / "hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def load_elsewhere(decoders: dict[str, Decoder], tmp_path: Path, packages: str) -> None:
    """Check what a process finds that knows transformers and nothing of ours. decoders: by exported folder."""
    tokens, mask = padded(left=True)
    given, found = tmp_path / "given.pt", tmp_path / "found.pt"
    torch.save({"folders": list(decoders), "tokens": tokens, "mask": mask, "prompts": PROMPTS}, given)
    script = Path(__file__).with_name("load_elsewhere.py")
    environment = os.environ | {"PYTHONPATH": packages, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, str(script), str(given), str(found)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(found)
    if packages:
        assert results["version"].startswith("5.")
    for folder, decoder in decoders.items():
        got = results[folder]
        assert (got["logits"][mask.bool()] - our_logits(decoder)).abs().max() < 1e-5
        assert got["text"] == generate(decoder, TEXTS, NEW)
        assert got["beams"] == (3, 22 + NEW)
        text = TextTokenizer(f"{folder}/tokenizer.json", 0, 0)
        assert got["ids"] == [0, *text.encode("the stick <|endoftext|>")]
        assert got["ids"].count(0) == 1
        prompts = [[0, *text.encode(prompt)] for prompt in PROMPTS]
        assert got["inputs"] == ["attention_mask", "input_ids"]
        assert got["written"] == got["together"] == generate(decoder, prompts, NEW)
        assert got["typed"] == got["written"][0]
        first = torch.tensor(prompts[0])
        with torch.no_grad():
            logits = decoder(first, PackedLayout.from_lengths([len(first)]))
        assert got["loss"] == pytest.approx(float(F.cross_entropy(logits[:-1], first[1:])), abs=1e-5)


def exported(names: list[str], groups: Groups, tokenizer_file: Path, tmp_path: Path) -> dict[str, Decoder]:
    decoders = {}
    for name in names:
        decoder = write_checkpoint(MODELS[name], groups, tmp_path / name, tokenizer_file)
        export_checkpoint(tmp_path / name / "checkpoints" / "step-00000007", tmp_path / name / "hf", 0, 0)
        decoders[str(tmp_path / name / "hf")] = decoder
    return decoders


def test_a_folder_loads_where_only_transformers_is(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    names = ["softmax-fire", "ssmax-rope-window", "ssmax-rope-bias_norm", "stickbreaking_remainder-nope"]
    load_elsewhere(exported(names, groups, tokenizer_file, tmp_path), tmp_path, "")


@pytest.mark.slow
def test_folders_load_under_transformers_5(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    packages = os.environ.get("SSSCALE_TRANSFORMERS_5", "")
    if not packages:
        pytest.skip("SSSCALE_TRANSFORMERS_5 names no folder of `pip install --target` with transformers 5")
    names = [name for name in MODELS if "dynamic" not in name]
    load_elsewhere(exported(names, groups, tokenizer_file, tmp_path), tmp_path, packages)


def test_the_commands_and_large_models_in_parts(
    groups: Groups, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = write_checkpoint(MODELS["ssmax-rope"], groups, tmp_path / "run", tokenizer_file)
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    export_main([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'hf'}", "dtype=bfloat16"])
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    for file in files:
        for key, weight in load_file(tmp_path / "hf" / file).items():
            ours = dict(decoder.named_parameters())[key]
            assert torch.equal(weight, ours[: len(weight)].bfloat16())
    import_main([f"from={tmp_path / 'hf'}", f"out={tmp_path / 'back'}"])
    again, _ = load_for_inference(tmp_path / "back", groups)
    for key, weight in again.named_parameters():
        assert torch.equal(weight, dict(decoder.named_parameters())[key].bfloat16().float()), key
    text = TextTokenizer.of_checkpoint(tmp_path / "back" / "checkpoints" / "step-00000000")
    assert (text.bos_id, text.eos_id) == (0, 0)


def test_bad_input(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    write_checkpoint(MODELS["softmax-nope"], groups, tmp_path / "run", tokenizer_file)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000007"
    run, out = f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'hf'}"
    for arguments, words in [
        ([run], "out=FOLDER is missing"),
        ([run, out, "dtyp=x"], "unknown argument 'dtyp=x'"),
        ([run, out, "dtype=int8"], "dtype must be float32, bfloat16 or float16, not 'int8'"),
        ([run, f"out={tmp_path}"], "exists and is not empty"),
    ]:
        with pytest.raises(UserError, match=words):
            export_main(arguments)
    assert not (tmp_path / "hf").exists()
    export_main([run, out])
    with pytest.raises(UserError, match="from=FOLDER is missing"):
        import_main([out])
    config = tmp_path / "hf" / "config.json"
    text = config.read_text()
    for changed, words in [
        (text.replace('"ssscale"', '"bert"'), "of a model_type 'bert', not 'ssscale'"),
        (text.replace('"ssscale"', '"llama"'), "only the folder has blocks"),
        (text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'), "only config.json describes blocks.2"),
        (text.replace('"intermediate_size": 40', '"intermediate_size": 48'), r"blocks\.0\.mlp\.\w+\.weight is"),
        (text.replace('"softmax"', '"sofmax"'), "config.json"),
        ("{", "config.json cannot be read"),
    ]:
        config.write_text(changed)
        with pytest.raises(UserError, match=words):
            import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    config.write_text(text)
    weights = tmp_path / "hf" / "model.safetensors"
    save_file({name: value.to(torch.int8) for name, value in load_file(weights).items()}, weights)
    with pytest.raises(UserError, match=r"has torch\.int8, which is no type of trained weights"):
        import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    text = Tokenizer(WordLevel({"x": 0}, "x")).to_str()  # `save` would print all ids below 2^24
    (tmp_path / "hf" / "tokenizer.json").write_text(text.replace('{"x":0}', '{"x":16777216}'))
    with pytest.raises(UserError, match=r"tokenizer\.json has token id 16777216: ids must be below 16,777,216"):
        import_checkpoint(tmp_path / "hf", tmp_path / "back", groups)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        export_main([run, f"out={tmp_path / 'other'}"])
