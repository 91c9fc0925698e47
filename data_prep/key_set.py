"""A growing set of 64-bit keys for finding duplicates among very many documents, in 16 to 32 bytes per key."""

import numpy as np

FILLED = 0.5  # largest filled share of the table


class KeySet:
    """A hash set with open addressing and linear probing in one numpy array. It handles many keys per call.

    Key 0 marks an empty slot. Some two texts share a key by chance with probability documents² / 2^65: 0.03 for 10⁹
    documents.
    """

    def __init__(self) -> None:
        self._table = np.zeros(1 << 16, np.uint64)
        self._count = 0

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys. Returns for each whether it is new: neither in the set nor earlier in `keys`."""
        keys = np.where(keys == 0, 1, keys).astype(np.uint64)
        while self._count + len(keys) > FILLED * len(self._table):
            old = self._table[self._table != 0]
            self._table = np.zeros(2 * len(self._table), np.uint64)
            self._insert(old)
        _, first = np.unique(keys, return_index=True)
        new = np.zeros(len(keys), bool)
        new[first] = self._insert(keys[first])
        self._count += int(new.sum())
        return new

    def _insert(self, keys: np.ndarray) -> np.ndarray:
        """Inserts distinct keys. Returns for each whether it was absent."""
        mask = np.uint64(len(self._table) - 1)
        absent = np.zeros(len(keys), bool)
        waiting = np.arange(len(keys))
        places = keys & mask
        while len(waiting):
            found = self._table[places]
            free = found == 0
            # If several keys want the same free slot, the last one gets it and the others try the next.
            self._table[places[free]] = keys[waiting[free]]
            won = free & (self._table[places] == keys[waiting])
            absent[waiting[won]] = True
            left = ~won & (found != keys[waiting])
            waiting, places = waiting[left], (places[left] + np.uint64(1)) & mask
        return absent
