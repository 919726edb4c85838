"""Which keys of a log were seen already, in a fixed amount of memory

A log is cleaned from its newest messages to its oldest: a message whose key was seen before is superseded. `KeyMap` is
a hash table of the keys that were seen, of all hashes below a bound. When it is full it forgets those of the upper
eighth of its hashes and lowers the bound; another pass over the log, from the bound on, decides about the rest. So a
table of any size cleans a log of any size, and each pass sees fewer keys.

A hash only finds the message that may have the same key. The keys are compared, so that two keys with one hash can
never hide each other: then both stay.

Many rows are added at once. All look at their slots in the same round; of those that find the same empty slot the last
one written owns it, which is the newest. The others look again; those that find another hash go on to the next slot.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]
Bytes: TypeAlias = NDArray[np.uint8]
Int64s: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

SLOT_BYTES = 24
"""Bytes of a slot: the hash (8), where its key is (8), its length or -1 (4), and the row that wants to take it (4)."""
LOAD = 0.75
"""The part of the slots that is used at most."""
SMALLEST_BYTES = 64 * 1024
FEW_ROWS = 4096
"""With room for fewer rows than this the map counts as full."""
ALL_HASHES = 2**64
_LOWER_HALF = np.uint64(2**32 - 1)
"""These bits choose the slot, since those above decide about the range."""


class KeyColumn(NamedTuple):
    """Keys of n rows: `data[starts[i] : starts[i] + lengths[i]]`; a row of length -1 has no key."""

    data: Bytes
    starts: Int64s
    lengths: Int64s

    def take(self, rows: Int64s | slice) -> KeyColumn:
        return KeyColumn(self.data, self.starts[rows], self.lengths[rows])


class Added(NamedTuple):
    """Which of n rows are the newest of their key, and which are older ones."""

    newest: Mask
    superseded: Mask


class KeyMap:
    """The keys seen so far whose hashes are from `begin` to below `end`.

    `memory_bytes` is for slots and keys together. `end` falls when they are full. `count`: the number of keys.
    """

    def __init__(self, memory_bytes: int, begin: int = 0, end: int = ALL_HASHES) -> None:
        if memory_bytes < SMALLEST_BYTES:
            raise ValueError(f"a key map needs at least {SMALLEST_BYTES} bytes, got {memory_bytes}")
        self._slots = slots = memory_bytes * 3 // 4 // SLOT_BYTES
        self.begin, self.end = begin, end
        self.count = 0
        self._most = int(slots * LOAD)
        self._hashes = np.zeros(slots, np.uint64)
        self._starts = np.zeros(slots, np.int64)
        self._lengths = np.full(slots, -1, np.int32)
        self._takers = np.zeros(slots, np.int32)
        self._keys = np.zeros(memory_bytes - slots * SLOT_BYTES, np.uint8)
        self._keys_end = 0

    @classmethod
    def for_rows(cls, rows: int, key_bytes: int, most_bytes: int, begin: int = 0) -> KeyMap:
        """A map with room for so many keys with so many bytes, unless that needs more than `most_bytes`."""
        slot_bytes = (int(rows / LOAD) + 2) * SLOT_BYTES
        needed = max(slot_bytes * 4 // 3, key_bytes * 4, SMALLEST_BYTES)
        return cls(min(needed, most_bytes), begin)

    def add(self, hashes: Hashes, keys: KeyColumn) -> Added:
        """Add the keys of n rows in the order of the log, all older than those added before.

        Neither newest nor superseded are rows without a key, with a hash out of the range, with the hash of another
        key that was seen, or with a key longer than a quarter of the memory for keys.
        """
        newest, superseded = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        usable = (keys.lengths >= 0) & (keys.lengths <= len(self._keys) // 4)
        rows = self._in_range(hashes, np.flatnonzero(usable))
        while len(rows):
            room = self._room_for(keys.lengths[rows])
            if room < min(FEW_ROWS, len(rows)) and self.end - self.begin > 1:
                self._forget_upper_hashes()
                rows = self._in_range(hashes, rows)
                continue
            rows, last = rows[: len(rows) - room], rows[len(rows) - room :]
            newest[last], superseded[last] = self._add(hashes[last], keys.take(last))
        return Added(newest, superseded)

    def _in_range(self, hashes: Hashes, rows: Int64s) -> Int64s:
        if (self.begin, self.end) == (0, ALL_HASHES):
            return rows
        found = hashes[rows]
        return rows[(found >= np.uint64(self.begin)) & (found <= np.uint64(self.end - 1))]

    def _room_for(self, lengths: Int64s) -> int:
        """How many of the newest rows fit, if all their keys are new."""
        most = min(self._most - self.count, len(lengths))
        if most == 0:
            return 0
        ends = np.cumsum(lengths[: -most - 1 : -1])
        return int(np.searchsorted(ends, len(self._keys) - self._keys_end, side="right"))

    def _add(self, hashes: Hashes, keys: KeyColumn) -> Added:
        newest, superseded = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        rows = np.arange(len(hashes))
        slots = ((hashes & _LOWER_HALF) * np.uint64(self._slots) >> np.uint64(32)).astype(np.int64)
        while len(rows):
            won = self._take_slots(slots, rows)
            newest[rows[won]] = True
            self._store(slots[won], hashes[rows[won]], keys.take(rows[won]))
            slots, rows = slots[~won], rows[~won]
            same = self._hashes[slots] == hashes[rows]
            found, twins = slots[same], rows[same]
            mine = KeyColumn(self._keys, self._starts[found], self._lengths[found])
            superseded[twins] = equal_keys(mine, keys.take(twins))
            slots, rows = (slots[~same] + 1) % self._slots, rows[~same]
        return Added(newest, superseded)

    def _take_slots(self, slots: Int64s, rows: Int64s) -> Mask:
        """Which rows take the empty slots among theirs: of those at the same one the last."""
        won = self._lengths[slots] < 0
        self._takers[slots[won]] = rows[won]  # the last one stays
        won[won] = self._takers[slots[won]] == rows[won]
        return won

    def _store(self, slots: Int64s, hashes: Hashes, keys: KeyColumn) -> None:
        ends = self._keys_end + np.cumsum(keys.lengths)
        self._hashes[slots] = hashes
        self._lengths[slots] = keys.lengths
        self._starts[slots] = ends - keys.lengths
        self.count += len(slots)
        if len(slots):
            self._keys[self._keys_end : ends[-1]] = gathered(keys)
            self._keys_end = int(ends[-1])

    def _forget_upper_hashes(self) -> None:
        """Forget the upper eighth of the range: less would be done too often, more would leave room unused."""
        self.end = self.begin + max((self.end - self.begin) * 7 // 8, 1)
        kept = np.flatnonzero((self._lengths >= 0) & (self._hashes <= np.uint64(self.end - 1)))
        kept = kept[np.argsort(self._starts[kept])]
        hashes, starts = self._hashes[kept], self._starts[kept]
        lengths = self._lengths[kept].astype(np.int64)
        keys = KeyColumn(gathered(KeyColumn(self._keys, starts, lengths)), np.cumsum(lengths) - lengths, lengths)
        self._lengths.fill(-1)
        self._keys_end = self.count = 0
        self._add(hashes, keys)


def gathered(keys: KeyColumn) -> Bytes:
    """The bytes of the keys, one after the other."""
    ends = np.cumsum(keys.lengths)
    total = int(ends[-1]) if len(ends) else 0
    shifts = np.repeat(keys.starts - ends + keys.lengths, keys.lengths)
    found: Bytes = keys.data[shifts + np.arange(total)]
    return found


def equal_keys(some: KeyColumn, others: KeyColumn) -> Mask:
    """Which of n pairs of keys are equal."""
    equal: Mask = some.lengths == others.lengths
    for length in np.unique(some.lengths[equal]).tolist():
        if length:
            rows = np.flatnonzero(equal & (some.lengths == length))
            here = sliding_window_view(some.data, length)[some.starts[rows]]
            there = sliding_window_view(others.data, length)[others.starts[rows]]
            equal[rows] = here.view(f"S{length}").ravel() == there.view(f"S{length}").ravel()
    return equal
