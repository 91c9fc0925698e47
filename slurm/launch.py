"""The same as launch/launch.py, for the commands of this folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules["launch"]
import launch  # noqa: E402, F401 - the package replaces this module
