"""Output that cannot be written: characters that its encoding lacks, a full disk, and no output at all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssscale.unforeseen import describe_os_error

ROOT = Path(__file__).resolve().parents[1]
FULL = "error: the output cannot be written: No space left on device\n"
LAUNCH = ("launch/estimate.py", "config=tiny_sb", "gpus=1")
EVAL = ("-c", "from eval.checkpoint.command import sentences\nwith sentences():\n    print('1 → 2')")


def run(command: tuple[str, ...], **more: object) -> "subprocess.CompletedProcess[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, check=False, **more
    )


@pytest.mark.parametrize(("command", "words"), [(LAUNCH, b"12?L?d?S"), (EVAL, b"1 ? 2\n")])
def test_characters_that_the_encoding_lacks(command: tuple[str, ...], words: bytes) -> None:
    ended = run(command, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert words in ended.stdout


@pytest.mark.parametrize("command", [LAUNCH, ("launch/estimate.py", "--help"), EVAL])
def test_a_full_disk(command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        ended = run(command, stdout=full)
    assert (ended.returncode, ended.stderr.decode()) == (2, FULL)


@pytest.mark.parametrize("module", ["ssscale", "data_prep"])
def test_closed_output(module: str, tmp_path: Path) -> None:
    """A file that is opened later must not take the number of stdout, to which libraries print."""
    file = tmp_path / "file"
    code = f"import os\nfrom {module}.unforeseen import prepare_output\nprepare_output()\nprint('lost', flush=True)\n"
    code += f"with open({str(file)!r}, 'w') as opened:\n    os.write(1, b'lost too')\n    opened.write('kept')"
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, cwd=ROOT, check=False).returncode == 0
    assert file.read_text() == "kept"


def test_the_disk_of_another_file() -> None:
    """The output itself can be written: the sentence does not blame it."""
    full = OSError(errno.ENOSPC, "No space left on device")
    assert describe_os_error(full) == "No space left on device: make room for the files that this command writes"
    assert describe_os_error(OSError(errno.EIO, "Input/output error")) is None
