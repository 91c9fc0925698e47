"""Checks that the environment of the job scripts loads, before anything is queued."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

from ssscale.errors import UserError

SECONDS = 60.0  # conda and modules take several seconds on a slow file system


def check_environment(root: Path, env_file: Path | None, container: bool, seconds: float = SECONDS) -> None:
    """Sources slurm/env.sh (or `env_file`) in a separate shell and looks for the interpreter. Raises UserError.

    container: the interpreter belongs to the image of srun, so that it may be missing here.
    """
    name = "slurm/env.sh" if env_file is None else str(env_file)
    if env_file is not None and not env_file.is_file():
        raise UserError(f"env={env_file}: there is no such file")
    script = 'set -u; . slurm/load_env.sh; command -v "$python" >/dev/null || { echo "no-python $python"; exit 3; }'
    environment = os.environ | {"env_file": "" if env_file is None else str(env_file)}
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise UserError(f"{name} does not end within {seconds:g} s; nothing was submitted") from None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if process.returncode == 3 and lines and lines[-1].startswith("no-python "):
        if container:
            return
        raise UserError(
            f"there is no {lines[-1].removeprefix('no-python ')}: run make setup, or set SSSCALE_PYTHON in slurm/env.sh"
        )
    if process.returncode:
        problem = lines[-1].removeprefix("error: ") if lines else f"{name} ended with code {process.returncode}"
        said = f" ({lines[-2]})" if len(lines) > 1 else ""
        raise UserError(f"{problem}{said}; nothing was submitted")


def split_flags(key: str, text: str) -> list[str]:
    """Splits a text into words as a shell does. Raises UserError naming the key."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{key}={text}: {str(error).lower()}") from None
