"""Every kind of input gives the same shards for the same documents."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.read_shards import read_manifest
from ssscale.data.streaming_patches import import_streaming
from tests.data_prep.conftest import make_texts, write_jsonl

TEXTS = [text for text in make_texts(150, 3) if text.strip()]


def pack(out: Path, source: str, tokenizer: str, *flags: str) -> int:
    options = ["--tokenizer", tokenizer, "--length", "32", "--valid-fraction", "0.1", "--workers", "1", *flags]
    return main(["pack", "--out", str(out), "--source", f"a={source}", *options])


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*/*"))}


def parquet(root: Path, ids: list[list[int]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    for number, first in enumerate(range(0, len(TEXTS), 60)):
        pq.write_table(table.slice(first, 60), root / f"part-{number}.parquet", row_group_size=25)
    return str(root)


def arrow_stream(root: Path, ids: list[list[int]]) -> str:
    import pyarrow as pa

    table = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    with pa.OSFile(str(root / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return str(root / "a.arrow")


def arrow_file(root: Path, ids: list[list[int]]) -> str:
    import pyarrow as pa

    table = pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    with pa.OSFile(str(root / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(root / "*.arrow")


def saved(root: Path, ids: list[list[int]]) -> str:
    import datasets

    backwards = datasets.Dataset.from_dict({"text": TEXTS[::-1], "n": list(range(len(TEXTS)))})
    backwards.select(range(len(TEXTS))[::-1]).save_to_disk(str(root / "saved"), num_shards=3)
    return str(root / "saved")


def megatron(root: Path, ids: list[list[int]]) -> str:
    """By Megatron's own builder; documents end with EOS, as of `--append-eod`."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(root / "c_text_document.bin"), dtype=DType.optimal_dtype(300))
    for tokens in ids:
        builder.add_document(torch.tensor([*tokens, 0]), [len(tokens) + 1])
    builder.finalize(str(root / "c_text_document.idx"))
    return str(root / "c_text_document")


def mds(root: Path, ids: list[list[int]], encoding: str = "ndarray:int32", length: int = 50, **options: object) -> str:
    """As llm-foundry writes it: documents one behind the other, each with its EOS, cut into samples."""
    import_streaming()
    from streaming import MDSWriter

    stream = np.concatenate([[*tokens, 0] for tokens in ids])
    with MDSWriter(columns={"tokens": encoding}, out=str(root / "mds"), size_limit=4000, **options) as writer:
        for first in range(0, len(stream), length):
            sample = stream[first : first + length]
            writer.write({"tokens": sample.astype(np.int64).tobytes() if encoding == "bytes" else sample.astype("i4")})
    return str(root / "mds")


def mds_bytes(root: Path, ids: list[list[int]]) -> str:
    return mds(root, ids, "bytes", length=977, compression="zstd:3", hashes=["xxh64"])


