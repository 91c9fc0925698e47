"""From files to a data folder: text comes back from the rows, the bytes do not depend on the workers."""

import json
import shutil
from collections import defaultdict

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.read_shards import read_manifest
from tests.data_prep.conftest import source_flags, write_jsonl
from tests.data_prep.folders import contents, documents


def test_documents_decode_to_their_texts(packed, corpus, tokenizer):
    manifest = read_manifest(str(packed))
    decode = Tokenizer.from_file(tokenizer).decode
    found = documents(packed)
    whole = {
        key: decode(tokens[1:-1], skip_special_tokens=False)
        for key, tokens in found.items()
        if tokens[0] == manifest["tokenizer"]["bos_id"]
        and tokens[-1] == manifest["tokenizer"]["eos_id"]
        and len(tokens) > 1
    }
    # The parts of a row that was not full are dropped: four streams, less than a row each.
    assert len(whole) > 230
    for (_, source, number), text in whole.items():
        assert text == corpus[source][number]
    for split, sources in manifest["splits"].items():
        for source, counts in sources.items():
            assert counts["tokens_in"] == counts["tokens_out"] + sum(counts["tokens_dropped"].values())
            assert counts["tokens_out"] == sum(len(t) for k, t in found.items() if k[:2] == (split, source))
    assert sum(c["documents"] for sources in manifest["splits"].values() for c in sources.values()) == 280
    size = sum(c["bytes"] for sources in manifest["splits"].values() for c in sources.values())
    assert size == sum(len(text.encode()) for source in ("web", "books") for text in corpus[source])


def test_validation_is_split_by_text(packed, corpus):
    where = defaultdict(set)
    for split, source, number in documents(packed):
        where[corpus[source][number]].add(split)
    assert all(len(splits) == 1 for splits in where.values())
    held_out = sum(splits == {"valid"} for splits in where.values())
    assert 0.1 < held_out / len(where) < 0.3


def test_same_bytes_whatever_the_workers(corpus, tokenizer, tmp_path):
    for workers in (1, 3):
        flags = [*source_flags(corpus), "--tokenizer", tokenizer, "--length", "64", "--workers", str(workers)]
        assert main(["pack", "--out", str(tmp_path / str(workers)), *flags]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_a_whole_folder_is_kept_and_another_one_refused(packed, corpus, tokenizer, capsys):
    flags = [*source_flags(corpus), "--tokenizer", tokenizer, "--shard-bytes", "20000", "--out", str(packed)]
    packing = read_manifest(str(packed))["packing"]
    before = contents(packed)
    assert main(["pack", *flags, "--length", "64", "--packing", packing]) == 0
    assert "kept" in capsys.readouterr().out
    assert main(["pack", *flags, "--length", "32", "--packing", packing]) == 2
    assert "made from other settings" in capsys.readouterr().err
    assert contents(packed) == before


def test_a_whole_folder_of_another_tokenizer_is_refused(corpus, tokenizer, tmp_path, capsys):
    """The path was the same, so the folder was kept."""
    changed = tmp_path / "t.json"
    shutil.copyfile(tokenizer, changed)
    command = ["pack", *source_flags(corpus), "--tokenizer", str(changed), "--length", "64", "--workers", "1"]
    command += ["--out", str(tmp_path / "out")]
    assert main(command) == 0
    before = contents(tmp_path / "out")
    assert main(command) == 0
    assert "kept" in capsys.readouterr().out
    changed.unlink()
    assert main(command) == 0  # nothing is read from it any more
    assert "kept" in capsys.readouterr().out
    train = ["train-tokenizer", *source_flags(corpus), "--vocab-size", "290", "--out", str(changed)]
    assert main(train) == 0
    assert main(command) == 2
    said = f"error: {tmp_path}/out holds data made from another tokenizer: choose another --out or remove it\n"
    assert capsys.readouterr().err == said
    assert contents(tmp_path / "out") == before


def test_uint32_where_the_vocabulary_needs_it(tmp_path):
    vocabulary = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 70_000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<|endoftext|>"}
    (tmp_path / "t.json").write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    write_jsonl(tmp_path / "a.jsonl", ["w69999 w5 " * 40])
    flags = ["--tokenizer", str(tmp_path / "t.json"), "--length", "16", "--workers", "1", "--valid-fraction", "0"]
    assert main(["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", *flags]) == 0
    assert read_manifest(str(tmp_path / "out"))["dtype"] == "uint32"
    assert main(["verify", str(tmp_path / "out")]) == 0
    tokens = documents(tmp_path / "out")["train", "a", 0]
    assert tokens[:5] == [0, 69999, 5, 69999, 5]


def test_a_special_token_in_the_text_forges_no_boundary(tokenizer, tmp_path):
    text = "before <|endoftext|> after " * 20
    write_jsonl(tmp_path / "a.jsonl", [text])
    flags = ["--tokenizer", tokenizer, "--length", "8", "--workers", "1", "--valid-fraction", "0"]
    assert main(["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", *flags]) == 0
    assert documents(tmp_path / "out")["train", "a", 0].count(0) <= 2


def test_filters_and_config(tokenizer, tmp_path):
    records = [{"body": f"{'good' if i % 2 else 'bad'} text {i} " * 9, "hq": bool(i % 2)} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = {"sources": {"a": f"{tmp_path}/a.jsonl"}, "tokenizer": tokenizer, "length": 64, "field": "body"}
    config |= {"where": {"a": {"hq": True}}, "valid_fraction": 0}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    command = ["pack", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), "--length", "16"]
    assert main([*command, "--workers", "1"]) == 0
    counts = read_manifest(str(tmp_path / "out"))["splits"]["train"]["a"]
    assert counts["documents"] == 15
    assert counts["documents_dropped"] == {"filtered": 15}
    assert {number % 2 for _, _, number in documents(tmp_path / "out")} == {1}


@pytest.mark.parametrize("part", ["manifest.json", "tokenizer.json", "index.json", ".zstd"])
def test_verify_catches_any_flipped_byte(packed, tmp_path, part, capsys):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder)
    assert main(["verify", str(folder)]) == 0
    file = next(p for p in sorted(folder.rglob("*")) if p.name.endswith(part))
    rng = np.random.default_rng(0)
    whole = file.read_bytes()
    for position in rng.integers(0, len(whole), 5):
        broken = bytearray(whole)
        broken[position] ^= 1 << int(rng.integers(8))
        file.write_bytes(broken)
        assert main(["verify", str(folder)]) == 2
        assert file.name in capsys.readouterr().err
    file.write_bytes(whole)
    file.unlink()
    assert main(["verify", str(folder)]) == 2


def test_stats_and_show(packed, corpus, tmp_path, capsys):
    assert main(["stats", str(packed), "--figure", str(tmp_path / "lengths.png")]) == 0
    assert (tmp_path / "lengths.png").stat().st_size > 10_000
    assert main(["stats", str(packed), "--figure", str(tmp_path / "lengths.docx")]) == 2
    assert "lengths.docx must end in .png, .svg or .pdf" in capsys.readouterr().err
    assert main(["stats", str(packed)]) == 0
    out = capsys.readouterr().out
    assert "train/web" in out
    assert "packing efficiency" in out
    assert main(["show", str(packed), "--source", "books", "--row", "1"]) == 0
    assert "document" in capsys.readouterr().out
