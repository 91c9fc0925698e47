"""SlimPajama's and SQuAD's files as published, in small: every length and tokenizer that the papers' models need."""

import json
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.read_shards import read_manifest
from ssscale.config import CONFIGS, load_config
from ssscale.data.questions import make_example, read_squad
from tests.data_prep.conftest import make_texts

SETS = ("CommonCrawl", "C4", "Github", "Book", "ArXiv", "Wikipedia", "StackExchange")
NAMES = ("commoncrawl", "c4", "github", "books", "arxiv", "wikipedia", "stackexchange")


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/slimpajama/{train,test}/chunk*/example_*.jsonl.zst, whose files mix all sets."""
    root = tmp_path_factory.mktemp("published")
    texts = iter(make_texts(280, 31))
    for chunk in (1, 2):
        for number in range(4):
            lines = []
            for index in range(35):
                meta = {"redpajama_set_name": f"RedPajama{SETS[index % 7]}"}
                lines.append(json.dumps({"text": next(texts), "meta": meta}) + "\n")
            kind = "test" if number == 3 else "train"
            file = root / "data" / "slimpajama" / kind / f"chunk{chunk}" / f"example_{kind}_{number}.jsonl.zst"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(zstandard.compress("".join(lines).encode()))
    for size in (300, 340):
        source = f"web={root}/data/slimpajama/train/chunk1/*.jsonl.zst"
        out = f"{root}/{size}.json"
        assert main(["train-tokenizer", "--vocab-size", str(size), "--out", out, "--source", source]) == 0
    return root


@pytest.mark.parametrize(("size", "length"), [(300, 64), (340, 128), (340, 512)])
def test_slimpajama_in_tasks_for_each_length_and_tokenizer(slimpajama, size, length, tmp_path, monkeypatch):
    """configs/corpus/slimpajama.yaml with other rows and tokenizers, in tasks that are merged: seven sources, test left out."""
    monkeypatch.chdir(slimpajama)
    common = ["--config", f"{CONFIGS}/corpus/slimpajama.yaml", "--tokenizer", f"{size}.json"]
    common += ["--length", str(length), "--workers", "1", "--valid-fraction", "0"]
    for task in ("0/2", "1/2"):
        assert main(["pack", *common, "--task", task, "--out", str(tmp_path / task[0])]) == 0
    assert main(["merge", "--out", str(tmp_path / "all"), str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert main(["verify", str(tmp_path / "all")]) == 0
    manifest = read_manifest(str(tmp_path / "all"))
    train = manifest["splits"]["train"]
    assert set(train) == set(NAMES)
    assert {counts["documents"] for counts in train.values()} == {30}  # 2 chunks of 3 files of 5
    assert manifest["length"] == length


def test_the_first_chunk_as_one_source(slimpajama, tmp_path):
    """What the 350m models read."""
    source = f"web={slimpajama}/data/slimpajama/train/chunk1/*.jsonl.zst"
    flags = ["--tokenizer", f"{slimpajama}/340.json", "--length", "64", "--workers", "1", "--valid-fraction", "0"]
    assert main(["pack", "--source", source, *flags, "--out", str(tmp_path / "data")]) == 0
    assert read_manifest(str(tmp_path / "data"))["splits"]["train"]["web"]["documents"] == 105


@pytest.mark.parametrize("version", ["1.1", "2.0"])
@pytest.mark.parametrize("size", [300, 340])
def test_squad_for_each_length_and_tokenizer(slimpajama, tmp_path, version, size):
    """As published: 1.1 has no is_impossible; questions without answers in 2.0 are left out."""
    paragraphs = []
    for number, text in enumerate(make_texts(30, 5)):
        asked = {
            "id": str(number),
            "question": f"Which {number}?",
            "answers": [{"text": text.split()[0], "answer_start": 0}],
        }
        if version == "2.0":
            asked |= {"is_impossible": number % 3 == 0}
            asked |= (
                {"answers": [], "plausible_answers": [{"text": "the", "answer_start": 0}]} if number % 3 == 0 else {}
            )
        paragraphs.append({"context": text, "qas": [asked]})
    file = tmp_path / f"train-v{version}.json"
    file.write_text(json.dumps({"version": version, "data": [{"title": "Stick", "paragraphs": paragraphs}]}))
    found = read_squad(file)
    assert len(found) == (30 if version == "1.1" else 20)
    tokenizer = Tokenizer.from_file(f"{slimpajama}/{size}.json")
    every = [make_example(q, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 0) for q in found]
    kept = {length: sum(len(example.tokens) <= length for example in every) for length in (64, 512, 8192)}
    assert 0 < kept[64] < kept[512] <= kept[8192] == len(found)  # launch/finetune.py leaves out the longer ones


def test_run_files_take_these_rows():
    for name, length in (("162m_softmax", 1024), ("350m_sb", 2048), ("350m_rope_8k", 8192), ("1b_sb", 4096)):
        assert load_config([f"config={name}", "data.path=data/x"]).data.length == length