@pytest.fixture(scope="module")
def expected(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_jsonl(root / "a.jsonl", TEXTS)
    assert pack(root / "data", f"{root}/a.jsonl", tokenizer) == 0
    return root / "data"


@pytest.mark.parametrize("write", [parquet, arrow_stream, arrow_file, saved, megatron, mds, mds_bytes])
def test_same_shards_from_every_kind(
    write: Callable[[Path, list[list[int]]], str], expected: Path, tokenizer: str, tmp_path: Path
) -> None:
    loaded = Tokenizer.from_file(tokenizer)
    source = write(tmp_path, [loaded.encode(text, add_special_tokens=False).ids for text in TEXTS])
    assert pack(tmp_path / "data", source, tokenizer) == 0
    assert shard_bytes(tmp_path / "data") == shard_bytes(expected)
    assert read_manifest(str(tmp_path / "data"))["splits"] == read_manifest(str(expected))["splits"]


@pytest.mark.parametrize("suffix", [".JSONL", ".Jsonl.GZ", ".NDJSON.zST", ".Json.XZ", ".Parquet", ".TXT"])
def test_suffixes_of_any_case(suffix: str, expected: Path, tokenizer: str, tmp_path: Path) -> None:
    """A file named in capitals was read as one text, or skipped in a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    if suffix == ".TXT":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03}{suffix}").write_text(text, encoding="utf-8", newline="")
    elif suffix == ".Parquet":
        parquet(tmp_path, [])
        for file in tmp_path.glob("*.parquet"):
            file.rename(folder / f"{file.stem}{suffix}")
    else:
        write_jsonl(folder / f"a{suffix.lower()}", TEXTS).rename(folder / f"A{suffix}")
    for name, source in (("folder", folder), ("glob", folder / f"*{suffix}")):
        assert pack(tmp_path / name, str(source), tokenizer) == 0
        assert shard_bytes(tmp_path / name) == shard_bytes(expected)


def test_small_batches_change_nothing(expected: Path, tokenizer: str, tmp_path: Path, monkeypatch) -> None:
    """Batches of a few rows: where row groups, record batches and shards end must not matter."""
    import data_prep.sources

    monkeypatch.setattr(data_prep.sources.Input.read, "__defaults__", (None, 700))
    for write in (parquet, arrow_file, saved):
        root = tmp_path / write.__name__
        root.mkdir()
        assert pack(root / "data", write(root, []), tokenizer) == 0
        assert shard_bytes(root / "data") == shard_bytes(expected)


def test_broken_and_foreign_inputs(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    loaded = Tokenizer.from_file(tokenizer)
    ids = [loaded.encode(text, add_special_tokens=False).ids for text in TEXTS]
    folders = {name: tmp_path / name for name in ("ids", "cut", "dict", "mds", "idx", "other")}
    for folder in folders.values():
        folder.mkdir()
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "body.parquet")
    pq.write_table(pa.table({"text": pa.array([b"fine " * 99, b"\xff"], pa.binary())}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({"text": ["fine", None]}), tmp_path / "null.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "body.parquet").read_bytes()[:-30])
    (tmp_path / "junk.arrow").write_bytes(b"no arrow at all")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(folders["dict"]))
    megatron(folders["ids"], [*ids, [299, 300]])
    megatron(folders["cut"], ids)
    data = folders["cut"] / "c_text_document.bin"
    data.write_bytes(data.read_bytes()[:-10])
    megatron(folders["idx"], ids)
    index = folders["idx"] / "c_text_document.idx"
    index.write_bytes(index.read_bytes()[:-100])
    mds(folders["mds"], ids, hashes=["sha1"])
    shard = next((folders["mds"] / "mds").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    mds(folders["other"], [[7] * 10])
    other = folders["other"] / "mds" / "index.json"
    other.write_text(other.read_text().replace('"column_names": ["tokens"]', '"column_names": ["text"]'))
    (tmp_path / "lonely.idx").write_bytes(b"MMIDIDX")
    cases = {
        "body.parquet": "body.parquet has no field 'text' (it has body): name the text's with --field",
        "bytes.parquet": "bytes.parquet row 2 is not valid UTF-8",
        "null.parquet": "null.parquet row 2: field 'text' is NoneType, not text",
        "cut.parquet": "cut.parquet is no whole Parquet file",
        "junk.arrow": "junk.arrow is no whole Arrow file",
        "dict": "dict holds the splits of a data set: name the folder of one of them",
        "ids/c_text_document": f"document {len(TEXTS) + 1} has token id 300, but the tokenizer has ids 0 to 299",
        "cut/c_text_document": "it is cut off",
        "idx/c_text_document.bin": "is no index of a Megatron corpus, or cut off",
        "mds/mds": f"{shard.name} cannot be read: its sha1 is not the index's",
        "other/mds": "has no column 'tokens' (it has text)",
        "lonely.idx": "lonely.bin is missing: Megatron's corpora are pairs of .bin and .idx",
    }
    capsys.readouterr()
    for name, sentence in cases.items():
        assert pack(tmp_path / "out", f"{tmp_path}/{name}", tokenizer) == 2, name
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    assert pack(tmp_path / "out", f"{tmp_path}/bytes.parquet", tokenizer, "--skip-broken") == 0
    command = ["train-tokenizer", "--vocab-size", "300", "--out", str(tmp_path / "t.json")]
    assert main([*command, "--source", f"a={folders['cut']}"]) == 2
    assert "holds tokens, not text" in capsys.readouterr().err


def test_filters(tokenizer: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": f"{i} " * (i + 1), "score": i, "meta": {"lang": "de" if i % 3 else "en"}} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    where = {"a": {"score": {"min": 10, "max": 50}, "meta.lang": ["en", "fr"]}}
    (tmp_path / "c.yaml").write_text(json.dumps({"where": where, "min_chars": 40, "max_chars": 130}))
    kept = [r for r in rows if 10 <= r["score"] <= 50 and r["meta"]["lang"] == "en" and 40 <= len(r["text"]) <= 130]
    for kind in ("jsonl", "parquet"):
        out = tmp_path / kind
        assert pack(out, f"{tmp_path}/a.{kind}", tokenizer, "--config", f"{tmp_path}/c.yaml", "--length", "16") == 0
        counts = read_manifest(str(out))["splits"]
        assert sum(counts[split]["a"]["documents"] for split in counts) == len(kept) == 10
        assert counts["train"]["a"]["documents_dropped"] == {"filtered": 50}


def test_duplicates_are_found_in_all_sources(tokenizer: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:60], *TEXTS[20:30], TEXTS[0]])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[50:100])
    write_jsonl(tmp_path / "v.jsonl", TEXTS[90:110])
    flags = ["--source", f"b={tmp_path}/b.jsonl", "--source", f"b={tmp_path}/v.jsonl:valid", "--deduplicate"]
    assert pack(tmp_path / "out", f"{tmp_path}/a.jsonl", tokenizer, *flags) == 0
    splits = read_manifest(str(tmp_path / "out"))["splits"]
    assert splits["train"]["a"]["documents_dropped"] == {"duplicate": 11}
    assert splits["train"]["b"]["documents_dropped"] == {"duplicate": 10}
    assert splits["valid"]["b"]["documents_dropped"] == {"duplicate": 10}
    assert sum(counts["documents"] for sources in splits.values() for counts in sources.values()) == 110
