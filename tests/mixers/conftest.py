"""Runs of the commands with a mixer that one file of the tests adds."""

from pathlib import Path

import pytest

from tests.mixers.runs import Command

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("retnet.py")


@pytest.fixture(scope="session")
def command() -> Command:
    return Command(PLUGIN)
