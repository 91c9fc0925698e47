"""Bad input: one sentence naming the culprit, exit code 2, nothing left under the output's name."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from data_prep.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
GOOD = json.dumps({"text": "some good text " * 30}) + "\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"text": "a\n', "a.jsonl line 2 is not a JSON record"),
        (b'{"text": a}\n', "a.jsonl line 2 is not a JSON record: Expecting value at column 10"),
        (b'{"body": "a"}\n', "a.jsonl line 2 has no field 'text' (it has body)"),
        (b'{"text": 7}\n', "a.jsonl line 2: field 'text' is int, not text"),
        (b"[1]\n", "a.jsonl line 2 is not a JSON object but list"),
        (b'{"text": "\xff"}\n', "a.jsonl line 2 is not valid UTF-8"),
        (b'{"text": "\\ud800"}\n', "a.jsonl line 2 is not valid UTF-8"),
    ],
)
def test_broken_lines_name_file_and_line(line, sentence, tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + line + GOOD.encode() * 3)
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    command += ["--length", "16", "--workers", "1", "--valid-fraction", "0"]
    assert main(command) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--skip-broken"]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["a"]["documents_dropped"] == {"broken": 1}
    assert manifest["splits"]["train"]["a"]["documents"] == 4


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        (["a={root}/b", "a={root}/a.jsonl"], "source 'a' reads {root}/a.jsonl twice"),
        (["a={root}/a.jsonl", "a={root}/b:valid"], "b/link.jsonl for training and for validation: name it once"),
        (["a={root}/c"], "{root}/c/self is a link to a folder that holds it"),
    ],
)
def test_links_to_what_is_read_already(sources, sentence, tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD * 5)
    for folder in "bc":
        (tmp_path / folder).mkdir()
    (tmp_path / "b" / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "c" / "d.jsonl").write_text(GOOD * 5)
    (tmp_path / "c" / "self").symlink_to(tmp_path / "c")
    flags = [flag for source in sources for flag in ("--source", source.format(root=tmp_path))]
    defaults = ["--out", str(tmp_path / "out"), "--tokenizer", tokenizer, "--length", "16", "--workers", "1"]
    assert main(["pack", *defaults, *flags]) == 2
    assert sentence.format(root=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("source", ["", "/*.jsonl.gz", "/b*", "/b.jsonl.gz", "/**"])
def test_a_link_to_nothing_is_named(source, tokenizer, tmp_path, capsys):
    """Its text was left out without a word."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 5))
    (folder / "b.jsonl.gz").symlink_to("gone")
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={folder}{source}", "--tokenizer", tokenizer]
    assert main([*command, "--length", "16", "--workers", "1"]) == 2
    said = f"error: {folder}/b.jsonl.gz is a link to gone, which cannot be read: mend or remove the link\n"
    assert capsys.readouterr().err == said
    (folder / "b.jsonl.gz").rename(folder / "lock")  # of a kind that a folder's files are not read for
    assert source or main([*command, "--length", "16", "--workers", "1"]) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--source", "a={root}/nowhere"], "no input at {root}/nowhere"),
        (["--source", "a"], "--source a must be NAME=PATH"),
        (["--source", "a/b={root}/a.jsonl"], "source name 'a/b'"),
        (["--source", "_a={root}/a.jsonl"], "a letter or digit first"),
        (["--source", "a={root}/a.jsonl:valid"], "source 'a' has validation files only"),
        (["--source", "a={root}/empty.jsonl"], "source 'a' has 0 tokens"),
        (
            ["--source", "a={root}/a.jsonl", "--min-chars", "9999"],
            "source 'a' has 0 tokens: not one row of 16 (documents dropped: 5 filtered)",
        ),
        (["--source", "a={root}/a.jsonl", "--min-chars", "-1"], "min_chars -1 must be at least 0"),
        (["--source", "a={root}/a.jsonl", "--max-chars", "0"], "max_chars 0 must be at least 1"),
        (["--source", "a={root}/a.jsonl", "--config", "{root}/buffer.yaml"], "buffer_tokens 0 must be at least 1"),
        (["--source", "a={root}/cut.jsonl.gz"], "cut.jsonl.gz is broken or cut off"),
        (["--source", "a={root}/cut.jsonl.zst"], "cut.jsonl.zst is broken or cut off"),
        (["--source", "a={root}/a.jsonl", "--length", "1"], "length 1 must be at least 2"),
        (["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/a.jsonl"], "a.jsonl is not a tokenizer"),
        (["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/none"], "no tokenizer file {root}/none"),
        (["--source", "a={root}/a.jsonl", "--bos", "<none>"], "has no token <none>"),
        (["--source", "a={root}/a.jsonl", "--bos", ""], "bos is empty: name a token of the tokenizer"),
        (
            ["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/far.json"],
            "far.json has token id 16777216: ids must be",
        ),
        (["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/no_tokens.json"], "has none of the boundary tokens"),
        (["--source", "a={root}/a.jsonl", "--vocab-size", "100"], "beyond the model's vocab_size=100"),
        (["--source", "a={root}/a.jsonl", "--valid-fraction", "2"], "valid_fraction 2.0"),
        (["--source", "a=stdlib:music"], "unknown source stdlib:music"),
        (["--source", "a={root}/a.jsonl", "--source", "b={root}/a.jsonl:valid"], "'b' has validation files"),
        (["--source", "a={root}/a.jsonl", "--source", "a={root}/*.jsonl"], "source 'a' reads {root}/a.jsonl twice"),
        (
            ["--source", "a={root}", "--source", "a={root}/a.jsonl:valid"],
            "a.jsonl for training and for validation: name it",
        ),
        (["--config", "{root}/again.yaml"], "again.yaml is not YAML in line 2: found duplicate key sources"),
        (["--config", "{root}/inner.yaml"], "inner.yaml is not YAML in line 2: found duplicate key a"),
        (["--config", "{root}/deep.yaml"], "deep.yaml is nested too deeply, or contains itself"),
        (["--source", "a={root}/a.jsonl", "--out", "{root}"], "{root} holds something else (a.jsonl)"),
        (["--source", "a={root}/a.jsonl", "--out", "{root}/a.jsonl"], "a.jsonl is a file"),
        (["--source", "a={root}/a.jsonl", "--workers", "0"], "--workers 0"),
        (["--config", "{root}/typo.yaml"], "unknown key 'lenght', did you mean 'length'?"),
        (["--config", "{root}/type.yaml"], "seed='many' must be int"),
        (["--config", "{root}/latin.yaml"], "latin.yaml is not valid UTF-8"),
        (["--config", "{root}/cut.yaml"], "cut.yaml is not YAML in line 3"),
        (["--config", "{root}/bound.yaml"], "where.a.n is {{'mim': 1}}: a range is {{min: NUMBER"),
        (["--config", "{root}/word.yaml"], "where.a.n is {{'min': 'x'}}: a range is"),
        (["--config", "{root}/none.yaml"], "where.a.n is {{}}: a range is"),
        (
            ["--config", "{root}/text.yaml"],
            "where.a filters records by their columns, which {root}/a.txt does not have",
        ),
        (["--source", "a={root}/a.jsonl", "--save-every", "-1"], "--save-every -1.0 must be at least 0"),
        (["--source", "a={root}/a.jsonl", "--save-every", "nan"], "--save-every nan must be at least 0"),
        (["--source", "a={root}/a.jsonl", "--out", ""], "--out . is not the name of a folder to be made"),
        (["--length", "many"], "error: argument --length: invalid int value: 'many'; --help lists all arguments\n"),
        (["--lnegth", "8"], "error: unrecognized arguments: --lnegth 8; --help lists all arguments\n"),
        ([], "no source"),
    ],
)
def test_flags_and_files(flags, sentence, tokenizer, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "empty")
    (tmp_path / "a.jsonl").write_text(GOOD * 5)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 5)[:-12])
    frame = zstandard.compress(GOOD.encode() * 5)
    (tmp_path / "cut.jsonl.zst").write_bytes(frame + frame[:-5])  # after whole documents
    (tmp_path / "typo.yaml").write_text("lenght: 3\n")
    (tmp_path / "type.yaml").write_text("seed: many\n")
    (tmp_path / "latin.yaml").write_bytes(b"caf\xe9: 1\n")
    (tmp_path / "cut.yaml").write_text("seed: 1\nsources: {a: b\n")
    (tmp_path / "buffer.yaml").write_text("buffer_tokens: 0\n")
    (tmp_path / "again.yaml").write_text(f"sources: {{a: {tmp_path}/a.jsonl}}\nsources: {{b: {tmp_path}/a.jsonl}}\n")
    (tmp_path / "inner.yaml").write_text(f"sources:\n  {{a: {tmp_path}/a.jsonl, a: {tmp_path}/b.jsonl}}\n")
    for name, vocabulary in (("far", {"<|endoftext|>": 2**24}), ("no_tokens", {})):
        text = Tokenizer(WordLevel({"x": 0}, "<|endoftext|>")).to_str()  # `save` would print all ids below 2^24
        (tmp_path / f"{name}.json").write_text(text.replace('{"x":0}', json.dumps(vocabulary)))
    (tmp_path / "deep.yaml").write_text("seed: " + "[" * 3000)
    (tmp_path / "a.txt").write_text("text " * 99)
    (tmp_path / "text.yaml").write_text(f"sources: {{a: {tmp_path}/a.txt}}\nwhere: {{a: {{language: en}}}}\n")
    for name, condition in (("bound", "{mim: 1}"), ("word", "{min: x}"), ("none", "{}")):
        (tmp_path / f"{name}.yaml").write_text(
            f"sources: {{a: {tmp_path}/a.jsonl}}\nwhere: {{a: {{n: {condition}}}}}\n"
        )
    flags = [flag.format(root=tmp_path) for flag in flags]
    defaults = ["--out", str(tmp_path / "out"), "--tokenizer", tokenizer, "--length", "16", "--workers", "1"]
    assert main(["pack", *defaults, *flags]) == 2
    assert sentence.format(root=tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_tokenizers_size_is_checked(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD)
    command = [
        "train-tokenizer",
        "--source",
        f"a={tmp_path}/a.jsonl",
        "--out",
        str(tmp_path / "t.json"),
        "--vocab-size",
    ]
    assert main([*command, "100"]) == 2
    assert "too small" in capsys.readouterr().err
    assert main([*command, "5000"]) == 2
    assert "give more text" in capsys.readouterr().err
    assert main([*command, str(10**12)]) == 2  # whose memory the trainer would ask for, and abort
    assert capsys.readouterr().err == "error: a vocabulary of 1000000000000 is too large: 16,777,216 is the most\n"
    assert main([*command, "258", "--out", str(tmp_path / "a.jsonl" / "t.json")]) == 2
    assert f"error: cannot make the folder of {tmp_path}/a.jsonl/t.json: " in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_a_figure_has_a_form_that_it_is_drawn_in(tmp_path, capsys):
    """Without one, FILE.png was written and FILE named."""
    assert main(["stats", str(tmp_path), "--figure", str(tmp_path / "lengths")]) == 2
    assert capsys.readouterr() == ("", f"error: --figure {tmp_path}/lengths must end in .png, .svg or .pdf\n")


def test_output_that_cannot_be_written(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD * 5)
    pack = ["pack", "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer, "--length", "16", "--workers", "1"]
    assert main([*pack, "--out", str(tmp_path / "out")]) == 0
    command = [sys.executable, "-m", "data_prep", "stats", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
    assert b"5 documents" in shown
    assert b" ? " in shown  # → in UTF-8
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (2, b"error: No space left on device: the output\n")


def test_a_tokenizer_is_never_overwritten(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD * 100)
    before = Path(tokenizer).read_bytes()
    command = ["train-tokenizer", "--source", f"a={tmp_path}/a.jsonl", "--vocab-size", "258", "--out"]
    assert main([*command, tokenizer]) == 2
    assert capsys.readouterr().err == f"error: {tokenizer} exists: choose another --out or remove it\n"
    assert Path(tokenizer).read_bytes() == before
    assert main([*command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is a folder: --out names the file to write\n"
    assert main([*command, str(tmp_path / "new.json")]) == 0


def test_a_task_without_documents_says_so(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD)
    command = ["pack", "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer, "--length", "16"]
    said = []
    for task in ("0/2", "1/2"):
        assert main([*command, "--workers", "1", "--task", task, "--out", str(tmp_path / task[0])]) == 0
        said.append("has no documents" in capsys.readouterr().out)
    assert sorted(said) == [False, True]
    empty = tmp_path / str(said.index(True))
    assert main(["stats", str(empty), "--figure", str(tmp_path / "x.png")]) == 2
    assert f"{empty} has no rows to draw" in capsys.readouterr().err
    assert main(["stats", str(empty), "--figure", str(tmp_path / "none" / "x.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_errors_cross_processes(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD + "broken\n")
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    assert main([*command, "--workers", "2"]) == 2
    assert "a.jsonl line 2 is not a JSON record" in capsys.readouterr().err
