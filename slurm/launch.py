"""The same as launch/launch.py, for the commands of this folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules["launch"]
import launch  # the package replaces this module
