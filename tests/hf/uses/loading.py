"""Loading and saving, and the methods of every PreTrainedModel."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from tests.hf.uses.subject import TEXTS, TRUST, Subject, equal, padded, refused, same, use


def check_logits(s: Subject, model: Any, text: list[int] = TEXTS[0]) -> None:
    equal(model(torch.tensor([text])).logits[0], s.reference()(text).logits)


@use("`AutoConfig`")
def auto_config(s: Subject) -> None:
    config, written = AutoConfig.from_pretrained(s.folder, **TRUST), s.reference().config
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id", "mixers", "tie_word_embeddings"):
        same(getattr(config, key), written[key])


@use("`AutoModelForCausalLM`, no weight left over or missing")
def auto_causal(s: Subject) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(s.folder, **TRUST, output_loading_info=True)
    assert not any(report.values()), report
    check_logits(s, model)


@use("`AutoModel`")
def auto_model(s: Subject) -> None:
    model, report = AutoModel.from_pretrained(s.folder, **TRUST, output_loading_info=True)
    assert not any(report.values()), report
    equal(model(torch.tensor([TEXTS[0]])).last_hidden_state[0], s.reference()(TEXTS[0]).states[-1])


@use("`AutoModelForSequenceClassification`")
def auto_classifier(s: Subject) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(s.folder, **TRUST, num_labels=3)
    states = torch.stack([s.reference()(text).states[-1][-1] for text in TEXTS])
    expected, labels = states @ model.score.weight.detach().double().T, torch.tensor([2, 0, 1])
    for left in (True, False):
        ids, mask = padded(TEXTS, left)
        output = model(ids, attention_mask=mask, labels=labels)
        equal(output.logits, expected)
        equal(output.loss, F.cross_entropy(expected, labels))
    model.save_pretrained(s.scratch)
    again = AutoModelForSequenceClassification.from_pretrained(s.scratch, **TRUST)
    equal(again(ids, attention_mask=mask).logits, expected)


@use("another Auto class, such as `AutoModelForTokenClassification`")
def other_class(s: Subject) -> str:
    from transformers import AutoModelForTokenClassification

    text = refused(lambda: AutoModelForTokenClassification.from_pretrained(s.folder, **TRUST), "Unrecognized config")
    return re.sub("<class '.*?SSScaleConfig'>", "SSScaleConfig", text.split(" Model type should be")[0])


@use("without `trust_remote_code`")
def without_trust(s: Subject) -> str:
    text = refused(lambda: AutoModelForCausalLM.from_pretrained(s.folder), "trust_remote_code")
    return text.replace(str(s.folder), "FOLDER").replace(f"/{s.folder}", "/FOLDER")


@use("`AutoTokenizer`: BOS first, the same text back")
def auto_tokenizer(s: Subject) -> None:
    text = "the stick breaks <|endoftext|>"
    ids = s.tokenizer(text)["input_ids"]
    same((ids[0], ids.count(0)), (0, 1))
    same(s.tokenizer.decode(ids, skip_special_tokens=True), text)
    same(sorted(s.tokenizer(text)), ["attention_mask", "input_ids"])


@use("the pad token is not EOS")
def pad_token(s: Subject) -> None:
    pad, eos = s.tokenizer.pad_token_id, s.tokenizer.eos_token_id
    assert pad != eos
    same((s.model.config.pad_token_id, s.model.generation_config.pad_token_id), (pad, pad))
    assert s.text_ids <= pad < s.model.config.vocab_size
    same(s.tokenizer.padding_side, "left")
    same(s.tokenizer(["the", "the stick breaks"], padding=True)["input_ids"][0][0], pad)


@use("a long text has no warning of indexing errors")
def long_text(s: Subject) -> None:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    level, tokenizer = logger.level, AutoTokenizer.from_pretrained(s.folder)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        tokenizer("the stick breaks " * 100)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    same(records, [])


@use("files are readable as the umask says")
def modes(s: Subject) -> None:
    probe = s.scratch / "probe"
    probe.touch()
    for file in s.folder.iterdir():
        same((file.name, stat.S_IMODE(file.stat().st_mode)), (file.name, stat.S_IMODE(probe.stat().st_mode)))


@use("`dtype=torch.bfloat16`")
def to_bfloat16(s: Subject) -> None:
    model = s.load(dtype=torch.bfloat16)
    named = dict(s.model.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, named[name].bfloat16()), name
    check_half(s, model)


def check_half(s: Subject, model: Any) -> None:
    found, expected = model(torch.tensor([TEXTS[0]])).logits[0], s.reference()(TEXTS[0]).logits
    assert 0 < (found.double() - expected).std() < 0.05 * expected.std()


@use('exported as bfloat16, `dtype="auto"`')
def exported_bfloat16(s: Subject) -> None:
    model = AutoModelForCausalLM.from_pretrained(s.bfloat16, **TRUST, dtype="auto")
    same(model.dtype, torch.bfloat16)
    check_half(s, model)


@use("`model.half()`")
def half(s: Subject) -> None:
    model = s.load().half()
    same(model.dtype, torch.float16)
    check_half(s, model)


@use('`device_map="cpu"`')
def device_map(s: Subject) -> None:
    check_logits(s, s.load(device_map="cpu"))


@use('`device_map="auto"`')
def device_map_auto(s: Subject) -> None:
    check_logits(s, s.load(device_map="auto"))


@use("a part of the model offloaded to disk")
def offload(s: Subject) -> None:
    parts = {name: "cpu" for name, _ in s.model.named_children()} | {"blocks.1": "disk", "blocks.0": "cpu"}
    parts.pop("blocks")
    model = s.load(device_map=parts, offload_folder=s.scratch)
    check_logits(s, model)


@use("`low_cpu_mem_usage=True`")
def low_memory(s: Subject) -> None:
    check_logits(s, s.load(low_cpu_mem_usage=True))


@use("`save_pretrained`, as `push_to_hub` does, and loading")
def save(s: Subject) -> None:
    s.model.save_pretrained(s.scratch / "saved")
    s.tokenizer.save_pretrained(s.scratch / "saved")
    again = AutoModelForCausalLM.from_pretrained(s.scratch / "saved", **TRUST)
    check_logits(s, again)
    texts = ["the stick", "the soft max fades"]
    tokenizer = AutoTokenizer.from_pretrained(s.scratch / "saved")
    same(tokenizer(texts, padding=True)["input_ids"], s.tokenizer(texts, padding=True)["input_ids"])
    again.save_pretrained(s.scratch / "twice")
    check_logits(s, AutoModelForCausalLM.from_pretrained(s.scratch / "twice", **TRUST))


@use("`save_pretrained` in shards (`max_shard_size`)")
def save_shards(s: Subject) -> None:
    s.model.save_pretrained(s.scratch, max_shard_size="20KB")
    assert len(list(s.scratch.glob("*.safetensors"))) > 2
    check_logits(s, AutoModelForCausalLM.from_pretrained(s.scratch, **TRUST))


@use("the names of saved weights are those of the export")
def saved_names(s: Subject) -> None:
    s.model.save_pretrained(s.scratch)
    same(sorted(s.reference(s.scratch).w), sorted(s.reference().w))
    same((s.scratch / "modeling_ssscale.py").read_bytes(), (s.folder / "modeling_ssscale.py").read_bytes())


@use("`from_config`: fresh weights")
def from_config(s: Subject) -> None:
    model = AutoModelForCausalLM.from_config(s.model.config, **TRUST)
    assert all(weight.isfinite().all() for weight in model.parameters())
    std = s.model.config.initializer_range
    assert 0.9 * std < model.blocks[0].mlp.gate_up.weight.std() < 1.1 * std
    if s.mixer == "SSMax":
        same(model.blocks[0].attention.weights.s, torch.full((4,), s.model.config.mixer["ssmax"]["scale"]))


@use("`resize_token_embeddings`, and back")
def resize(s: Subject) -> None:
    model, expected = s.load(), s.reference()(TEXTS[0]).logits
    size = expected.shape[-1]
    model.resize_token_embeddings(size + 5)
    same((model.config.vocab_size, model.get_output_embeddings().weight.shape[0]), (size + 5, size + 5))
    found = model(torch.tensor([TEXTS[0]]), labels=torch.tensor([TEXTS[0]]))
    equal(found.logits[0, :, :size], expected)
    model.save_pretrained(s.scratch)
    again = AutoModelForCausalLM.from_pretrained(s.scratch, **TRUST)
    equal(again(torch.tensor([TEXTS[0]])).logits, found.logits)
    again.resize_token_embeddings(size)
    check_logits(s, again)


@use("a new pad token and `resize_token_embeddings`")
def new_pad(s: Subject) -> None:
    model, tokenizer = s.load(), AutoTokenizer.from_pretrained(s.folder)
    tokenizer.add_special_tokens({"pad_token": "<|other pad|>"})
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    inputs = tokenizer(["the", "the stick breaks"], padding=True, return_tensors="pt")
    found = model(**inputs).logits[0, -2:, : s.model.config.vocab_size]
    equal(found, s.reference()(s.tokenizer("the")["input_ids"]).logits[-2:])


@use("`get_input_embeddings`, `set_input_embeddings`")
def input_embeddings(s: Subject) -> None:
    model, reference = s.load(), s.reference()
    other = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach().flip(0))
    model.set_input_embeddings(other)
    flipped = [reference.config["vocab_size"] - 1 - token for token in TEXTS[0]]
    x = reference.embed(flipped)
    equal(model(torch.tensor([TEXTS[0]])).logits[0], reference(x).logits)


@use("`get_output_embeddings`, `set_output_embeddings`")
def output_embeddings(s: Subject) -> None:
    model = s.load()
    head = torch.nn.Linear(32, 7, bias=False)
    same(model.get_output_embeddings().weight.shape, (304, 32))
    model.set_output_embeddings(head)
    expected = s.reference()(TEXTS[0]).states[-1] @ head.weight.double().T
    equal(model(torch.tensor([TEXTS[0]])).logits[0], expected)


@use("`tie_weights`")
def tie_weights(s: Subject) -> None:
    model = s.load()
    model.tie_weights()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    same(tied, s.model.config.tie_word_embeddings)
    check_logits(s, model)


@use("`num_parameters`, `get_memory_footprint`")
def sizes(s: Subject) -> None:
    count = sum(weight.numel() for weight in s.reference().w.values())
    same((s.model.num_parameters(), s.model.get_memory_footprint()), (count, 4 * count))


@use("quantization with bitsandbytes")
def bitsandbytes(s: Subject) -> str:
    settings = BitsAndBytesConfig(load_in_8bit=True)
    return refused(lambda: s.load(quantization_config=settings), "bitsandbytes")


@use("two exports of the same folder name in one process")
def same_name(s: Subject) -> None:
    """transformers names the modules of both after the folder."""
    copy = s.scratch / s.folder.name
    shutil.copytree(s.other, copy)
    model = AutoModelForCausalLM.from_pretrained(copy, **TRUST)
    equal(model(torch.tensor([TEXTS[0]])).logits[0], s.reference(copy)(TEXTS[0]).logits)
    check_logits(s, s.load())


@use("only torch, transformers and the standard library are imported")
def imports(s: Subject) -> None:
    import ast
    import sys

    for file in Path(s.folder).glob("*.py"):
        assert len(file.read_text().splitlines()) < 400, file
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            for name in names:
                top = name.split(".")[0]
                assert top in ("torch", "transformers") or top in sys.stdlib_module_names, (file, name)
    same(json.loads((s.folder / "config.json").read_text())["model_type"], "ssscale")
