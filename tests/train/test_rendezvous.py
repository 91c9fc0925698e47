"""A process group that cannot start says why: MASTER_PORT in use, or rank 0 not reached."""

import os
import socket
from pathlib import Path

import pytest

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
