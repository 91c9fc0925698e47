"""python -m eval.evidence.books FILE.jsonl.zst OUT.txt: writes all documents of a file as one text."""

import io
import json
import sys
from pathlib import Path

import zstandard

if __name__ == "__main__":
    source, out = sys.argv[1:]
    with open(source, "rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        Path(out).write_text("\n\n".join(json.loads(line)["text"] for line in lines), encoding="utf-8")
