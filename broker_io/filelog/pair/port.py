"""The ports of a pair's node: its store, the lock outside, the link to its peer

The node (`broker_io.filelog.pair.node`) gives events to the core (`broker_io.filelog.replication`) and performs the
effects through these ports. It holds its lock only while it calls `send`, `send_copy` and `close` of a link, which
neither wait nor report anything themselves. Events may be reported in any thread, also in one that holds locks of the
port's: all reports return at once, but for those about what has arrived over a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from broker_io.filelog.log.records import Fork, LogRecord, Mark, Store, StoreLog
from broker_io.filelog.replication.lock import LockView, Swap
from broker_io.filelog.replication.messages import (
    BuildEpoch,
    CopyBegin,
    DiskSpace,
    Message,
    ReplacedFiles,
    RewriteFinished,
)
from broker_io.port import Resource


class CopyChunk(NamedTuple):
    """A part of a file of a copy: its name in the directory, the offset of the part, the bytes and their CRC32C.

    The parts of a file come in order, the manifest's last.
    """

    name: str
    offset: int
    data: bytes
    crc: int


class StoreCopy(Resource, Protocol):
    """The files of a primary as of one record; none of them is removed until `close`, which the link calls."""

    @property
    def mark(self) -> Mark:
        """The last record that is in the copy: applied and synced when the copy began."""

    @property
    def forks(self) -> tuple[Fork, ...]: ...

    def __iter__(self) -> Iterator[CopyChunk]:
        """Read and verify the files. Raises Damaged and DiskFailed."""


class CopyReceiver(Resource, Protocol):
    """Writes a copy into a partial store. Closed without `finish`, it leaves a partial store for the next copy."""

    def add(self, chunk: CopyChunk) -> None:
        """Write a part of a file. Raises Damaged if its checksum or place is wrong, and DiskFailed."""

    def finish(self, mark: Mark, forks: tuple[Fork, ...]) -> None:
        """Sync everything and open the log, whose state is that of `mark`; the store stays partial.

        Raises Damaged if the copy is not complete or is that of another record, and DiskFailed.
        """


class StoreEvents(Protocol):
    """What a store reports to its node."""

    def checkpointed(self, mark: Mark) -> None:
        """A manifest is durable; it and all synced segments hold everything up to a mark, which is applied."""

    def post(self, event: ReplacedFiles | RewriteFinished | DiskSpace) -> None:
        """Files that no manifest names any more, which `remove_files` removes; files of a compaction that are here;
        or the disk has crossed the watermark.
        """

    def failed(self, error: Exception) -> None:
        """A write or sync failed in a thread of the store: what is durable is unknown."""

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a prepared file of the peer; blocks. Raises PeerError if there is no link."""


class PairStore(Resource, Protocol):
    """A store: a directory and its engine.

    Three threads call it, each one call at a time: one changes the journal and the files, one applies, and one reads
    for the peer. While `replace` and a receiver are at work nothing is applied, and nothing is read for the peer. No
    call waits for a thread that waits in `Replicator.commit`, which may hold the lock under which records are built.

    All calls raise DiskFailed, after which the node stops.
    """

    def open_log(self, events: StoreEvents) -> StoreLog:
        """Open and lock the directory, once; what it has, after recovery up to the commit mark.

        It reports nothing before it returns.
        """

    # journal and files

    def write(self, records: Sequence[LogRecord], synced: int) -> None:
        """Append records to the journal; they are durable when it returns. `synced` is for their envelopes."""

    def note_commit(self, lsn: int) -> None:
        """Write a commit index by itself, unsynced."""

    def cut(self, lsn: int) -> None:
        """Remove the records after an lsn, durably; none of them is applied."""

    def drop_journal(self, lsn: int) -> None:
        """Remove journal files whose records are all up to an lsn; those of later ones stay."""

    def mark_partial(self, partial: bool) -> None:
        """Set or remove the mark, durably."""

    def replace(self) -> Store:
        """Set the directory aside and begin an empty partial store, durably; its id."""

    def receive(self) -> CopyReceiver:
        """Begin to replace everything in a partial store, the journal too, by a copy."""

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files that were reported as replaced."""

    # state

    def apply(self, lsn: int) -> None:
        """Apply records of the journal up to an lsn, in lanes; a member that is live applies its own.

        Raises PeerError if a prepared file can't be fetched now, TopicNotFound if the primary does not have it any
        more; it is called again, until a copy begins.
        """

    def epoch_content(self, effect: BuildEpoch) -> bytes:
        """The content of the record with which an epoch begins; everything before it is applied."""

    def read(self, first: int, last: int) -> Iterator[LogRecord]:
        """Records after lsn `first` up to `last`, which are durable here, from the files."""

    def begin_copy(self) -> StoreCopy:
        """Write a checkpoint; its files stay until the copy is closed."""

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file that a compaction has prepared, or put in place; fewer at its end. In any thread.

        Raises TopicNotFound if there is no such file any more.
        """


class PairLock(Resource, Protocol):
    """The lock outside. Each call blocks for a few seconds at most. In one thread.

    Raises LockUnavailable: what was asked for may have happened, may still happen, or never happens.
    """

    @property
    def clocked(self) -> bool:
        """Whether the lock ends leases by its own clock."""

    def read(self) -> LockView:
        """The lock as it is after the call began, linearizably."""

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        """Do a swap if `accepts` of the core says so; whether it was done, and the lock after that."""

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        """Renew a session for `ttl` seconds; None if it has ended.

        For None begin a session, which first ends the former one of the store with its lease; its number.
        """

    def end_session(self, session: int) -> None:
        """End a session, and the lease that belongs to it."""


class PairLink(Protocol):
    """A connection of two nodes; keeps the order of what is sent."""

    @property
    def number(self) -> int:
        """A number that no other link of this process has or had."""

    def send(self, message: Message) -> None:
        """Send a message; never blocks. A link that breaks, or can't take more, reports that it is down."""

    def send_copy(self, begin: CopyBegin, copy: StoreCopy) -> None:
        """Send a message, then all chunks of a copy as the peer takes them; never blocks, later messages wait.

        A thread of the link reads the copy, and closes it whatever happens. If reading fails the link breaks.
        """

    def close(self) -> None:
        """Break the link; nothing that has arrived is reported after that."""


class LinkEvents(Protocol):
    """What a transport reports to the node: each link in the order of what arrives."""

    def up(self, link: PairLink) -> None: ...

    def received(self, number: int, message: Message) -> None:
        """A message has arrived; may take as long as it takes to store its records, which slows the peer down."""

    def copy_chunk(self, number: int, chunk: CopyChunk) -> None:
        """A part of a copy has arrived; returns once it is written. Its checksum was not verified yet."""

    def copy_end(self, number: int) -> None: ...

    def down(self, number: int, reason: str) -> None:
        """A link has ended; reported once, also after `close` of the link."""

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        """For `fetch` of the peer: as `PairStore.read_prepared`."""


class Transport(Resource, Protocol):
    """Makes links to the peer, at most one at a time; a newer one ends the one before it.

    The transport itself notices connections over which nothing comes any more; it sends something at least four times
    in the time after which a member counts as silent, copies or not.
    """

    problem: str
    """Why there is no link; empty if there is one, or nothing is known."""

    def start(self, events: LinkEvents, may_accept: Callable[[], bool], may_connect: Callable[[], bool]) -> None:
        """Listen, and connect to the peer, whenever there is no link; repeat refused attempts after 0.25 s at most.

        Raises EnvironmentFault or CallerError if it can't listen.
        """

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file of the peer, on either side of a link.

        Raises PeerError if there is no link or no answer in time.
        """
