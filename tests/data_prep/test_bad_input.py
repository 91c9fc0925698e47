"""Bad input: one sentence naming the culprit, exit code 2, nothing left under the output's name."""

import gzip
import json

import pytest

from data_prep.__main__ import main

GOOD = json.dumps({"text": "some good text " * 30}) + "\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"text": "a\n', "a.jsonl line 2 is not a JSON record"),
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
    ("flags", "sentence"),
    [
        (["--source", "a={root}/nowhere"], "no input at {root}/nowhere"),
        (["--source", "a"], "--source a must be NAME=PATH"),
        (["--source", "a/b={root}/a.jsonl"], "source name 'a/b'"),
        (["--source", "a={root}/empty.jsonl"], "source 'a' has 0 tokens"),
        (["--source", "a={root}/cut.jsonl.gz"], "cut.jsonl.gz is broken or cut off"),
        (["--source", "a={root}/a.jsonl", "--length", "1"], "length 1 must be at least 2"),
        (["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/a.jsonl"], "a.jsonl is not a tokenizer"),
        (["--source", "a={root}/a.jsonl", "--tokenizer", "{root}/none"], "no tokenizer file {root}/none"),
        (["--source", "a={root}/a.jsonl", "--bos", "<none>"], "has no token <none>"),
        (["--source", "a={root}/a.jsonl", "--vocab-size", "100"], "beyond the model's vocab_size=100"),
        (["--source", "a={root}/a.jsonl", "--valid-fraction", "2"], "valid_fraction 2.0"),
        (["--source", "a=stdlib:music"], "unknown source stdlib:music"),
        (["--source", "a={root}/a.jsonl", "--source", "b={root}/a.jsonl:valid"], "'b' has validation files"),
        (["--source", "a={root}/a.jsonl", "--out", "{root}"], "{root} holds something else (a.jsonl)"),
        (["--source", "a={root}/a.jsonl", "--out", "{root}/a.jsonl"], "a.jsonl is a file"),
        (["--source", "a={root}/a.jsonl", "--workers", "0"], "--workers 0"),
        (["--config", "{root}/typo.yaml"], "unknown key 'lenght', did you mean 'length'?"),
        (["--config", "{root}/type.yaml"], "seed='many' must be int"),
        ([], "no source"),
    ],
)
def test_flags_and_files(flags, sentence, tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD * 5)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 5)[:-12])
    (tmp_path / "typo.yaml").write_text("lenght: 3\n")
    (tmp_path / "type.yaml").write_text("seed: many\n")
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
    assert not (tmp_path / "t.json").exists()


def test_errors_cross_processes(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(GOOD + "broken\n")
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--tokenizer", tokenizer]
    assert main([*command, "--workers", "2"]) == 2
    assert "a.jsonl line 2 is not a JSON record" in capsys.readouterr().err
