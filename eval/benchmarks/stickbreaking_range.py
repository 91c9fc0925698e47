"""How many row blocks leave the range of stick-breaking's fast algebra, and which of them need to.

The kernels compute a block of 64 queries a second time if 16 adjacent keys spend more than a bound of some live row's stick:
with the exact algebra on the diagonal and in the tile after it, or as far as the block walks, if the row leaves the range
farther away (kernels/stickbreaking/README.md, Range).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

ROWS, KEYS, GROUP = 64, 64, 16  # of a block, of a tile, and of the keys of a thread
BITS = (70, 100, 126)
LIVE = 12.0  # bits that a row may have spent when it enters a tile: training drops what is left of its stick beyond


class Beyond(NamedTuple):
    """Shares of the row blocks in which 16 keys spend more than a bound, for each of BITS.

    any: of some row, at a tile that the block visits. live: of a row that is live there. far: that, beyond the tile on the
    diagonal and the next one.
    """

    any: tuple[float, ...]
    live: tuple[float, ...]
    far: tuple[float, ...]

    def __str__(self) -> str:
        kinds = zip(("any row", "live rows", "live rows beyond two tiles"), self, strict=True)
        return ", ".join(f"{name} {' / '.join(f'{share:.3f}' for share in shares)}" for name, shares in kinds)


@torch.no_grad()
def blocks_beyond(q: Tensor, k: Tensor, length: int, scale: float) -> Beyond:
    """Counts the row blocks of sequences of `length` tokens, a multiple of ROWS. q: [T, N, H]. k: [T, K, H]."""
    counts = torch.zeros(3, len(BITS), dtype=torch.int64, device=q.device)
    for first in range(0, len(q), length):
        for start in range(0, length, ROWS):
            keys = k[first : first + start + ROWS].repeat_interleave(q.shape[1] // k.shape[1], 1)
            counts += _of_block(q[first + start : first + start + ROWS], keys, start, scale)
    blocks = len(q) // ROWS * q.shape[1]
    any_row, live, far = (tuple(x / blocks for x in row) for row in counts.tolist())
    return Beyond(any_row, live, far)


def _of_block(q: Tensor, k: Tensor, start: int, scale: float) -> Tensor:
    """Returns in how many heads the block of rows from `start` on leaves the range: [3, BITS]. q, k: [R or keys, N, H]."""
    z = torch.einsum("rnh,knh->nrk", q.float(), k.float()) * scale
    row = torch.arange(start, start + ROWS, device=q.device)[:, None]
    bits = torch.where(torch.arange(len(k), device=q.device) < row, softplus(z) / 0.6931471805599453, 0.0)
    groups = pad(bits, (0, -len(k) % KEYS)).unflatten(-1, (-1, KEYS // GROUP, GROUP)).sum(-1)  # [N, R, tiles, 4]
    tiles = groups.sum(-1)
    live = tiles.flip(-1).cumsum(-1).flip(-1) - tiles <= LIVE  # when the row enters the tile
    most = groups.amax(-1)
    visited = most.where(live.any(1, keepdim=True), 0.0)
    of_live = most.where(live, 0.0)
    far = of_live[..., : max(of_live.shape[-1] - 2, 0)]
    worst = [pad(x, (1, 0)).flatten(1).amax(1) for x in (visited, of_live, far)]
    return torch.stack([torch.stack([(x > bound).sum() for bound in BITS]) for x in worst])
