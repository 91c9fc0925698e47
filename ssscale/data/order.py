"""The order of samples: which row of which source is the k-th sample of a run.

It depends only on the seed, the mixes, the names and order of the sources, and the numbers of rows in their shards. The
number of ranks and workers does not matter. Any k can be looked up directly, so resuming needs only the number of samples
that have been consumed.

The order of StreamingDataset (mosaicml-streaming) is not used, because it depends on the number of canonical nodes and
cannot switch to another mix of sources at a given sample.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from ssscale.errors import UserError

# Samples per block. At the end of each block, the number of samples from each source differs from share · n by at most
# about one, where n is the number of samples since the mix began.
BLOCK = 256
WINDOW = 4  # number of shards whose rows are shuffled together; a reader has only this many shards of a source open

Mix = Mapping[str, float] | None


class Sample(NamedTuple):
    """A row of a source. epoch: how many times all rows of the source have been read before."""

    source: int
    epoch: int
    row: int


@dataclass(frozen=True)
class _Segment:
    first: int  # sample at which the mix starts
    split: "_Split"
    taken: tuple[int, ...]  # samples of each source before `first`


class Order:
    """The order in which a run reads the rows of several sources. `order[k]` is sample k.

    shards: source name → number of rows of each of its shards.
    mixes: pairs (first sample, mix) in ascending order, the first one from sample 0. A mix maps source names to shares of
        the samples; sources that it does not name get no samples. A mix of None gives each source a share in proportion to
        its number of rows.
    Raises UserError if a mix names an unknown source, if a share is negative or infinite, or if no share is above 0.
    """

    def __init__(self, shards: Mapping[str, Sequence[int]], mixes: Sequence[tuple[int, Mix]], seed: int):
        self.names = tuple(shards)
        self.seed = seed
        self.shards = [np.asarray(rows, np.int64) for rows in shards.values()]
        self.rows = [int(rows.sum()) for rows in self.shards]
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()
        firsts = [first for first, _ in mixes]
        assert firsts[:1] == [0], firsts
        assert firsts == sorted(set(firsts)), firsts
        self.segments: list[_Segment] = []
        taken = (0,) * len(self.names)
        for (first, mix), following in zip(mixes, [*firsts[1:], None]):
            self.segments.append(_Segment(first, _Split(self._shares(mix)), taken))
            if following is not None:
                taken = self.taken(following)

    def taken(self, k: int) -> tuple[int, ...]:
        """Returns how many of the first k samples come from each source."""
        segment = self._segment(max(k - 1, 0))
        block, rest = divmod(k - segment.first, BLOCK)
        before = np.add(segment.taken, segment.split.counts(block * BLOCK))
        sources, _ = self._block(segment, block)
        return tuple(int(n) for n in before + np.bincount(sources[:rest], minlength=len(self.names)))

    def __getitem__(self, k: int) -> Sample:
        segment = self._segment(k)
        block, index = divmod(k - segment.first, BLOCK)
        sources, numbers = self._block(segment, block)
        source = int(sources[index])
        epoch, position = divmod(int(numbers[index]), self.rows[source])
        return Sample(source, epoch, self._row(source, epoch, position))

    def _shares(self, mix: Mix) -> list[Fraction]:
        mix = dict(zip(self.names, self.rows)) if mix is None else mix
        for name, share in mix.items():
            if name not in self.names:
                raise UserError(f"the mix names {name!r}, which is not a source of the data ({', '.join(self.names)})")
            if not 0 <= share < float("inf"):
                raise UserError(f"the mix gives {name!r} the share {share}: it must be at least 0 and finite")
        if not any(mix.values()):
            raise UserError("the mix gives no source a share above 0")
        # Converted through str, because 0.3 means 3/10 and not the nearest binary fraction.
        return [Fraction(str(mix.get(name, 0))) for name in self.names]

    def _segment(self, k: int) -> _Segment:
        return next(segment for segment in reversed(self.segments) if segment.first <= k)

    def _block(self, segment: _Segment, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each sample of a block, its source and its index among all samples of that source. Both [BLOCK]."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            before = np.array(segment.split.counts(block * BLOCK))
            quotas = np.array(segment.split.counts((block + 1) * BLOCK)) - before
            shuffle = _permutation(BLOCK, self.seed, "block", segment.first, block)
            sources = np.repeat(np.arange(len(quotas)), quotas)[shuffle]
            numbers = np.empty(BLOCK, np.int64)
            for source, quota in enumerate(quotas):
                numbers[sources == source] = segment.taken[source] + before[source] + np.arange(quota)
            return sources, numbers

        return self._cached(("block", segment.first, block), make)

    def _row(self, source: int, epoch: int, position: int) -> int:
        order, bounds = self._cached(("epoch", source, epoch), lambda: self._epoch(source, epoch))
        window = int(np.searchsorted(bounds, position, side="right")) - 1
        rows = self._cached(("window", source, epoch, window), lambda: self._window(source, epoch, window, order))
        return int(rows[position - bounds[window]])

    def _epoch(self, source: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of a source's shards in an epoch, and the positions at which its windows of shards start.

        If the number of shards is a multiple of WINDOW, there is one extra position, the end of the epoch. No window starts
        there, so this position is never used.
        """
        order = _permutation(len(self.shards[source]), self.seed, "shards", self.names[source], epoch)
        ends = np.cumsum(self.shards[source][order])
        return order, np.concatenate([[0], ends[WINDOW - 1 :: WINDOW]])

    def _window(self, source: int, epoch: int, window: int, order: np.ndarray) -> np.ndarray:
        first_rows = np.concatenate([[0], np.cumsum(self.shards[source])])
        chosen = order[window * WINDOW : (window + 1) * WINDOW]
        rows = np.concatenate([np.arange(first_rows[shard], first_rows[shard + 1]) for shard in chosen])
        return rows[_permutation(len(rows), self.seed, "rows", self.names[source], epoch, window)]

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
            if len(self._cache) > 8 + 4 * len(self.names):
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


class _Split:
    """Divides the first n samples among the sources by their shares. The counts add up to n.

    When n grows by one, the count of one source must grow by one, and no count may fall. The usual rounding of n · share
    (largest remainder) violates this. Here, a Huffman tree of the shares divides n in two at each node: the heavier child
    gets its share of the node's samples, rounded, and the other child gets the rest. The share is at most 1, so when n
    grows by one, the heavier child's count grows by 0 or 1, and neither count falls.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self.num_sources = len(shares)
        nodes: list[tuple[Fraction, Any]] = [(share, source) for source, share in enumerate(shares) if share]
        while len(nodes) > 1:
            nodes.sort(key=lambda node: node[0], reverse=True)
            (right, lighter), (left, heavier) = nodes.pop(), nodes.pop()
            nodes.append((left + right, (left / (left + right), heavier, lighter)))
        self.tree = nodes[0][1]

    def counts(self, n: int) -> list[int]:
        found = [0] * self.num_sources

        def divide(node: Any, n: int) -> None:
            if isinstance(node, int):
                found[node] = n
                return
            share, heavier, lighter = node
            first = (2 * n * share.numerator + share.denominator) // (2 * share.denominator)
            divide(heavier, first)
            divide(lighter, n - first)

        divide(self.tree, n)
        return found


def _permutation(n: int, *key: object) -> np.ndarray:
    """Returns a permutation of range(n) that depends on the key only.

    It sorts the raw output of the Philox generator, which is the same in every version of numpy.
    """
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    bits = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(n)
    return np.argsort(bits, kind="stable")
