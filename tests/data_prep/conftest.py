import gzip
import json
import lzma
import random
from pathlib import Path

import pytest
import zstandard

from data_prep.__main__ import main

WORDS = [
    "the",
    "of",
    "stick",
    "breaking",
    "attention",
    "softmax",
    "naïve",
    "漢字",
    "\n\n",
    "if",
    "x:",
    "return",
    "12345",
    "",
]


def make_texts(number: int, seed: int) -> list[str]:
    """Texts of very different lengths, the longest of several rows."""
    rng = random.Random(seed)
    return [
        f"{seed}/{i} " + " ".join(rng.choices(WORDS, k=int(rng.paretovariate(0.7) * 8) % 900)) for i in range(number)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress.get(path.suffix, bytes)(data))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Texts of two sources, and where they lie: three files of one, a tree of text files of the other."""
    root = tmp_path_factory.mktemp("corpus")
    web, books = make_texts(240, 1), make_texts(40, 2)
    for suffix, part in ((".gz", web[:80]), (".xz", web[80:160]), (".zst", web[160:])):
        write_jsonl(root / f"web.{'gxz'.index(suffix[1])}.jsonl{suffix}", part)
    (root / "books" / "more").mkdir(parents=True)
    for i, text in enumerate(books):
        folder = root / "books" / ("more" if i >= 20 else "")
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8", newline="")
    return {"web": web, "books": books, "root": [str(root)]}


@pytest.fixture(scope="session")
def tokenizer(corpus: dict[str, list[str]]) -> str:
    file = f"{corpus['root'][0]}/tokenizer.json"
    assert main(["train-tokenizer", "--vocab-size", "300", "--out", file, *source_flags(corpus)]) == 0
    return file


def source_flags(corpus: dict[str, list[str]]) -> list[str]:
    root = corpus["root"][0]
    return ["--source", f"web={root}/web.*.jsonl.*", "--source", f"books={root}/books", "--valid-fraction", "0.2"]


@pytest.fixture(scope="session", params=["best-fit", "concat"])
def packed(request: pytest.FixtureRequest, corpus, tokenizer, tmp_path_factory) -> Path:
    """A data folder of both sources, one for each packing. Not to be changed."""
    out = tmp_path_factory.mktemp("packed") / "data"
    flags = [
        *source_flags(corpus),
        "--tokenizer",
        tokenizer,
        "--length",
        "64",
        "--shard-bytes",
        "20000",
        "--workers",
        "1",
    ]
    assert main(["pack", "--out", str(out), "--packing", request.param, *flags]) == 0
    return out
