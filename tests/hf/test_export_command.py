"""What the export command writes and prints: the size, the lines that load the model, modes of files, the pad token."""

import json
import os
import stat
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.export import main as export_main
from ssscale.hf.convert import import_checkpoint
from ssscale.parallel.groups import Groups
from tests.hf.jobs import write_checkpoint
from tests.models import make_model

ROOM = replace(make_model("ssmax"), vocab_size=304)
FULL = make_model("softmax")


def export(model: object, groups: Groups, tokenizer: Path, tmp_path: Path, *options: str) -> Path:
    write_checkpoint(model, groups, tmp_path / "run", tokenizer)  # type: ignore[arg-type]
    export_main([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'hf'}", *options])
    return tmp_path / "hf"


@pytest.mark.parametrize("form", ["ssscale", "llama"])
def test_the_printed_lines_load_the_model(
    form: str, groups: Groups, tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ROOM if form == "ssscale" else FULL
    folder = export(model, groups, tokenizer_file, tmp_path, "dtype=bfloat16", f"format={form}")
    printed = capsys.readouterr().out
    size = (folder / "model.safetensors").stat().st_size / 1e6
    assert "MB of weights in bfloat16" in printed
    assert float(printed.split(" MB of weights")[0].split()[-1]) == pytest.approx(size, abs=0.02)
    lines = [line for line in printed.splitlines() if line.startswith("    ")]
    found: dict = {}
    exec(textwrap.dedent("\n".join(lines)), found)
    assert found["model"].dtype == torch.bfloat16
    assert found["tokenizer"]("the")["input_ids"][0] == 0
    # Without room, the lines also add a pad token, and the model a row for it.
    assert found["tokenizer"].pad_token == "<|pad|>"
    assert found["tokenizer"].pad_token_id == 300
    assert found["model"].get_input_embeddings().weight.shape[0] == (304 if form == "ssscale" else 301)
    assert ("no room for a pad token" in printed) == (form == "llama")


def test_the_pad_token_of_an_export(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    folder = export(ROOM, groups, tokenizer_file, tmp_path)
    config, generation, tokenizer = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    )
    assert (config["pad_token_id"], generation["pad_token_id"], tokenizer["pad_token"]) == (300, 300, "<|pad|>")
    assert generation["suppress_tokens"] == [300, 301, 302, 303]
    assert "suppress_tokens" not in config
    # A second export, of what was imported, has the same token and no other.
    import_checkpoint(folder, tmp_path / "back", groups)
    export_main([f"checkpoint={tmp_path / 'back'}", f"out={tmp_path / 'again'}"])
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_eos_pads_where_the_vocabulary_is_full(groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    folder = export(FULL, groups, tokenizer_file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["pad_token_id"], config["vocab_size"]) == (0, 300)
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == "<|endoftext|>"


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_obey_the_umask(umask: int, groups: Groups, tokenizer_file: Path, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folder = export(FULL, groups, tokenizer_file, tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~umask}
