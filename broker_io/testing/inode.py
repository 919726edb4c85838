"""The bytes of one simulated file: as a process sees them, and as a power loss may leave them."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


class Unsynced(enum.Enum):
    """What a power loss leaves of what was written but not synced."""

    LOST = "lost"
    KEPT = "kept"
    PREFIX = "prefix"
    """Of each file and of the directories, what was done first."""
    SECTORS = "sectors"
    """Of each file any of its sectors, of the directories any of their changes."""


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    size: int


Change = Write | Truncate


@dataclass(slots=True, eq=False)
class Inode:
    """One file. `stable` is what was synced, `pending` what was done since, `data` all together.

    What a failed sync dropped shows in `data` only: a process still reads it, a power loss takes it.
    """

    number: int
    data: bytearray = field(default_factory=bytearray)
    stable: bytes = b""
    pending: list[Change] = field(default_factory=list)
    version: int = 0

    def change(self, change: Change) -> None:
        self.pending.append(change)
        self.version += 1
        _apply(self.data, change)

    def sync(self) -> None:
        if self.pending:
            data = bytearray(self.stable)
            for change in self.pending:
                _apply(data, change)
            self.stable = bytes(data)
            self.pending.clear()

    def fail_to_sync(self) -> None:
        """Drop what was to be written, as an operating system does: no later sync will write it."""
        self.pending.clear()

    def copy(self) -> Inode:
        return Inode(self.number, bytearray(self.data), self.stable, [*self.pending], self.version)

    def after_power_loss(self, unsynced: Unsynced, choose: random.Random) -> Inode:
        """The file as it is found again; all of it is stable then."""
        data = bytearray(self.stable)
        if unsynced is Unsynced.KEPT:
            data = bytearray(self.data)
        elif unsynced is Unsynced.PREFIX:
            self._apply_prefix(data, choose)
        elif unsynced is Unsynced.SECTORS:
            self._apply_sectors(data, choose)
        return Inode(self.number, data, bytes(data), version=self.version + 1)

    def _apply_prefix(self, data: bytearray, choose: random.Random) -> None:
        whole = choose.randint(0, len(self.pending))
        for change in self.pending[:whole]:
            _apply(data, change)
        if whole < len(self.pending) and isinstance(torn := self.pending[whole], Write):
            _apply(data, Write(torn.offset, torn.data[: choose.randint(0, len(torn.data))]))

    def _apply_sectors(self, data: bytearray, choose: random.Random) -> None:
        for change in self.pending:
            if isinstance(change, Truncate):
                if choose.random() < 0.5:
                    _apply(data, change)
                continue
            grown_to = len(data)
            for sector in _sectors(change):
                if choose.random() < 0.5:
                    _apply(data, sector)
                elif choose.random() < 0.5:  # the size got there, the bytes did not
                    grown_to = max(grown_to, sector.offset + len(sector.data))
            data.extend(bytes(max(0, grown_to - len(data))))


def _sectors(write: Write) -> list[Write]:
    end = write.offset + len(write.data)
    starts = [write.offset, *range((write.offset // SECTOR + 1) * SECTOR, end, SECTOR)]
    stops = [*starts[1:], end]
    return [Write(a, write.data[a - write.offset : b - write.offset]) for a, b in zip(starts, stops, strict=True)]


def _apply(data: bytearray, change: Change) -> None:
    if isinstance(change, Truncate):
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
    elif change.data:
        data.extend(bytes(max(0, change.offset - len(data))))
        data[change.offset : change.offset + len(change.data)] = change.data
