"""The same as launch/launch.py, for the commands of this folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from ssscale.interrupt import leave_at_once  # noqa: E402 - found by the path above

leave_at_once()  # the imports that follow may take long
del sys.modules["launch"]
import launch  # noqa: E402, F401 - the package replaces this module
