"""What a process learns from its launcher: torchrun, srun or launch/workers.py, if there is one."""

import os
import signal
import subprocess
from collections.abc import Mapping

from ssscale.errors import UserError
from ssscale.launcher import LAUNCHER, end_with

WORKER = "SSSCALE_WORKER"  # set in processes that launch/workers.py starts


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torch.distributed for a task of srun (one per GPU, without torchrun), or {} otherwise.

    A batch script has SLURM_PROCID as well, but is not a task: only srun sets SLURM_STEP_NUM_TASKS. The rendezvous is
    on the first host of the step, at a port derived from the job's number, unless MASTER_ADDR and MASTER_PORT are set.
    """
    if "RANK" in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return {}
    job = int(environ.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20_000 + job % 10_000),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm host list, such as gpu003 for `gpu[003-006,9],login1`. Raises UserError."""
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        hosts, problem = shown.stdout.split(), " ".join(shown.stderr.split()) or "it names none"
    except (OSError, subprocess.TimeoutExpired) as error:
        hosts, problem = [], "no scontrol on this machine" if isinstance(error, FileNotFoundError) else str(error)
    if not hosts:
        raise UserError(
            f"scontrol cannot tell the first host of {nodes} ({problem}): set MASTER_ADDR to its name; in a container, "
            "start with slurm/submit.py, whose job script does"
        )
    return hosts[0]


def follow_launcher() -> None:
    """Requests SIGTERM when the launcher dies. If it is killed alone, its workers would otherwise train on."""
    if LAUNCHER in os.environ:
        end_with(int(os.environ[LAUNCHER]), signal.SIGTERM)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid(), signal.SIGTERM)
