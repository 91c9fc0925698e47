"""A process group that cannot start says why: MASTER_PORT in use, rank 0 not reached, or a rank that fails before."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ssscale.parallel.groups import allow_open_files
from tests.conftest import ROOT
from tests.promises import promises
from tests.train.forked import ForkedProcess
from tests.train.ranks import free_port


def start(environment: dict[str, str], file: str) -> None:
    from ssscale.errors import Stop, UserError
    from ssscale.parallel.groups import initialize

    os.environ.update(environment)
    try:
        initialize(distributed=True, timeout_minutes=0.02)
    except (Stop, UserError) as error:
        Path(file).write_text(f"{getattr(error, 'code', 2)} {error}")


def said(rank: int, port: int, tmp_path: Path) -> str:
    file = tmp_path / "sentence"
    places = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = ForkedProcess(target=start, args=(places, str(file)))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return file.read_text()


def test_the_port_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        sentence = said(0, port, tmp_path)
    assert sentence == f"2 MASTER_PORT={port} is in use on 127.0.0.1: set it to the number of a free port"


@pytest.mark.parametrize("rank", [0, 1])
def test_another_rank_is_not_there(rank: int, tmp_path: Path) -> None:
    sentence = said(rank, port := free_port(), tmp_path)
    late = "not all 2 processes reached" if rank == 0 else "rank 1 did not reach"
    assert sentence.startswith(f"76 {late} rank 0 at 127.0.0.1:{port} within 0.02 minutes: ")


FAILS = """
import time
from launch.boot import Command, run
from ssscale.errors import UserError
time.sleep = lambda seconds: None
def main(argv):
    raise ERROR
run(Command(about="", usage="", example=""), main)
"""


@promises(
    "Ranks",
    "one rank fails before it has joined the others, as without the mount of the data",
    seen="the rank names itself and its host: `error: rank 1 on HOST: …`",
    code="2, or 70 after an unexpected error",
    identical="nothing is changed",
    do="follow the message",
)
@pytest.mark.parametrize(
    ("error", "rank", "code", "sentence"),
    [
        ("UserError('no such folder')", "1", 2, "error: rank 1 on {host}: no such folder\n"),
        ("UserError('no such folder')", "0", 2, "error: no such folder\n"),  # as on all ranks
        ("RuntimeError('no driver')", "0", 70, "failed: rank 0 on {host}: -c: RuntimeError: no driver; an unexpected"),
        ("RuntimeError('no driver')", "1", 70, "failed: rank 1 on {host}: -c: RuntimeError: no driver; an unexpected"),
    ],
)
def test_a_rank_that_fails_alone_names_itself(error: str, rank: str, code: int, sentence: str) -> None:
    """Also where the file of exit codes, on the shared disk, cannot be written."""
    environment = os.environ | {"RANK": rank, "WORLD_SIZE": "2", "SSSCALE_EXIT_CODES": "/nowhere/codes"}
    command = [sys.executable, "-c", FAILS.replace("ERROR", error)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(sentence.format(host=socket.gethostname()))
    assert "Traceback" not in done.stderr


def test_a_rank_may_open_as_many_files_as_the_machine_allows() -> None:
    """The usual soft limit is 1,024, and a rank of a large run has more connections than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**20), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
