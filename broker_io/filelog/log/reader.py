"""Readers of the embedded log: blocks of a segment in order, messages of a topic, first and last positions and times.

The owner of the log and other processes read with the same code; what differs is in the subclasses of `ReadingBroker`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from broker_io.batch import PlacedBatch, Width
from broker_io.block import (
    HEADER_BYTES,
    BadBlock,
    RawBlock,
    decode_blocks,
    decode_entries,
    decode_publish_times,
    open_block,
    parse_header,
    property_names,
)
from broker_io.compaction import CompactionState, StoredDigests
from broker_io.environment import Environment, Mutex, ReadableFile
from broker_io.errors import (
    Closed,
    Damaged,
    Error,
    LogRestored,
    PositionTrimmed,
    TopicNotFound,
    UnsupportedFormat,
    disk_error,
)
from broker_io.filelog.log import layout
from broker_io.filelog.log.layout import LedgerEntry, TopicEntry, damage_at, readable
from broker_io.filelog.log.recovery import missing_segment
from broker_io.filelog.log.segment import (
    CHUNK_BYTES,
    FIRST_CHUNK_BYTES,
    UNFINISHED,
    headers,
    read_block,
    verified_index,
)
from broker_io.key_digest import KeyDigest
from broker_io.port import MAX_MESSAGE_BYTES, Ledger, Resource
from broker_io.position import EARLIEST, LATEST, NO_INDEX, Position, Positions

Answer = TypeVar("Answer")

TAKE_BYTES = 16 * 1024 * 1024
"""Bytes of blocks that are decoded together, so that large messages don't fill the memory."""
TORN_TAIL_SECONDS = 1.0
"""Seconds after which bytes at the end of a live segment that are not a block count as damage."""
REPAIR_HINT = "if the owner of the log is gone, open it for writing once: that repairs an unclean end"


class TornTail(NamedTuple):
    """Bytes at the end of a segment that another process writes, which are not a block, or not yet."""

    offset: int
    data: bytes
    what: str


