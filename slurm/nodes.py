"""The resources that a job requests per node, derived from what Slurm reports about its nodes."""

import re
import subprocess
from dataclasses import dataclass

from ssscale.errors import UserError


@dataclass(frozen=True)
class Node:
    """A kind of node in a partition: its CPUs (in Slurm's count) and GPUs."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Request:
    """What the user requested. None: choose what fits the nodes."""

    gpus: int
    tasks: int
    cpus: int | None = None
    mem: str | None = None
    exclusive: bool | None = None
    prefix: str = ""  # prefix of the option names, for errors


def nodes_of(partition: str | None) -> list[Node]:
    """Returns the kinds of nodes of a partition (None: the default one), or [] if Slurm does not answer."""
    command = ["sinfo", "--noheader", "--exact", "--format=%P|%c|%G"]
    command += [f"--partition={partition}"] if partition else []
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    rows = [line.strip().split("|") for line in shown.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 3 and (partition or row[0].endswith("*"))]
    return sorted({Node(int(cpus.rstrip("+")), count_gpus(gres)) for _, cpus, gres in rows}, key=lambda node: node.gpus)


def count_gpus(gres: str) -> int:
    """Counts the GPUs in Slurm's list of resources: `gpu:h100:8(S:0-1),lscratch:1000` → 8."""
    found = re.findall(r"(?:^|,)(?:gres/)?gpu(?::[^:,()]+)?:(\d+)", gres)
    return sum(map(int, found))


def sbatch_flags(request: Request, nodes: list[Node]) -> list[str]:
    """Returns flags for CPUs, memory and exclusive use. Raises UserError if no node has so many GPUs.

    A job that takes all GPUs of its nodes gets the whole nodes: --exclusive and all memory; the job script divides the
    CPUs among the tasks. A job that takes some of the GPUs gets the corresponding share of the CPUs.
    """
    fitting = [node for node in nodes if node.gpus >= request.gpus]
    most = max((node.gpus for node in nodes), default=0)
    if most and not fitting:
        key = f"{request.prefix}gpus"
        raise UserError(f"{key}={request.gpus}: the nodes of this partition have at most {most}; use {key}={most}")
    whole = request.gpus > 0 and bool(fitting) and all(node.gpus == request.gpus for node in fitting)
    exclusive = whole if request.exclusive is None else request.exclusive
    mem = "0" if request.mem is None and exclusive else request.mem
    cpus = request.cpus
    if cpus is None and fitting and not exclusive:
        cpus = max(1, min(node.cpus // max(node.gpus, request.tasks) for node in fitting))
    flags = ["--exclusive"] if exclusive else []
    flags += [f"--mem={mem}"] if mem is not None else []
    return flags + ([f"--cpus-per-task={cpus}"] if cpus is not None else [])
