import io

import pytest
import torch

from launch.generate import Shown
from launch.generate import main as generate
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.mixers.softmax import Softmax
from tests.eval.conftest import LENGTH

PROMPT = "The river and the hill"


def greedy(model, tokens, number):
    """The likeliest tokens, from a whole forward pass for each of them."""
    found = list(tokens)
    for _ in range(number):
        layout = PackedLayout.from_lengths([len(found)])
        found.append(int(model(torch.tensor(found), layout)[-1].argmax()))
    return found[len(tokens) :]


def test_the_likeliest_text_is_that_of_whole_passes(run, model, tokenizer, capsys):
    generate([f"checkpoint={run}", f"prompt={PROMPT}", "temperature=0", "max_new_tokens=12"])
    prompt = tokenizer.encode(PROMPT)
    added = greedy(model, [tokenizer.bos_id, *prompt], 12)
    added = added[: added.index(tokenizer.eos_id)] if tokenizer.eos_id in added else added
    assert capsys.readouterr().out == tokenizer.decode([*prompt, *added]) + "\n"


def test_each_sample_has_a_seed_of_its_own(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    generate([f"checkpoint={run}", "prompt=-", "samples=2", "seed=6", "max_new_tokens=9"])
    first, second = (
        capsys.readouterr().out.split("───── 1 of 2, seed 6 ─────\n")[1].split("───── 2 of 2, seed 7 ─────\n")
    )
    assert first != second
    assert second.startswith(PROMPT)
    generate([f"checkpoint={run}", f"prompt={PROMPT}", "seed=7", "max_new_tokens=9"])
    assert capsys.readouterr().out == second


def test_half_a_character_is_not_printed(capsys):
    texts = {1: "é\ufffd", 2: "éü", 3: "éü!\ufffd"}
    shown = Shown(lambda tokens: texts[len(tokens)])
    assert shown([[1]]) == [False]
    assert capsys.readouterr().out == "é"
    shown([[1, 2]])
    assert capsys.readouterr().out == "ü"
    shown.add([1, 2, 3], whole=True)
    assert capsys.readouterr().out == "!\ufffd\n"


def test_mistakes_are_one_sentence(run, monkeypatch):
    with pytest.raises(UserError, match=rf"tokens with BOS, so that length={LENGTH} leaves no room for more"):
        generate([f"checkpoint={run}", f"prompt={PROMPT * LENGTH}"])
    with pytest.raises(UserError, match="unknown argument"):
        generate([f"checkpoint={run}", "train.seed=1"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(UserError, match="prompt is not UTF-8 text"):
        generate([f"checkpoint={run}", "prompt=-"])
    with pytest.raises(UserError, match="prompt is not UTF-8 text"):
        generate([f"checkpoint={run}", "prompt=caf\udce9"])
    with pytest.raises(UserError, match="temperature must be 0 or at least 1e-06, not 1e-40"):
        generate([f"checkpoint={run}", "temperature=1e-40"])
    monkeypatch.setattr(Softmax, "cached", False)
    with pytest.raises(UserError, match="softmax does not define `cached`, so that no text can be generated"):
        generate([f"checkpoint={run}"])
