"""What a run says about the torch and Triton it finds, and about a vocabulary larger than its tokenizer's."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from ssscale import environment
from ssscale.config.schema import ModelConfig
from ssscale.environment import measured, stack_note
from ssscale.train.build import log_vocabulary

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)


def pinned(package: str) -> str:
    command = ["sed", "-n", f"s/^{package}==//p", "constraints-gpu.txt"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_the_measured_pair_is_the_one_that_is_installed_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured() == {"torch": pinned("torch"), "triton": pinned("triton")}
    monkeypatch.setattr(torch, "__version__", pinned("torch") + "+cu130")
    monkeypatch.setattr(triton, "__version__", pinned("triton"))
    assert stack_note(GPU) is None


@pytest.mark.parametrize(("package", "version"), [("torch", "2.99.0+cu140"), ("triton", "9.9.9")])
def test_another_pair_is_named_beside_the_measured_one(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", pinned("torch"))
    monkeypatch.setattr(triton, "__version__", pinned("triton"))
    monkeypatch.setattr(torch if package == "torch" else triton, "__version__", version)
    note = stack_note(GPU)
    assert note is not None
    assert "\n" not in note
    for text in (version.partition("+")[0], pinned("torch"), pinned("triton"), "make setup STACK=gpu"):
        assert text in note


def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "GPU", tmp_path / "nvidia0")
    assert stack_note(cpu) is None
    (tmp_path / "nvidia0").touch()
    note = stack_note(cpu)
    assert note is not None
    assert "does not see" in note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert stack_note(cpu) is None


def test_rows_without_an_id_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ssscale")
    model = ModelConfig(vocab_size=50_304, hidden_size=64, tie_embeddings=False)
    log_vocabulary(model, 50_304)
    assert not caplog.records
    log_vocabulary(model, 50_257)  # the next multiple of 128: padding
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "50,304 rows for a tokenizer of 50,257 entries; the other 47" in caplog.text
    log_vocabulary(model, 1_024)
    assert caplog.records[-1].levelname == "WARNING"
    assert f"{(50_304 - 1_024) * 64 * 2:,} parameters" in caplog.text
