"""Tasks packed apart and merged, and what does not belong together."""

from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.read_shards import read_manifest
from tests.data_prep.conftest import make_texts, source_flags, write_jsonl
from tests.data_prep.folders import documents

TASKS = 3


@pytest.fixture(scope="module")
def root(corpus, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    for task in range(TASKS):
        assert pack(root / str(task), corpus, tokenizer, "--task", f"{task}/{TASKS}") == 0
    return root


def pack(out: Path, corpus, tokenizer: str, *flags: str) -> int:
    options = ["--tokenizer", tokenizer, "--length", "64", "--workers", "1", "--shard-bytes", "9000", *flags]
    return main(["pack", "--out", str(out), *source_flags(corpus), *options])


def test_merged_tasks_hold_every_document(root, corpus, tokenizer, tmp_path) -> None:
    parts = [str(root / str(task)) for task in range(TASKS)]
    assert main(["merge", "--out", str(tmp_path / "out"), *reversed(parts)]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert pack(tmp_path / "one", corpus, tokenizer) == 0
    merged, one = (read_manifest(str(tmp_path / name)) for name in ("out", "one"))
    assert merged["inputs"] == one["inputs"]
    assert merged["settings"] == one["settings"]
    for split, sources in one["splits"].items():
        for source, counts in sources.items():
            ours = merged["splits"][split][source]
            for key in ("documents", "bytes", "tokens_in", "documents_dropped"):
                assert ours[key] == counts[key]
            assert ours["tokens_in"] == ours["tokens_out"] + sum(ours["tokens_dropped"].values())
    # Every document that is whole in both has the same tokens; numbers grow with the input's order.
    tokens = [{tuple(t) for t in documents(tmp_path / name).values() if t[0] == t[-1] == 0} for name in ("out", "one")]
    assert len(tokens[0] & tokens[1]) > 200
    numbers = [number for split, source, number in documents(tmp_path / "out") if (split, source) == ("train", "web")]
    assert {number >> 40 for number in numbers} == {0, 1, 2}


def test_training_reads_a_merged_folder(root, tmp_path) -> None:
    from ssscale.data.stream import PackedData

    assert main(["merge", "--out", str(tmp_path / "out"), *(str(root / str(task)) for task in range(TASKS))]) == 0
    rows = [row for _, row in PackedData.open(str(tmp_path / "out")).rows()]
    assert len(rows) == sum(
        counts["rows"] for counts in read_manifest(str(tmp_path / "out"))["splits"]["train"].values()
    )
    for task in range(TASKS):
        assert (root / str(task) / "manifest.json").is_file()


def test_what_does_not_belong_together(root, corpus, tokenizer, tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(50, 4))
    assert pack(tmp_path / "whole", corpus, tokenizer) == 0
    assert pack(tmp_path / "other", corpus, tokenizer, "--task", "2/3", "--seed", "1") == 0
    assert pack(tmp_path / "four", corpus, tokenizer, "--task", "2/4") == 0
    capsys.readouterr()
    cases = [
        (["{root}/0", "{root}/1"], "task 2/3 is missing"),
        (["{root}/0", "{root}/1", "{root}/1"], "1/ and {root}/1 are the same task 1/3"),
        (["{root}/0", "{root}/1", "{tmp}/other"], "other and {root}/0 were made with different seed"),
        (["{root}/0", "{root}/1", "{tmp}/four"], "four and {root}/0 were made with different task"),
        (["{tmp}/whole"], "whole is whole by itself"),
        (["{tmp}/none"], "none has no manifest.json"),
    ]
    for parts, sentence in cases:
        parts = [part.format(root=root, tmp=tmp_path) for part in parts]
        if len(set(parts)) < len(parts):
            parts[-1] = parts[-1] + "/"  # the same folder under another name
        assert main(["merge", "--out", str(tmp_path / "out"), *parts]) == 2
        assert sentence.format(root=root) in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert pack(tmp_path / "bad", corpus, tokenizer, "--task", "3/3") == 2
    assert "task 3/3 must be i/n with i from 0 to n - 1" in capsys.readouterr().err
