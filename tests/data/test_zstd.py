"""Compressed texts: every frame is read, and a file that is cut off is never taken for a shorter one."""

import io
import json
from pathlib import Path

import pytest
import zstandard

from eval.checkpoint.documents import read_documents
from eval.checkpoint.ruler.data import read_questions
from ssscale.data.questions import read_squad
from ssscale.data.zstd import AT_ONCE, decompressed
from ssscale.errors import UserError

LINES = [json.dumps({"text": f"text number {number} of many, {number * 7919 % 1009}"}) for number in range(20_000)]
TEXT = ("\n".join(LINES) + "\n").encode()


def test_frames_follow_each_other() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    whole = zstandard.compress(TEXT)
    assert len(whole) > 3 * AT_ONCE
    for frames, content in (
        (whole, TEXT),
        (whole + skippable + whole + zstandard.compress(b"end"), TEXT + TEXT + b"end"),
        (zstandard.compress(b""), b""),
        (b"", b""),
        (zstandard.ZstdCompressor(write_content_size=False).compress(TEXT), TEXT),
    ):
        assert decompressed(io.BytesIO(frames)).read() == content
    assert list(decompressed(io.BytesIO(whole))) == TEXT.splitlines(keepends=True)


def test_a_file_that_is_cut_off_or_damaged() -> None:
    whole = zstandard.compress(TEXT)
    for first in (b"", whole):
        for size in (1, 4, 17, AT_ONCE, len(whole) // 2, len(whole) - 1):
            with pytest.raises(EOFError, match="before the end of a frame"):
                decompressed(io.BytesIO(first + whole[:size])).read()
    with pytest.raises(zstandard.ZstdError):
        decompressed(io.BytesIO(whole + b"other bytes")).read()


def test_commands_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl.zst"
    file.write_bytes(zstandard.compress(TEXT) * 2)
    assert len(list(read_documents(file))) == 2 * len(LINES)
    file.write_bytes(zstandard.compress(TEXT)[:-9])
    with pytest.raises(UserError, match=f"--texts={file} cannot be read: Compressed file ended"):
        list(read_documents(file))
    squad = json.dumps({"data": [{"paragraphs": [{"context": "a " * 500, "qas": []}]}] * 100}).encode()
    file.write_bytes(zstandard.compress(squad)[:-3])
    for read in (read_squad, read_questions):
        with pytest.raises(UserError, match=f"{file} .*Compressed file ended"):
            read(file)
