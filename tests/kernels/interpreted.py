"""Runs a script of kernels under Triton's interpreter, which TRITON_INTERPRET=1 chooses before Triton is imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_interpreted(script: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The results by case, one JSON object a line; a process for each argument, side by side, or one for none."""
    environment = {
        "PYTHONPATH": str(HERE.parents[1]),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1" if len(arguments) > 1 else "2",
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
    }
    running = [
        subprocess.Popen(
            [sys.executable, HERE / script, *([argument] if argument else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for argument in arguments or ("",)
    ]
    results = {}
    for process in running:
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        results |= {result.pop("case"): result for result in map(json.loads, out.splitlines())}
    return results
