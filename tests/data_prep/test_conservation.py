"""Nothing is lost on the way from files to rows, on a whole corpus.

By default the corpus that every machine with Python has. Another one, of JSON lines `train.NAME.*` with a `text` field:

    CORPUS=folder TOKENIZER=tokenizer.json python -m pytest tests/data_prep/test_conservation.py -m slow -s
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.read_shards import read_manifest, read_shard, shards
from data_prep.settings import Settings
from data_prep.sources import find_inputs
from data_prep.tokenize import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CORPUS, TOKENIZER = os.environ.get("CORPUS"), os.environ.get("TOKENIZER")


def sources() -> dict[str, str]:
    if CORPUS is None:
        return {"code": "stdlib:code", "docs": "stdlib:docs"}
    return {path.name.split(".")[1]: str(path) for path in sorted(Path(CORPUS).glob("train.*"))}


def documents(folder: str, source: str) -> dict[int, list[tuple[int, np.ndarray]]]:
    """Each document's parts that lie in rows, with their offsets, in order."""
    parts: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for split in ("train", "valid"):
        counts = read_manifest(folder)["splits"][split][source]
        for shard in shards(folder, split, source) if counts["rows"] else []:
            for row in read_shard(folder, split, source, shard):
                pieces = np.split(row["tokens"], np.cumsum(row["lengths"])[:-1])
                for number, offset, tokens in zip(row["documents"].tolist(), row["offsets"].tolist(), pieces):
                    parts[number].append((offset, tokens))
    return {number: sorted(found, key=lambda part: part[0]) for number, found in parts.items()}


def whole(parts: list[tuple[int, np.ndarray]], eos: int) -> np.ndarray | None:
    """The parts' tokens, if they follow one another from the document's beginning to its end."""
    ids = np.concatenate([tokens for _, tokens in parts])
    starts = np.cumsum([0, *(len(tokens) for _, tokens in parts)])[:-1]
    return ids if [offset for offset, _ in parts] == starts.tolist() and len(ids) > 1 and ids[-1] == eos else None


@pytest.mark.parametrize("packing", ["best-fit", "concat"])
def test_tokens_in_are_tokens_out_and_dropped(packing: str, tmp_path: Path) -> None:
    out = str(tmp_path / "data")
    tokenizer = ["--tokenizer", TOKENIZER] if TOKENIZER else ["--train-vocab-size", "2048"]
    flags = [f"--source={name}={path}" for name, path in sources().items()]
    assert main(["pack", "--out", out, "--length", "4096", "--packing", packing, *tokenizer, *flags]) == 0
    assert main(["verify", out]) == 0
    manifest = read_manifest(out)
    bos, eos = manifest["tokenizer"]["bos_id"], manifest["tokenizer"]["eos_id"]
    decode = load(f"{out}/tokenizer.json").decode
    parser = Settings(sources={"a": ["a"]}, tokenizer="a").parser("a")
    totals = dict.fromkeys(("documents", "tokens_in", "tokens_out", "dropped"), 0)
    for source, path in sources().items():
        counts = [manifest["splits"][split][source] for split in ("train", "valid")]
        found, cut, number, tokens = documents(out, source), 0, 0, 0
        for item in find_inputs(path):
            for batch in item.read(parser.columns):
                for text in parser(batch)[0]:
                    parts = found.pop(number, [])
                    number += 1
                    tokens += sum(len(part) for _, part in parts)
                    ids = whole(parts, eos) if parts else None
                    if ids is not None:
                        assert ids[0] == bos
                        assert decode(ids[1:-1].tolist(), skip_special_tokens=False) == text
                    else:
                        cut += bool(text)
        assert not found
        # What a split's last row had no room for is less than a row, so it cuts or drops few documents.
        dropped = sum(sum(count["tokens_dropped"].values()) for count in counts)
        assert dropped < 2 * 4096
        assert cut <= dropped
        assert sum(c["tokens_in"] for c in counts) == sum(c["tokens_out"] for c in counts) + dropped
        assert tokens == sum(c["tokens_out"] for c in counts) == 4096 * sum(c["rows"] for c in counts)
        for key in ("documents", "tokens_in", "tokens_out"):
            totals[key] += sum(c[key] for c in counts)
        totals["dropped"] += dropped
        print(json.dumps({"packing": packing, "source": source, "not whole": cut, "dropped": dropped, "read": number}))
    efficiency = totals["tokens_out"] / totals["tokens_in"]
    print(json.dumps({"packing": packing, "efficiency": efficiency, **totals}))
    assert CORPUS is None or efficiency >= 0.995