class BlockStream:
    """Reads the whole blocks of a ledger from that of an entry on.

    `torn_tail` says why it stopped before the end of the file.
    The file is opened at the first read. Every call may raise OSError.
    """

    def __init__(self, broker: ReadingBroker, topic: TopicEntry, ledger: LedgerEntry, entry: int) -> None:
        self.path = layout.segment_path(broker.directory, topic, ledger)
        self.torn_tail: TornTail | None = None
        self._open_file = partial(broker.segment, topic, ledger)
        self.file: ReadableFile | None = None
        """The file, if it is open."""
        self._place = topic.place(ledger)
        self._first_entry = entry
        self._data = b""
        self._base = 0
        self._at = 0
        self._chunk = FIRST_CHUNK_BYTES
        if entry:
            with closing(self._open_file()) as file:
                index = verified_index(broker.environment.disk, file, self.path, ledger.bytes, entry)
            known = index.at_entry(entry)
            self._base = 0 if known is None else known.offset

    @property
    def offset(self) -> int:
        """The offset of the next block."""
        return self._base + self._at

    def take(self, limit: int, end: int, settled: int) -> list[RawBlock]:
        """Blocks of up to `limit` messages, but at least one block, or all below offset `end`.

        At most about `TAKE_BYTES`, and no wider than `Width` allows.

        Bytes below `settled` that are not a whole block are Damaged; from there on they may be a block that is still
        being written.
        """
        blocks: list[RawBlock] = []
        size, width = 0, Width()
        self.torn_tail = None
        try:
            while (
                size < TAKE_BYTES
                and not width.full
                and (block := self._next(end, settled, limit - width.rows if blocks else None)) is not None
            ):
                blocks.append(block)
                width.add(property_names(block), block.header.rows)
                size += len(block.part) + len(block.values)
        except (Damaged, UnsupportedFormat) as error:
            # The blocks before it are good; the next call raises the error.
            if not blocks:
                raise (
                    error
                    if isinstance(error, Damaged)
                    else UnsupportedFormat(f"{self.path}, offset {self.offset}: {error}")
                ) from None
        return blocks

    def _next(self, end: int, settled: int, most: int | None) -> RawBlock | None:
        """The next block; None if it has more than `most` messages, or at the end.

        What was read ahead may be after the end: the log was replaced by an older copy since.
        """
        while self.offset < end and (
            len(self._data) - self._at >= HEADER_BYTES or self._fill(HEADER_BYTES, end, settled)
        ):
            size = HEADER_BYTES
            try:
                header = parse_header(self._data, self._at, self._place)
                size = header.length
                if len(self._data) - self._at < size and not self._fill(size, end, settled):
                    return None
                if header.first_entry + header.span > self._first_entry:
                    if most is not None and header.rows > most:
                        return None
                    block = open_block(self._data, self._at, header)
                    self._at += size
                    return block
            except BadBlock as error:
                self._fail(str(error), size, settled)
                return None
            self._at += size
        return None

    def _fill(self, need: int, end: int, settled: int) -> bool:
        """Read a chunk from the next block on; return whether it has at least `need` bytes."""
        offset = self.offset
        size = min(max(self._chunk, need), end - offset)
        with readable(self.path):
            self._data = self._opened().read(offset, size) if size > 0 else b""
        self._base, self._at = offset, 0
        if len(self._data) == self._chunk:
            self._chunk = min(2 * self._chunk, CHUNK_BYTES)
        if len(self._data) >= need:
            return True
        if offset < settled:
            raise Damaged(self.path, offset, f"a block ends after {len(self._data)} bytes instead of {need}")
        self._data = b""
        return False

    def _fail(self, what: str, size: int, settled: int) -> None:
        offset = self.offset
        if offset < settled:
            raise Damaged(self.path, offset, what)
        self.torn_tail = TornTail(offset, self._data[self._at : self._at + size], what)
        self._data, self._base, self._at = b"", offset, 0

    def unread(self) -> bool:
        """Whether there are bytes after the last block that was taken."""
        return self._opened().size() > self.offset

    def _opened(self) -> ReadableFile:
        if self.file is None:
            self.file = self._open_file()
        return self.file

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self.file is not None:
            self.file.close()
        self.file = None


MAX_OPEN_FILES = 64
"""Files that the readers of one broker keep open between reads; above this limit each read opens and closes its own."""


class OpenFiles:
    """Count of the files that readers keep open."""

    def __init__(self, mutex: Mutex) -> None:
        self._count = 0
        self._mutex = mutex

    def take(self) -> bool:
        """Count one more file, if that is allowed."""
        with self._mutex:
            if self._count >= MAX_OPEN_FILES:
                return False
            self._count += 1
            return True

    def give_back(self) -> None:
        with self._mutex:
            self._count -= 1


SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.010
ENDLESS = 2**62


