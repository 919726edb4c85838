"""The set of aborted transactions: one compressed bitmap for each coordinator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from broker_io.position import Int64s
from txnbuffer.model import TxnId


class AbortedSet:
    """Aborted transactions, asked one by one or by the column; a few bits an id where ids are dense."""

    __slots__ = ("_bitmaps",)

    def __init__(self) -> None:
        self._bitmaps: dict[int, BitMap64] = {}

    def __contains__(self, txn: TxnId) -> bool:
        bitmap = self._bitmaps.get(txn.most)
        return bitmap is not None and txn.least in bitmap

    def __len__(self) -> int:
        return sum(map(len, self._bitmaps.values()))

    def add(self, txns: list[TxnId]) -> None:
        """Add ids of one coordinator, at least one."""
        self._bitmaps.setdefault(txns[0].most, BitMap64()).update([txn.least for txn in txns])

    def update(self, most: Int64s, least: Int64s) -> None:
        """Add a column of ids."""
        for coordinator, chosen in _by_coordinator(most, least):
            self._bitmaps.setdefault(coordinator, BitMap64()).update(chosen)

    def discard(self, most: Int64s, least: Int64s) -> None:
        """Take out a column of ids; those that are not in are passed over."""
        for coordinator, chosen in _by_coordinator(most, least):
            bitmap = self._bitmaps.get(coordinator)
            if bitmap is not None:
                bitmap -= chosen
                if bitmap:
                    self._bitmaps[coordinator] = bitmap
                else:
                    del self._bitmaps[coordinator]

    def mask(self, most: Int64s, least: Int64s) -> NDArray[np.bool_]:
        """bool[n]: which ids are in. An id with a negative least never is."""
        found = np.zeros(len(least), np.bool_)
        for coordinator, bitmap in self._bitmaps.items():
            rows = np.flatnonzero((most == coordinator) & (least > 0))
            found[rows] = np.fromiter(map(bitmap.__contains__, least[rows].tolist()), np.bool_, len(rows))
        return found

    def ids(self) -> list[TxnId]:
        """All of them, ascending; for tools and tests."""
        return [TxnId(most, least) for most in sorted(self._bitmaps) for least in self._bitmaps[most]]


def _by_coordinator(most: Int64s, least: Int64s) -> list[tuple[int, BitMap64]]:
    return [(int(number), BitMap64(least[most == number].astype(np.uint64))) for number in np.unique(most)]
