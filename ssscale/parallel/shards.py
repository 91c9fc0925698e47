"""Which ranks divide the optimizer's state (`parallel.shard_within`): all that hold the same weights, or those of a node."""

import datetime
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ssscale.config.choices import ShardWithin
from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json
from ssscale.validate_parallel import check_node


@dataclass(frozen=True)
class Shards:
    """How ZeRO stage 1 divides the optimizer's state over the replicas, the ranks that hold the same weights.

    group, rank, size: the ranks that divide it. Each holds one *shard*.
    copy_group, copy_rank, copies: the ranks that hold the same shard, one on each node, in the order of the ranks.
        copy_group is None if no other rank holds it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    copy_group: dist.ProcessGroup | None = None
    copy_rank: int = 0
    copies: int = 1


def make_shards(
    within: int | ShardWithin, replicas: dist.ProcessGroup, tensor: int, timeout: datetime.timedelta
) -> Shards:
    """Returns the shards of this rank. All ranks call it together.

    within: `parallel.shard_within`. A number stands for nodes of that many neighboring ranks.
    replicas: the ranks that hold the same weights as this one. tensor: tensor-parallel ranks, which are neighbors.
    Raises UserError if the ranks of a node cannot divide the state among them.
    """
    rank, size = dist.get_rank(replicas), dist.get_world_size(replicas)
    if within is ShardWithin.all:
        return Shards(replicas, rank, size)
    node = ranks_per_node(gather_json(socket.gethostname())) if isinstance(within, ShardWithin) else within
    check_node(within, node, tensor, dist.get_world_size())
    together = node // tensor
    if together == size:
        return Shards(replicas, rank, size)
    whole = sorted({tuple(ranks) for ranks in gather_json(dist.get_process_group_ranks(replicas))})
    neighbors = [list(ranks[i : i + together]) for ranks in whole for i in range(0, size, together)]
    apart = [list(ranks[i::together]) for ranks in whole for i in range(together)]
    group, _ = dist.new_subgroups_by_enumeration(neighbors, timeout)
    copies, _ = dist.new_subgroups_by_enumeration(apart, timeout)
    assert group is not None
    return Shards(group, rank % together, together, copies, rank // together, size // together)


def ranks_per_node(hosts: Sequence[str]) -> int:
    """Returns how many ranks each node has. hosts: by rank, the name of its node.

    Raises UserError if nodes have unequal numbers of ranks, or if the ranks of a node do not follow each other.
    """
    counts = Counter(hosts)
    least, most = min(counts, key=lambda host: counts[host]), max(counts, key=lambda host: counts[host])
    if counts[least] != counts[most]:
        raise UserError(
            f"parallel.shard_within=node needs as many ranks on every node, not {counts[most]} on {most} and {counts[least]} "
            f"on {least}: start as many on each, or use parallel.shard_within=all"
        )
    size = counts[hosts[0]]
    if any(host != hosts[number // size * size] for number, host in enumerate(hosts)):
        places = [number for number, host in enumerate(hosts) if host == hosts[0]]
        raise UserError(
            f"parallel.shard_within=node needs the ranks of a node to follow each other, and {hosts[0]} has ranks "
            f"{', '.join(map(str, places[:8]))}: start them in blocks (srun --distribution=block), or use "
            "parallel.shard_within=all"
        )
    return size
