"""Commands of the kernels: each has --help, and ends with one sentence and exit code 2 if there is no GPU."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
COMMANDS = sorted(
    "ssscale_kernels." + ".".join(path.relative_to(KERNELS).with_suffix("").parts)
    for path in KERNELS.rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def test_all_commands_are_found() -> None:
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert f"python -m {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_a_command_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *([str(tmp_path / "out")] if name.endswith(("measure", "stalls")) else [])])
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2
    said = capfd.readouterr()
    assert (said.out, said.err) == (
        "",
        f"error: this command needs a CUDA GPU, and torch {torch.__version__} finds none\n",
    )
    assert not (tmp_path / "out").exists()
