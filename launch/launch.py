"""Makes `launch` the package for a command that is started as a file.

`python launch/pretrain.py` puts this folder first on sys.path, where its files would shadow packages of the same names
(`evaluate`, which lm-eval uses) and where `launch` is this file. Importing it puts the repository's root there instead and
the package in its own place, so that a command begins with ordinary imports: `from launch.boot import ...` before any other
import of ours. Started in another way (`python -m launch.pretrain`, or imported), a command never meets this file.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules["launch"]
import launch  # noqa: E402, F401 - the package, which takes this file's place
