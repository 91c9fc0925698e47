"""Makes `import launch` find the package if a command is started as a file.

`python launch/pretrain.py` puts this folder first on sys.path. There its files would shadow packages of the same names
(`evaluate`, which lm-eval uses), and `launch` would be this file. Importing this file puts the repository root there
instead and replaces this module by the package. So commands can begin with ordinary imports, of which `from launch.boot
import ...` must be the first of ours. Commands that are started in another way (`python -m launch.pretrain`, or
imported) never load this file.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    files = sorted(Path(__file__).parent.glob("*.py"))
    commands = [f"launch/{file.name}" for file in files if "run(COMMAND, main)\n" in file.read_text(encoding="utf-8")]
    print(f"error: launch/launch.py is not a command: use {', '.join(commands)}", file=sys.stderr)
    sys.exit(2)

sys.path[0] = str(Path(__file__).resolve().parents[1])
from ssscale.interrupt import leave_at_once  # noqa: E402 - found by the path above

leave_at_once()  # the imports that follow may take long
del sys.modules["launch"]
import launch  # noqa: E402, F401 - the package replaces this module
