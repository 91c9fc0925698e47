"""A model of the links between GPUs: how long collectives take on a cluster, and what each GPU sends.

`ssscale.train.scale` predicts a step with it. Needs no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Constant(NamedTuple):
    """A number of the model. measured: whether by a measurement of this quantity, which `source` names."""

    value: float
    measured: bool
    source: str


class Collective(NamedTuple):
    """A kind of collective within a node. Bytes are those of a link of the ring, as `launch/benchmark_links.py` counts them.

    latency: s of the smallest size. rate: bytes/s of 256 MiB after the latency. rounds: times that it passes around the ring.
    """

    latency: float
    rate: float
    rounds: int = 1


# `python launch/benchmark_links.py gpus=2 largest=256` at f48e1da: two H200s of one host, NVLink, NCCL 2.28.9, multicast off
# (docs/log/2026-11-25-scale.md). More GPUs were not measured.
ALL_REDUCE = Collective(36.8e-6, 308e9, rounds=2)
REDUCE_SCATTER = Collective(37.3e-6, 239e9)
ALL_GATHER = Collective(32.8e-6, 253e9)
ALL_TO_ALL = Collective(37.5e-6, 297e9)
SEND = Collective(71.4e-6, 316e9)
HOP = Constant(
    15e-6, False, "s per node that a ring of ranks passes through: assumed; benchmark_links.py on several nodes"
)


class Exchange(NamedTuple):
    """`number` collectives over groups of `size` ranks, every `stride`-th one. sent: bytes that a rank sends in all of them."""

    kind: Collective
    size: int
    stride: int
    number: int
    sent: float


class Traffic(NamedTuple):
    """Bytes of gradients and weights that one GPU sends per step, to GPUs of its node and through its own network."""

    within: float
    between: float


@dataclass(frozen=True)
class Cluster:
    """nodes of `gpus` GPUs each. network: bytes/s per GPU to other nodes, in each direction. memory: bytes per GPU."""

    nodes: int
    gpus: int
    network: float
    memory: float

    @property
    def size(self) -> int:
        return self.nodes * self.gpus

    def together(self, size: int, stride: int) -> int:
        """Returns how many members of such a group (`link`) are on one node."""
        return min(size, max(1, self.gpus // stride))

    def link(self, kind: Collective, size: int, stride: int) -> tuple[float, int]:
        """Returns (bytes/s, nodes) of a group of `size` ranks, every `stride`-th one.

        Between nodes the members on one node send over the networks of as many GPUs, so that a ring over all of a node's
        GPUs passes `gpus` times the bandwidth of one.
        """
        together = self.together(size, stride)
        nodes = size // together
        return (kind.rate if nodes == 1 else min(kind.rate, together * self.network)), nodes

    def seconds(self, exchange: Exchange) -> float:
        """Returns the seconds that an exchange takes if nothing is computed beside it."""
        kind, size, stride, number, sent = exchange
        if size == 1:
            return 0.0
        rate, nodes = self.link(kind, size, stride)
        return number * (kind.latency + kind.rounds * HOP.value * (nodes - 1)) + sent / rate

    def pipelined(self, exchanges: Sequence[Exchange]) -> float:
        """Returns the seconds of exchanges that follow each other bucket by bucket: the slowest, and a bucket of the others."""
        *others, slowest = sorted(map(self.seconds, exchanges))
        return slowest + sum(others) / max(1, exchanges[0].number)

    def traffic(self, exchanges: Iterable[Exchange]) -> Traffic:
        """Returns what one GPU sends.

        A ring passes from node to node once per node. What goes there is divided over the networks of its members there.
        """
        within = between = 0.0
        for exchange in exchanges:
            together = self.together(exchange.size, exchange.stride)
            across = exchange.sent / together if exchange.size > together else 0.0
            within, between = within + exchange.sent - across, between + across
        return Traffic(within, between)