class FileReader(Resource):
    """Reads a topic from a position on; belongs to one thread at a time."""

    def __init__(self, broker: ReadingBroker, topic: TopicEntry, start: Position, *, inclusive: bool) -> None:
        self._broker = broker
        self._seen = topic
        self._earliest = start == EARLIEST
        self._passed: tuple[int, int] | None = None
        """A ledger and how many of its messages were read or passed over: those must be in the history of the topic."""
        if start == EARLIEST:
            self._ledger, self._entry = topic.floor
        elif start >= LATEST:
            last = broker.grown(topic).ledgers[-1]
            self._passed = self._ledger, self._entry = last.ledger, last.entries
        else:
            at_start = inclusive and start.batch <= NO_INDEX
            self._ledger, self._entry = start.ledger, max(start.entry if at_start else start.entry + 1, 0)
            if not at_start:
                self._passed = self._ledger, self._entry
        self._stream: BlockStream | None = None
        self._reading: LedgerEntry | None = None
        self._rest: PlacedBatch | None = None
        self._torn_tail: tuple[TornTail, float] | None = None
        self._offline: object | None = None
        self._closed = False
        self._holds_file = False
        self._check_floor(topic)
        self._check_history(topic)

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        clock = self._broker.environment.clock
        deadline = clock.monotonic() + timeout
        pause = SHORTEST_PAUSE
        while True:
            try:
                batch = self._next(max(limit, 1))
            except (Damaged, UnsupportedFormat) as error:
                if self._broker.note_damage(error, "" if self._stream is None else self._stream.path):
                    self._close_stream()  # the file may be another one once it is repaired
                raise
            finally:
                self._release_file()
            if batch is not None:
                return batch
            remaining = deadline - clock.monotonic()
            # A torn tail is no end: even a read without a timeout waits until it is a block or damage.
            if remaining <= 0 and self._torn_tail is None:
                return None
            self._broker.wait(self._seen, pause, remaining if remaining > 0 else pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _next(self, limit: int) -> PlacedBatch | None:
        """The messages that are there now. Raises as `read` does."""
        if self._closed:
            raise Closed(f"the reader of topic {self._seen.name!r} was closed: open another")
        while True:
            topic = self._seen = self._broker.numbered(self._seen.number, self._seen.name)
            self._check_floor(topic)
            self._check_history(topic)
            try:
                return self._next_of(topic, limit)
            except FileNotFoundError as error:
                # Trimmed or rewritten meanwhile, or missing though the log still names it.
                self._close_stream()
                missing = self._broker.missing(error)
                if self._broker.numbered(topic.number, topic.name) is topic:
                    raise missing from None
            except OSError as error:
                raise disk_error(error, self._broker.directory, "the topic can't be read") from error

    def _next_of(self, topic: TopicEntry, limit: int) -> PlacedBatch | None:
        while self._rest is None:
            ledger = topic.find(self._ledger)
            if ledger is None or not self._fill(self._enter(topic, ledger), topic, ledger, limit):
                return None
        batch, self._rest = self._rest.split(limit)
        self._earliest = False
        self._entry = int(batch.positions.entries[-1]) + 1
        return batch

    def _check_floor(self, topic: TopicEntry) -> None:
        if (self._ledger, self._entry) >= topic.floor:
            return
        if not self._earliest:
            raise PositionTrimmed(
                f"topic {topic.name!r}: the messages from {self._ledger}:{self._entry} on were trimmed, "
                f"the log begins after {topic.floor[0]}:{topic.floor[1] - 1}: start from EARLIEST or from a snapshot"
            )
        self._close_stream()
        self._ledger, self._entry = topic.floor

    def _check_history(self, topic: TopicEntry) -> None:
        if self._passed is not None and not topic.has_had(*self._passed):
            ledger, entries = self._passed
            raise LogRestored(
                f"topic {topic.name!r} lacks messages before {ledger}:{entries}, which this reader has passed: its log "
                "was restored from an older copy, or a forced promotion of a pair has cut it; check what your program "
                "must undo, and open a new reader from the beginning or from a position that the log has"
            )

    def _enter(self, topic: TopicEntry, ledger: LedgerEntry) -> BlockStream:
        """The blocks of a ledger from the next entry on."""
        if ledger.ledger > self._ledger:
            self._close_stream()
            self._ledger, self._entry = ledger.ledger, 0
        if self._stream is None or self._reading is None or self._reading[:2] != ledger[:2]:
            self._close_stream()
            self._stream = BlockStream(self._broker, topic, ledger, self._entry)
            self._reading = ledger
        return self._stream

    def _fill(self, stream: BlockStream, topic: TopicEntry, ledger: LedgerEntry, limit: int) -> bool:
        """Read the next messages of a ledger; False if there are none now."""
        closed = ledger is not topic.ledgers[-1]
        live = self._broker.read_only and not closed
        blocks = stream.take(limit, ENDLESS if live else ledger.bytes, ledger.bytes)
        if not blocks:
            if not closed:
                return live and self._continues_in_journal(stream)
            self._close_stream()
            self._passed = self._ledger, ledger.entries
            self._ledger, self._entry = self._ledger + 1, 0
            return True
        with damage_at(stream.path, stream.offset):
            decoded = decode_blocks(blocks)
        count = len(decoded.entries)
        ledgers, indexes = np.full(count, self._ledger, np.int64), np.full(count, NO_INDEX, np.int64)
        batch = PlacedBatch(Positions(ledgers, decoded.entries, indexes), decoded.publish_times, decoded.messages)
        if decoded.entries[0] < self._entry:
            batch = batch.take(decoded.entries >= self._entry)
        self._passed = self._ledger, int(decoded.entries[-1]) + 1
        self._rest = batch if len(batch) else None
        return True

    def _continues_in_journal(self, stream: BlockStream) -> bool:
        """Whether to continue after the end of the open ledger with the journal, because the log has no owner.

        Raises Damaged for bytes that can't become a block.
        """
        unread = stream.unread()
        offline = self._broker.offline_journal()
        if offline is None:
            self._check_torn_tail(stream)
            return False
        if offline is not self._offline:
            self._close_stream()
            self._offline = offline
            return True
        if unread:
            what = UNFINISHED if stream.torn_tail is None else stream.torn_tail.what
            raise Damaged(stream.path, stream.offset, f"{what}; {REPAIR_HINT}")
        return False

    def _check_torn_tail(self, stream: BlockStream) -> None:
        """Raise Damaged for bytes that were not a block for too long."""
        clock = self._broker.environment.clock
        if stream.torn_tail is None:
            self._torn_tail = None
        elif self._torn_tail is None or self._torn_tail[0] != stream.torn_tail:
            self._torn_tail = stream.torn_tail, clock.monotonic()
        elif clock.monotonic() - self._torn_tail[1] >= TORN_TAIL_SECONDS:
            raise Damaged(stream.path, stream.torn_tail.offset, f"{stream.torn_tail.what}; {REPAIR_HINT}")

    def _release_file(self) -> None:
        """Close the file unless this reader may keep it open until the next read."""
        if self._stream is not None and self._stream.file is not None and not self._holds_file:
            self._holds_file = self._broker.open_files.take()
            if not self._holds_file:
                self._stream.close()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._holds_file:
            self._broker.open_files.give_back()
            self._holds_file = False
        self._stream = self._reading = self._rest = self._torn_tail = None

    def close(self) -> None:
        self._close_stream()
        self._closed = True


class ReadingBroker(Resource):
    """The half of the broker port that reads, and what its readers need to know of the log.

    `read_only`: this process does not own the log, so the open ledger of a topic may be longer than its entry says.
    """

    read_only: ClassVar[bool]

    def __init__(self, environment: Environment, directory: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.environment = environment
        self.directory = directory
        self.max_message_bytes = max_message_bytes
        self.open_files = OpenFiles(environment.threads.lock())
        self.closed = False

    # --- the log ---

    @property
    def seed(self) -> int:
        """The seed of the key hashes, a secret of the log."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises Closed."""
        if self.closed:
            raise Closed(f"the log {self.directory} was closed in this process: open it again")

    def topics(self) -> list[str]:
        raise NotImplementedError

    def named(self, name: str) -> TopicEntry:
        """Raises TopicNotFound or Closed."""
        raise NotImplementedError

    def current(self, number: int) -> TopicEntry | None:
        """The current state of a topic; None if it was deleted."""
        raise NotImplementedError

    def numbered(self, number: int, name: str) -> TopicEntry:
        """The current state of a topic. Raises TopicNotFound if it was deleted since, or Closed."""
        self.check()
        topic = self.current(number)
        if topic is None:
            raise TopicNotFound(
                f"topic {name!r} of {self.directory} was deleted while it was read: open another reader"
            )
        return topic

    def grown(self, topic: TopicEntry) -> TopicEntry:
        """The topic with the current length of its open ledger."""
        return topic

    def segment(self, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """Open the file of a ledger for reading. Raises OSError."""
        return self.environment.disk.open(layout.segment_path(self.directory, topic, ledger))

    def missing(self, error: FileNotFoundError) -> Error:
        """The error for a file that could not be opened, if the log still names it after this call."""
        return missing_segment(str(error.filename))

    def note_damage(self, error: Error, path: str = "") -> bool:
        """Note an error about a file, which a Damaged names itself; whether this process looks after that file."""
        return False

    def offline_journal(self) -> object | None:
        """The journal of a log without an owner, the same object until it changes; None if the log has an owner."""
        return None

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        """Wait until the topic may have changed, or for `remaining` seconds, polling every `pause`."""
        del seen
        self.environment.clock.sleep(min(pause, remaining))

    # --- the port ---

    def incarnation(self, topic: str) -> str:
        return self.named(topic).incarnation

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> FileReader:
        """As the port. Compaction rewrites the log itself, so `compacted` makes no difference."""
        del compacted
        return self._ask(topic, lambda entry: FileReader(self, entry, start, inclusive=inclusive))

    def ledgers(self, topic: str) -> list[Ledger]:
        entry = self._ask(topic, self.grown)
        newest, original = entry.ledgers[-1], entry.original
        return [
            Ledger(one.ledger, one.entries, one.bytes, closed=one is not newest, original=one.ledger == original)
            for one in entry.ledgers
        ]

    def compaction(self, topic: str) -> CompactionState:
        """See `CompactionStateBroker`."""
        return self.named(topic).compaction

    def key_digests(self, topic: str) -> StoredDigests:
        """See `DigestingBroker`."""
        entry = self.named(topic)
        digests = {one.ledger: KeyDigest(self.seed, int(one.digest, 16)) for one in entry.ledgers if one.digest}
        return StoredDigests(entry.compaction.cleaned, digests)

    def first_position(self, topic: str) -> Position | None:
        with self.reader(topic) as reader:
            batch = reader.read(limit=1)
        return None if batch is None else batch.positions.first

    def last_position(self, topic: str) -> Position | None:
        entry = self._ask(topic, self.grown)
        for ledger in reversed(entry.ledgers):
            if ledger.entries:
                return Position(ledger.ledger, ledger.entries - 1)
        return Position(entry.floor[0], entry.floor[1] - 1) if entry.floor[1] else None

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return self._ask(topic, lambda entry: self._position_at(self.grown(entry), time_ms))

    def _position_at(self, topic: TopicEntry, time_ms: int) -> Position | None:
        filled = [ledger for ledger in topic.ledgers if ledger.bytes]
        older = [index for index, ledger in enumerate(filled) if ledger.first_time < time_ms]
        for ledger in filled[older[-1] if older else 0 :]:
            entry = self._entry_at(topic, ledger, time_ms)
            if entry is not None:
                return Position(ledger.ledger, entry)
        return None

    def _entry_at(self, topic: TopicEntry, ledger: LedgerEntry, time_ms: int) -> int | None:
        path = layout.segment_path(self.directory, topic, ledger)
        with closing(self.segment(topic, ledger)) as file:
            index = verified_index(self.environment.disk, file, path, ledger.bytes, time_ms=time_ms)
            known = index.before_time(time_ms)
            older = newer = None
            for found in headers(file, path, 0 if known is None else known.offset, ledger.bytes, topic.place(ledger)):
                if found.header.publish_time >= time_ms:
                    newer = found
                    break
                older = found
            if older is not None:
                # Later messages of this block may have been published at the time.
                block, counts = read_block(file, path, older, values=False), [older.header.rows]
                with damage_at(path, older.offset):
                    late = np.flatnonzero(decode_publish_times([block], counts) >= time_ms)
                    if len(late):
                        return int(decode_entries([block], counts)[late[0]])
        return None if newer is None else newer.header.first_entry

    def _ask(self, topic: str, query: Callable[[TopicEntry], Answer]) -> Answer:
        """The answer to a query about a topic; retried if its files were trimmed or rewritten meanwhile."""
        try:
            return self._answer(topic, query)
        except Damaged as error:
            self.note_damage(error)
            raise

    def _answer(self, topic: str, query: Callable[[TopicEntry], Answer]) -> Answer:
        while True:
            entry = self.named(topic)
            try:
                return query(entry)
            except FileNotFoundError as error:
                missing = self.missing(error)
                if self.named(topic) is entry:
                    raise missing from None
            except OSError as error:
                raise disk_error(error, self.directory, "the topic can't be read") from error
