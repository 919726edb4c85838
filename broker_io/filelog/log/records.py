"""Records of a replicated log, and what of a store's log counts after a crash

The log is one sequence of records, whichever store was live: `lsn` grows by one from record to record, across epochs. A
record has the epoch of the primary that built it, the commit index which that one had then, and a checksum over itself
and the checksum before it, its `chain`. So two stores that have a record with the same lsn and chain have the same log
up to there, and comparing two marks compares two logs.

What a store may take as committed when it opens is the largest commit index in its journal, and at least the record
that its manifest names: its own end proves nothing, because another store may have been promoted without it. Only
records up to there are redone, and shown by readers of the directory.

Outside its checksum a stored record has the lsn up to which its journal was synced when it was written. Several
records may be written before one sync, and a power failure may keep the later one and lose the earlier one. So a whole
record after a hole is damage only if it says that the hole was synced.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import xxhash

from broker_io.errors import StorageError

Store: TypeAlias = bytes
"""The id of a store: random bytes, written when a directory becomes a member, before anything of it counts as durable.

It is never copied, so a directory whose disk was replaced is another store.
"""

_HEAD = struct.Struct("<QQQQQ")
JOINED_BYTES = 16 * 1024
"""Contents up to this size are joined, which is faster than a checksum of each chunk."""


class Mark(NamedTuple):
    """A place in the log: the epoch, lsn and chain of the last record before it."""

    epoch: int
    lsn: int
    chain: int


START = Mark(0, 0, 0)
MAX_NUMBER = 2**64 - 1
"""The largest lsn and epoch. No record follows one with this lsn."""
FOUNDED_EMPTY = 1
"""The lsn of the mark at which the log of a pair begins if it was founded without a topic; else it is greater."""


class Kind(enum.IntEnum):
    """What a record begins: nothing; an epoch; an epoch after a forced promotion, which may have dropped records."""

    DATA = 0
    EPOCH = 1
    FORCED = 2


class LogRecord(NamedTuple):
    """A record; `content` is its operations as bytes, `commit` the commit index of the primary that built it."""

    mark: Mark
    commit: int
    kind: Kind
    content: bytes

    @property
    def lsn(self) -> int:
        return self.mark.lsn


def mark_after(before: Mark, epoch: int, commit: int, kind: Kind, chunks: Sequence[bytes | memoryview]) -> Mark:
    """The mark of the record after a mark, whose content is in chunks. Raises StorageError if no number is left."""
    lsn = before.lsn + 1
    if max(lsn, epoch) > MAX_NUMBER:
        raise StorageError(f"no record can follow {before}: the log has used all numbers; copy its topics to a new log")
    head = _HEAD.pack(before.chain, epoch, lsn, commit, kind)
    if sum(map(len, chunks)) <= JOINED_BYTES:
        return Mark(epoch, lsn, xxhash.xxh3_64_intdigest(b"".join((head, *chunks))))
    chain = xxhash.xxh3_64(head)
    for chunk in chunks:
        chain.update(chunk)
    return Mark(epoch, lsn, chain.intdigest())


def make_record(before: Mark, epoch: int, commit: int, content: bytes, kind: Kind = Kind.DATA) -> LogRecord:
    """The record after a mark."""
    return LogRecord(mark_after(before, epoch, commit, kind, [content]), commit, kind, content)


def follows(before: Mark, record: LogRecord) -> bool:
    """Whether a record is the next one after a mark, in its log, and whole."""
    if record.lsn != before.lsn + 1:
        return False
    made = make_record(before, record.mark.epoch, record.commit, record.content, record.kind)
    return made.mark == record.mark and record.mark.epoch >= before.epoch


def shown_end(manifest: Mark, records: Iterable[LogRecord], noted: int = 0) -> int:
    """The lsn up to which a store shows and redoes its journal: what it knows to be committed, of what it has.

    `noted` is the largest commit index that was noted by itself.
    """
    end = manifest.lsn
    commit = max(end, noted)
    for record in records:
        commit, end = max(commit, record.commit), max(end, record.lsn)
    return min(commit, end)


def is_damage(hole: int, synced_later: Iterable[int]) -> bool:
    """Whether a hole at an lsn is damage, not a torn tail: one of the whole records after it says that it was synced.

    `synced_later` is how far the journal was synced when each of them was written.
    """
    return any(synced >= hole for synced in synced_later)


@dataclass(eq=False)
class Index:
    """The marks of the records in a journal, from `base`, the mark before the first of them, to `end`.

    `sizes` are the bytes of the log up to each record, counted from the base.
    """

    base: Mark = START
    marks: list[Mark] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def end(self) -> Mark:
        return self.marks[-1] if self.marks else self.base

    def mark(self, lsn: int) -> Mark | None:
        """The mark at an lsn; None if the journal has no record there."""
        if lsn == self.base.lsn:
            return self.base
        at = lsn - self.base.lsn - 1
        return self.marks[at] if 0 <= at < len(self.marks) else None

    def holds(self, mark: Mark) -> bool:
        """Whether the log is the same up to a mark."""
        return self.mark(mark.lsn) == mark

    def bytes_between(self, first: int, last: int) -> int:
        """The bytes of the records after lsn `first` up to `last`, both at or after the base."""
        return self._size(last) - self._size(first)

    def _size(self, lsn: int) -> int:
        at = lsn - self.base.lsn - 1
        return self.sizes[at] if at >= 0 else 0

    def add(self, record: LogRecord) -> None:
        """Add a record that was made after the end."""
        before = self.sizes[-1] if self.sizes else 0
        self.marks.append(record.mark)
        self.sizes.append(before + len(record.content))

    def cut(self, lsn: int) -> None:
        """Forget the records after an lsn."""
        kept = max(0, lsn - self.base.lsn)
        del self.marks[kept:], self.sizes[kept:]

    def drop(self, lsn: int) -> None:
        """Forget the records up to an lsn, whose files were removed."""
        mark, dropped = self.mark(lsn), lsn - self.base.lsn
        if mark is None or dropped <= 0:
            return
        size = self._size(lsn)
        self.base, self.marks = mark, self.marks[dropped:]
        self.sizes = [each - size for each in self.sizes[dropped:]]


class Fork(NamedTuple):
    """A forced promotion: the epoch that it began, and the mark to which it cut the log."""

    epoch: int
    before: Mark


@dataclass(eq=False)
class StoreLog:
    """What a store has: `durable` is synced, `commit` is known to be committed, `applied` is in topics and segments.

    `manifest` is the record up to which the manifest and all synced segments hold. The manifest keeps `forks`, all that
    the log has, because the journal may not reach back to them. A `partial` store lacks data that it
    has dropped or not copied yet; it never becomes live.
    """

    store: Store
    index: Index
    durable: int
    commit: int
    applied: int
    manifest: Mark
    partial: bool = False
    forks: tuple[Fork, ...] = ()
    named: int = 0
    """The largest commit index in the records, which a restart would find."""
    pair: bytes = b""
    """The id of the pair; empty for a log that was not copied yet."""

    @classmethod
    def open(
        cls,
        store: Store,
        manifest: Mark,
        base: Mark,
        records: Iterable[LogRecord],
        noted: int = 0,
        forks: Iterable[Fork] = (),
        *,
        partial: bool = False,
        pair: bytes = b"",
    ) -> StoreLog:
        """The log of a store as it was found: everything in its journal is durable once it was opened.

        `base` is the mark before the first record of its journal, `noted` the commit index that was noted by itself,
        `forks` and `pair` are those of the manifest. Raises StorageError if the records are no chain.
        """
        log = cls(store, Index(base), 0, 0, manifest.lsn, manifest, partial, tuple(forks), pair=pair)
        found = list(records)
        for record in found:
            log.append(record)
        log.durable, log.commit = log.index.end.lsn, shown_end(manifest, found, noted)
        return log

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written to this log, but for the mark with which a pair is founded."""
        return self.index.end.epoch == 0 and self.index.end.lsn <= FOUNDED_EMPTY

    def append(self, record: LogRecord) -> None:
        """Add the next record. Raises StorageError if it is not the next one."""
        if not follows(self.index.end, record):
            raise StorageError(f"record {record.mark} does not follow {self.index.end}: open the log again")
        self.add(record)

    def add(self, record: LogRecord) -> None:
        """Add a record that was made after the end."""
        fork = Fork(record.mark.epoch, self.index.end)
        if record.kind is Kind.FORCED and fork not in self.forks:
            self.forks = (*self.forks, fork)
        self.index.add(record)
        self.named = max(self.named, record.commit)

    def cut(self, lsn: int) -> None:
        """Forget the records after an lsn."""
        self.index.cut(lsn)
        self.named = min(self.named, lsn)
        self.durable = min(self.durable, lsn)
        self.forks = tuple([fork for fork in self.forks if fork.before.lsn < lsn])

    def is_beyond_a_fork(self, mark: Mark) -> bool:
        """Whether a store with this mark has records that a forced promotion has cut off this log."""
        return any(mark.epoch < fork.epoch and mark.lsn > fork.before.lsn for fork in self.forks)

    def mark_at(self, lsn: int) -> Mark:
        """The mark at an lsn that the index has. Raises StorageError if it has not."""
        if (mark := self.index.mark(lsn)) is None:
            raise StorageError(f"the journal has no record {lsn}: open the log again")
        return mark
