"""The needle test: prompts by their rules, answers against full passes, scores against whole matrices of weights."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.checkpoint.text import TextTokenizer
from eval.papers.figures import needle as figures
from eval.papers.needle import main
from eval.papers.retrieval import ANSWER_TOKENS, Haystack, answer, batches, draw_prompt, outcome
from ssscale.config.schema import position_config
from ssscale.data.questions import question_tokens
from ssscale.layout import PackedLayout
from ssscale.model.cache import KVCache, bytes_per_token
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from tests.eval.conftest import make_documents


@pytest.fixture(scope="module")
def haystack(tokenizer: TextTokenizer) -> Haystack:
    return Haystack(iter(make_documents(12, 8)), tokenizer)


@pytest.mark.parametrize("depth", [10, 50, 90])
def test_prompt(haystack, tokenizer, depth):
    prompt = draw_prompt(haystack, 400, depth, 3)
    assert prompt == draw_prompt(haystack, 400, depth, 3)
    assert prompt.tokens != draw_prompt(haystack, 400, depth, 4).tokens
    assert len(prompt.tokens) == 400
    assert prompt.tokens[0] == tokenizer.bos_id
    start, stop = prompt.span
    assert tokenizer.decode(prompt.tokens[start:stop]) == f" {prompt.number}."
    text = tokenizer.decode(prompt.tokens[1:])
    city = text.split("The special magic ")[1].split()[0]
    assert f" The special magic {city} number is: {prompt.number}." in text
    question = question_tokens(f"What is the special magic {city} number?", tokenizer.encode)
    assert prompt.tokens[-len(question) :] == question
    needle = len(tokenizer.encode(f" The special magic {city} number is:"))
    before = prompt.tokens[1 : start - needle]
    share = len(before) / (400 - 1 - needle - (stop - start) - len(question))
    assert share <= depth / 100
    assert share > depth / 100 - 0.25
    assert tokenizer.decode(before).rstrip(" ")[-1] in ".!?\n"


CORES = {
    "softmax": ("softmax", position_config()),
    "ssmax": ("ssmax", position_config()),
    "window": ("softmax", position_config("rope", window=70)),
    "alibi": ("softmax", position_config("alibi")),
    "stickbreaking": ("stickbreaking", position_config("nope")),
}


def all_weights(model, tokens):
    """Attention weights of every layer and head, [layers, N, T, T] float64, from the definitions."""
    layout = PackedLayout.from_lengths([len(tokens)])
    config = model.config
    found = []

    def hook(module, inputs):
        qkv = module.qkv(inputs[0])[0].double().unflatten(-1, (-1, config.head_size))
        q, k, _ = qkv.split(config.num_heads, 1)
        tables = config.place.rotation(config.head_size, layout)
        if tables is not None:
            cos, sin = (x.double()[:, None] for x in tables)
            q, k = (
                torch.cat([x[..., :h] * cos - x[..., h:] * sin, x[..., h:] * cos + x[..., :h] * sin], -1)
                for x, h in ((q, config.head_size // 2), (k, config.head_size // 2))
            )
        i = torch.arange(len(tokens))
        if config.mixers == ["ssmax"]:
            q = q * ((i + 1.0).double().log()[:, None] * module.weights.s.double())[..., None]
        z = torch.einsum("inh,jnh->nij", q, k) * config.head_size**-0.5
        if module.position.adds_bias:
            z = z + module.position.bias(module)(i, i).double()
        hidden = i[:, None] < i
        if config.position.window:
            hidden = hidden | (i[:, None] - i >= config.position.window)
        if config.mixers != ["stickbreaking"]:
            found.append(z.masked_fill(hidden, -torch.inf).softmax(-1))
            return
        beta = z.sigmoid().masked_fill(i[:, None] <= i, 0)
        keep = (1 - beta).flip(-1).cumprod(-1).flip(-1)
        found.append(beta * torch.cat([keep[..., 1:], torch.ones_like(keep[..., :1])], -1))

    hooks = [block.attention.register_forward_pre_hook(hook) for block in model.blocks]
    model(torch.tensor(tokens), layout)
    for handle in hooks:
        handle.remove()
    return torch.stack(found)


@pytest.mark.parametrize("name", CORES)
def test_scores_are_those_of_whole_matrices(name, config, groups, haystack, tokenizer):
    mixer, position = CORES[name]
    model = Decoder(replace(config.model, mixers=[mixer], position=position), groups, 128)
    initialize_weights(model, model.config, groups, seed=1)
    model.eval().requires_grad_(False)
    prompts = [draw_prompt(haystack, length, 90, 0) for length in (190, 150)]
    spans = [prompt.span for prompt in prompts]
    texts, scores = answer(model, [prompt.tokens for prompt in prompts], tokenizer.eos_id, spans)
    assert scores.shape == (2, 2, 2)
    for row, prompt in enumerate(prompts):
        exact = all_weights(model, prompt.tokens)[:, :, -1, slice(*prompt.span)].sum(-1)
        torch.testing.assert_close(scores[row].double(), exact, atol=2e-5, rtol=1e-4)
        # Greedy over all but EOS, against passes without a cache.
        tokens = list(prompt.tokens)
        for token in texts[row]:
            logits = model(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)]))[-1]
            logits[tokenizer.eos_id] = -torch.inf
            assert token == int(logits.argmax())
            tokens.append(token)
        assert len(tokens) == len(prompt.tokens) + ANSWER_TOKENS
    assert answer(model, [prompt.tokens for prompt in prompts], tokenizer.eos_id)[0] == texts


@pytest.mark.gpu
@pytest.mark.parametrize("name", CORES)
def test_scores_on_a_gpu(name, config, groups, haystack, tokenizer):
    mixer, position = CORES[name]
    with torch.device(groups.device):
        model = Decoder(replace(config.model, mixers=[mixer], position=position), groups, 128)
    initialize_weights(model, model.config, groups, seed=1)
    model.eval().requires_grad_(False)
    prompts = [draw_prompt(haystack, length, 90, 0) for length in (190, 150)]
    spans = [prompt.span for prompt in prompts]
    _, scores = answer(model, [prompt.tokens for prompt in prompts], tokenizer.eos_id, spans)
    model.cpu()
    for row, prompt in enumerate(prompts):
        exact = all_weights(model, prompt.tokens)[:, :, -1, slice(*prompt.span)].sum(-1)
        torch.testing.assert_close(scores[row].double(), exact, atol=1e-4, rtol=1e-3)


def test_eos_is_never_answered(model, haystack, tokenizer):
    prompt = draw_prompt(haystack, 120, 50, 0).tokens
    liked = answer(model, [prompt], tokenizer.eos_id)[0][0][0]
    assert liked not in answer(model, [prompt], liked)[0][0]


def test_batches_fit_the_cache(model, haystack, tokenizer, monkeypatch):
    """And answer as prompts one by one."""
    size = bytes_per_token(model)
    cache = KVCache(model, [100] * 3)
    assert cache.k.nbytes + cache.v.nbytes == 300 * size
    prompts = [draw_prompt(haystack, 150, 50, sample) for sample in range(5)]
    found = {}
    for most in (2, 1, 0):  # even a prompt that is too long is read
        monkeypatch.setattr("eval.papers.retrieval.CACHE_BYTES", most * 150 * size)
        some = list(batches(model, prompts))
        assert [len(batch) for batch in some] == ([2, 2, 1] if most == 2 else [1] * 5)
        assert [prompt for batch in some for prompt in batch] == prompts
        answers = [answer(model, [prompt.tokens for prompt in batch], tokenizer.eos_id)[0] for batch in some]
        found[most] = [text for batch in answers for text in batch]
    assert found[2] == found[1] == found[0]


def test_outcome():
    assert outcome(" 8106422.", "8106422") == "number"
    assert outcome(" 8106423", "8106422") == "first digit"
    assert outcome("The 8106422", "8106422") == "neither"
    assert outcome(" ", "8106422") == "neither"


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["needle", *map(str, arguments)])
    main()


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "books.txt"
    file.write_text(" ".join(make_documents(10, 9)))
    return file


def test_commands_and_figures(run, texts, tmp_path, monkeypatch, groups):
    sizes = ["--texts", texts, "--lengths", "150,200", "--depths", "20,80", "--samples", 2]
    call(monkeypatch, run, *sizes, "model.position.rope.base=500000")
    file = run / "eval" / "model.position.rope.base=500000" / "needle-step-00000010.json"
    result = json.loads(file.read_text())
    assert [(c["length"], c["depth"]) for c in result["cells"]] == [(150, 20), (150, 80), (200, 20), (200, 80)]
    result["cells"] = [cell | {"correct": 1} for cell in result["cells"][:3]]
    file.write_text(json.dumps(result))
    call(monkeypatch, run, *sizes, "model.position.rope.base=500000")
    again = json.loads(file.read_text())
    assert [cell["correct"] for cell in again["cells"]][:3] == [1, 1, 1]
    assert len(again["cells"]) == 4
    call(monkeypatch, run, "--texts", texts, "--scores", "--lengths", 150, "--trials", 3)
    scores = json.loads((run / "eval" / "needle_scores-step-00000010.json").read_text())
    assert np.array(scores["heads"]["scores"]).shape == (2, 2)
    assert len(scores["trials"]) == 3
    for number, draw in enumerate((figures.heat_map, figures.heads, figures.top_heads)):
        draw([run]).savefig(tmp_path / f"{number}.png")


def test_bad_input(run, texts, tmp_path, monkeypatch, capsys):
    cases = (
        (["--lengths", "20"], "leave no room"),
        (["--lengths", "9000000"], "exceed the"),
        (["--lengths", "x"], "--lengths must be comma-separated integers"),
        (["--depths", "101"], "--depths must be from 1 to 100"),
        (["--samples", "0"], "--samples"),
        (["--scores", "--lengths", "100,200"], "--scores takes one length"),
    )
    for arguments, said in cases:
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, run, "--texts", texts, *arguments)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


def test_fine_tuning_command(run, tmp_path, monkeypatch, groups):
    """launch/finetune.py learns an answer by heart; the needle test takes its run."""
    from launch import finetune

    question = {"question": "What is broken?", "answers": [{"text": "A stick"}]}
    squad = {"data": [{"paragraphs": [{"context": "A stick is broken.", "qas": [question]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    monkeypatch.setattr("ssscale.parallel.groups.shutdown", lambda: None)  # the groups are all tests'
    folder = tmp_path / "tuned"
    sizes = ["epochs=8", "batch=1", "lr=1e-2", "train.log_every=1"]
    finetune.main([f"from={run}", f"questions={tmp_path / 'squad.json'}", f"run_dir={folder}", *sizes])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    call(monkeypatch, folder, "--texts", run / "config.yaml", "--lengths", 120, "--depths", 50, "--samples", 1)
