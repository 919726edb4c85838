"""Readers of committed records

`CommittedReader` reads the snapshot topic and the logs directly, in any process.

A follower reads one topic, from any position: visible records in log order, with their seqnos. The log is applied from
the position of the snapshot on, which may be after the position where reading starts: what is before it is read from
the log a second time, by the visibility of the buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from broker_io.batch import PlacedBatch
from broker_io.environment import Clock, current
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker, Resource, messages_after
from broker_io.position import NO_INDEX
from snapshots.errors import SnapshotMissing
from snapshots.format import reaches
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.buffer.visibility import reader_floor
from txnbuffer.checks import check_flag, check_limit, check_wait
from txnbuffer.client import lifecycle
from txnbuffer.client.reading.records import Record, RecordBatch, UnreadRecords
from txnbuffer.client.reading.starts import ReadTopics, Start, StartPoint, start_point
from txnbuffer.client.serializers import Deserializer, DeserializerChoice, Deserializers
from txnbuffer.errors import InvalidRequest, ProtocolStopped, ReplayStalled
from txnbuffer.follow import LogFollower, RecordFollower, VisibleRecords, held_back, unpacked
from txnbuffer.model import EARLIEST, Position, TxnId
from txnbuffer.protocol import any_transactional
from txnbuffer.recordset import TOGETHER, rows_within, without_content
from txnbuffer.recovery.restore import LOST, LoadedTopic, load

LOG = logging.getLogger("txnbuffer.client")

MAX_WAIT = 10.0
"""Seconds to wait for a message that was already read once."""

ATTEMPTS = 5
"""How many times a reader starts, if the log is trimmed between loading the snapshot and opening the log."""

MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Approximate bytes of undecided messages kept in memory for a topic; beyond it they are read from the log again."""


class CommittedFollower:
    """One topic of a reader: its committed records in log order, each with its seqno.

    `first_seqno`: that of the first visible record of the log where the log was opened, which is at or before the
    start; None if unknown.
    """

    def __init__(self, broker: Broker, topic: str, start: StartPoint, deserializer: Deserializer | None = None) -> None:
        self.topic = topic
        self._broker = broker
        self._deserializer = deserializer
        self._start = start
        self.first_seqno: int | None = None
        self._attempts = ATTEMPTS - 1
        self._opened = False
        self._delivered = False
        self._stopped: Error | None = None
        self._blocked = False
        self._rest: RecordBatch | None = None
        self._unapplied: PlacedBatch | None = None
        self._open()

    def _open(self) -> None:
        """Load the snapshot and open the log; retry while attempts are left if the log was trimmed in between."""
        while True:
            loaded = load(self._broker, self.topic)
            self._registered = loaded.registered
            self._first_ledger = loaded.first_ledger
            seqno, self._at = loaded.anchor(self._start.position)
            if not loaded.registered:
                self._at = loaded.resume
            try:
                self._check_start()
                if self._start.seqno:
                    seqno, self._at = self._place_of(self._start.seqno, loaded)
                self._log = self._follow(loaded)
            except PositionTrimmed:
                if not self._attempts:
                    raise
                self._attempts -= 1
            else:
                self._log.next_seqno = self.first_seqno = seqno
                self._opened = True
                return

    def _follow(self, loaded: LoadedTopic) -> RecordFollower:
        log = RecordFollower(self._broker, self.topic, loaded.buffer, loaded.resume, decided_after=self._at)
        log.open()
        log.held_limit = MAX_BUFFERED_BYTES
        return log

    def _check_start(self) -> None:
        """Raises PositionTrimmed if records after the start were trimmed: continuing would skip them."""
        start = self._start.position
        if start > EARLIEST and start.ledger < self._first_ledger:
            with self._broker.reader(self.topic, start._replace(batch=NO_INDEX)) as reader:
                reader.read(limit=1)

    def _place_of(self, seqno: int, loaded: LoadedTopic) -> tuple[int, Position]:
        """The nearest known place at or before a seqno, as `anchor`. Raises InvalidRequest, PositionTrimmed."""
        known = loaded.known_seqnos()
        if not known:
            raise InvalidRequest(f"topic {self.topic!r} has no seqnos yet: start at a position or at a time")
        usable = [(first, at) for at, first in known if first <= seqno]
        if not usable:
            first = min(first for _, first in known)
            raise PositionTrimmed(
                f"topic {self.topic} begins at seqno {first}: seqno {seqno} was trimmed; start at the beginning"
            )
        return max(usable)

    @property
    def next_position(self) -> Position:
        """The last position that was delivered; delivery continues after it."""
        return self._at if self._delivered else max(self._at, self._start.before)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The newest epoch of each coordinator whose markers were read."""
        return tuple(state.epoch for state in self._log.buffer.coordinators.values())

    @property
    def decided_position(self) -> Position:
        """The position up to which all visible records can be returned."""
        return self._log.buffer.max_read_position or EARLIEST

    def held_back(self) -> HeldBack | None:
        """Return what an open transaction holds back, of what was read."""
        buffer = self._log.buffer
        oldest = None if buffer.replaying else buffer.ongoing.oldest()
        return None if oldest is None else held_back(self._broker, self.topic, oldest, buffer.applied)

    def poll(self, limit: int) -> RecordBatch | None:
        """Return 1 to `limit` visible records without waiting; None if there are none."""
        while self._rest is None:
            visible = self._next_visible(limit) if self._opened and not self._blocked else None
            if visible is not None:
                self._take(visible)
            elif self._stopped is not None:
                raise self._stopped.with_traceback(None)
            else:
                return None
        self._rest.prepare()
        records, self._rest = self._rest, None
        if len(records) > limit:
            self._rest = records.take(slice(limit, None))
            records = records.take(slice(limit))
        return records

    def advance(self, timeout: float) -> bool:
        """Read more of the log, waiting up to `timeout` seconds; return whether there was more."""
        if not self._opened:
            self._open()
            return True
        try:
            placed = None if self._stopped is not None else self._unapplied or self._log.fetch(timeout)
        except PositionTrimmed as error:
            self._restart(error)
            return True
        if placed is None:
            return False
        self._unapplied = None
        if not self._registered and any_transactional(placed.messages):
            try:
                if not self._learn_state():
                    return True  # the messages are read again
            except Error as error:
                if error.retryable:
                    self._unapplied = placed  # the next read retries it
                    raise
                self._stopped, self._blocked = error, True
                return True
        try:
            self._log.apply(placed)
        except ProtocolStopped as error:
            self._stopped = error
        if placed.positions.first.ledger > self._first_ledger:
            self._forget_trimmed()
        return True

    def close(self) -> None:
        self._log.close()

    def _restart(self, error: PositionTrimmed) -> None:
        """Restart at the new beginning of the log, if no record was delivered yet. Raises `error` otherwise."""
        if self._delivered or not self._attempts:
            raise error
        self._attempts -= 1
        self.close()
        self._opened = False  # if this fails, the next read retries it
        self._open()

    def _take(self, visible: VisibleRecords) -> None:
        """Keep the records after the start for `poll`. A record set that cannot be unpacked stops the topic."""
        records, seqnos, last, broken = visible
        self._delivered = True
        if broken is None:
            self._at = last
        else:
            self._stopped, self._blocked = broken, True
            self._at = records.positions.last if len(records) else self._at
        first = self._start.first_of(records, seqnos)
        if len(records) > first:
            self._rest = RecordBatch.of(self.topic, records, seqnos, self._deserializer).take(slice(first, None))
            self._start = StartPoint(EARLIEST)

    def _learn_state(self) -> bool:
        """Load the state of a topic whose first transactions appear; return whether the log continues as it was read.

        A topic gets its first snapshot before its first transaction. If it had transactions before, its snapshot was
        not found when the reader started, and has more than this buffer. Raises SnapshotMissing if there is none, and
        the errors of reading the snapshot and the log.
        """
        loaded = load(self._broker, self.topic)
        if not loaded.registered:
            raise SnapshotMissing(self.topic, LOST)
        log = self._log
        continues = reaches(log.at, loaded.resume)
        if continues:
            with LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume) as newest:
                newest.replay(log.at, exactly=True, timeout=MAX_WAIT)
            log.buffer = loaded.buffer
        else:
            log = self._follow(loaded)
        seqno, at = loaded.anchor(Position(self._at.ledger, self._at.entry + 1))
        if seqno is not None:
            try:
                seqno += log.count_visible(at, self._at, timeout=MAX_WAIT)
            except Error:
                if not continues:  # the next read begins with the log as it was
                    log.close()
                raise
        if not continues:
            self._log.close()
        self._log, log.next_seqno = log, seqno
        self._registered = True
        return continues

    def _next_visible(self, limit: int) -> VisibleRecords | None:
        while True:
            try:
                return self._log.take_visible(limit)
            except PositionTrimmed as error:
                self._restart(error)

    def _forget_trimmed(self) -> None:
        """Drop aborts whose ledgers were trimmed: replace the buffer by one loaded from the newest snapshot.

        A sealed segment keeps no ids in memory, and the owner may have deleted its entry, so the aborts cannot be
        removed one by one. Do nothing while the next record to deliver is in a trimmed ledger.
        """
        self._first_ledger = self._broker.ledgers(self.topic)[0].ledger
        floor = reader_floor(self._first_ledger, self._at)
        parts = self._log.buffer.segments.summaries
        if not parts or parts[0].last_ledger >= floor or floor < self._first_ledger:
            return
        loaded = load(self._broker, self.topic)
        target = self._log.buffer.applied
        with LogFollower(self._broker, self.topic, loaded.buffer, loaded.resume) as newest:
            try:
                newest.replay(target, exactly=True, timeout=MAX_WAIT)
            except ReplayStalled:
                return
        if loaded.buffer.applied == target:
            self._log.buffer = loaded.buffer


class UncommittedFollower:
    """One topic of a read_uncommitted reader: all records of the log, also of open and aborted transactions.

    Its methods do what those of CommittedFollower do.
    """

    first_seqno: int | None = None

    def __init__(self, broker: Broker, topic: str, start: StartPoint, deserializer: Deserializer | None = None) -> None:
        if start.seqno:
            raise InvalidRequest("a read_uncommitted reader has no seqnos: start at a position or at a time")
        self.topic = topic
        self._deserializer = deserializer
        self._start = start
        self._stopped: Error | None = None
        # A start inside a record set is inside its message.
        first = start.position
        self._reader = broker.reader(topic, first if first == EARLIEST else first._replace(batch=NO_INDEX))
        self._messages: PlacedBatch | None = None
        self._records: PlacedBatch | None = None
        self._at = self._read_to = start.before

    @property
    def next_position(self) -> Position:
        return self._at

    @property
    def decided_position(self) -> Position:
        return self._read_to

    @property
    def epochs(self) -> tuple[int, ...]:
        return ()

    def held_back(self) -> HeldBack | None:
        return None

    def poll(self, limit: int) -> RecordBatch | None:
        if self._records is None:
            if self._stopped is not None:
                raise self._stopped.with_traceback(None)
            return None
        batch, rest = self._records.take(slice(limit)), self._records.take(slice(limit, None))
        found = RecordBatch.of(self.topic, batch, None, self._deserializer)
        found.prepare()
        self._records = rest if len(rest) else None
        over = self._records is None and self._messages is None and self._stopped is None
        self._at = self._read_to if over else batch.positions.last
        return found

    def advance(self, timeout: float) -> bool:
        if self._stopped is not None or self._records is not None:
            return False
        if self._messages is None:
            placed = self._reader.read(timeout=timeout)
            if placed is None:
                return False
            self._read_to = placed.positions.last
            self._messages = placed.take(~without_content(placed))
        self._unpack(self._messages)
        return True

    def _unpack(self, messages: PlacedBatch) -> None:
        """Unpack the next messages into records, and keep the remaining messages."""
        count = rows_within(messages, TOGETHER)
        self._messages = messages.take(slice(count, None)) if count < len(messages) else None
        records, self._stopped = unpacked(messages.take(slice(count)))
        records = records.take(slice(self._start.first_of(records), None))
        if len(records):
            self._records, self._start = records, StartPoint(EARLIEST)
        elif self._stopped is None and self._messages is None:
            self._at = self._read_to

    def close(self) -> None:
        self._reader.close()


ISOLATIONS = ("read_committed", "read_uncommitted")

PARTITION_CHECK_INTERVAL = 10.0
"""Seconds between checks for new partitions of a topic."""
TOPIC_CHECK_INTERVAL = 0.5
"""Seconds between checks for topics that do not exist yet."""
CLOSED = "the reader is closed: open another one"
SLICE = 0.01
"""Seconds that a reader of several topics waits for one of them before it checks the next."""
IDLE_WAIT = 1.0
"""Seconds of one wait of an iteration without a timeout."""
ONE_BY_ONE = 1_000
"""Records that are read together when they are returned one by one."""


class Lag(NamedTuple):
    """The distance of a reader from the end of one topic's log, in messages.

    Markers and record sets count as one; on a cluster, so do messages that share an entry.

    - `next_position`: where the reader continues.
    - `decided_position`: the reader can return all visible records up to here without waiting for a transaction.
    - `end`: the position of the last message; None if the topic has none.
    - `behind`: the number of messages from `next_position` to `end`.
    - `undecided`: how many of these are after `decided_position`: an earlier transaction is still open, or this reader
      has not read them yet.
    """

    next_position: Position
    decided_position: Position
    end: Position | None
    behind: int
    undecided: int


EndsBy: TypeAlias = Callable[[TxnId], float | None]
"""Says when a transaction is aborted at the latest, in seconds since 1970, in any thread; None if that is unknown."""


def unknown_end(_: TxnId) -> float | None:
    """What readers of logs of other processes know."""
    return None


class CommittedReader(Resource):
    """Reads the committed records of one or more topics, each topic in log order. It needs no running service.

        with open_broker("file:DIR") as broker, CommittedReader(broker, "orders") as reader:
            for batch in reader: ...

    - `topics`: one name or several. The name of a partitioned topic means all its partitions (`T-partition-0` and so
      on). Partitions that are added later are read from their beginning.
    - `start`: "beginning" (or "earliest"); "end" (or "latest"); the Position of the first record to read, or its
      Seqno; or a datetime, for the first record published at or after it (local time if it has no time zone). A mapping
      gives a start for each topic or partition.
    - `isolation`: "read_committed", or "read_uncommitted" for all records in the log, without seqnos.
    - `wait`: if a topic does not exist, wait for it instead of raising TopicNotFound: `read` returns None until there
      is something to read. A topic that is created later is read from its beginning, also with `start="end"`.
    - `deserializers`: decode the values of records: one for all topics, or a mapping with one for each topic.

    Creating a reader restores the transaction state of each topic from its snapshot; reading then replays the log.
    Raises TopicNotFound, PositionTrimmed, InvalidRequest, the errors of damaged snapshots and logs, and UsedAfterFork
    in a forked child.
    """

    def __init__(
        self,
        broker: Broker,
        topics: str | Iterable[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
        wait: bool = False,
        deserializers: DeserializerChoice | Deserializers = None,
        clock: Clock | None = None,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise InvalidRequest(f"isolation must be one of {', '.join(ISOLATIONS)}, got {isolation!r}")
        if not callable(getattr(broker, "reader", None)):
            raise InvalidRequest(f"broker must be the result of open_broker, got {broker!r:.80}")
        self._broker = broker
        self._deserializers = (
            deserializers if isinstance(deserializers, Deserializers) else Deserializers(deserializers)
        )
        self._forked_from = lifecycle.generation()
        self._clock = clock or current().clock
        self._followers: list[CommittedFollower | UncommittedFollower] = []
        self._turn = 0
        self._unread: UnreadRecords | None = None
        self._closed = False
        self._warned: dict[str, TxnId] = {}
        self.ends_by: EndsBy = unknown_end
        self._kind = CommittedFollower if isolation == "read_committed" else UncommittedFollower
        self._read_topics = ReadTopics(broker, topics, start, wait=check_flag(wait, "wait"))
        try:
            self._followers += self._opened(self._read_topics.first())
        except BaseException:
            self.close()
            raise
        self._check_at = self._next_check()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """Its topics and its state, for `repr`."""
        return f"of {', '.join(map(repr, self._read_topics.names))}, {'closed' if self._closed else 'open'}"

    def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """Return the next 1 to `limit` visible records of one topic; None if there are none within `timeout` seconds.

        Raises PositionTrimmed if the next records were trimmed, and the error that stopped a topic.
        """
        check_limit(limit)
        lifecycle.check(self._forked_from)
        deadline = self._clock.monotonic() + check_wait(timeout)
        self._check_open()
        if self._unread:
            return self._unread.take(limit)
        while True:
            self._add_topics()
            for _ in self._followers:
                follower = self._followers[self._turn]
                self._turn = (self._turn + 1) % len(self._followers)
                if (batch := follower.poll(limit)) is not None:
                    return batch
            if sum(follower.advance(0.0) for follower in self._followers):
                continue
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return None
            if not self._followers:  # no topic or partition exists yet
                self._clock.sleep(min(left, SLICE))
                continue
            alone = len(self._followers) == 1 and not self._read_topics.missing
            self._followers[self._turn].advance(left if alone else min(left, SLICE))
            self._turn = (self._turn + 1) % len(self._followers)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(CLOSED)

    def _opened(self, topics: list[tuple[str, Start]]) -> list[CommittedFollower | UncommittedFollower]:
        """Followers of topics at their starts; if one cannot be opened, the others are closed."""
        followers: list[CommittedFollower | UncommittedFollower] = []
        try:
            for topic, start in topics:
                point = start_point(self._broker, topic, start)
                followers.append(self._kind(self._broker, topic, point, self._deserializers.of(topic, self._broker)))
        except BaseException:
            for follower in followers:
                follower.close()
            raise
        return followers

    def _next_check(self) -> float:
        interval = TOPIC_CHECK_INTERVAL if self._read_topics.missing else PARTITION_CHECK_INTERVAL
        return self._clock.monotonic() + interval

    def _add_topics(self) -> None:
        """Start reading new topics and partitions. If one cannot be opened now, the next check tries again."""
        if not self._read_topics.may_grow or self._clock.monotonic() < self._check_at:
            return
        self._check_at = self._next_check()
        try:
            self._followers += self._opened(self._read_topics.added({follower.topic for follower in self._followers}))
        except Error as error:
            if not error.retryable:
                raise

    def records(self, *, timeout: float | None = None) -> Iterator[Record]:
        """Yield the records one by one. A later call continues after the last one that was yielded.

        Ends when nothing has come for `timeout` seconds, and logs a warning if an open transaction holds back more
        (`held_back`); None: has no end. Raises as `read`, and UndecodableValue for a
        record whose value cannot be decoded: another call continues with the record after it.
        """
        while True:
            if not self._unread:
                batch = self.read(limit=ONE_BY_ONE, timeout=IDLE_WAIT if timeout is None else timeout)
                if batch is None and timeout is not None:
                    self.warn_of_held_back()
                    return
                self._unread = None if batch is None else UnreadRecords(batch)
            else:
                yield self._unread.next()

    def batches(self, *, limit: int = 10_000, timeout: float | None = None) -> Iterator[RecordBatch]:
        """Yield batches of up to `limit` records of one topic each.

        Ends as `records`. Raises as `read`.
        """
        while True:
            if (batch := self.read(limit=limit, timeout=IDLE_WAIT if timeout is None else timeout)) is not None:
                yield batch
            elif timeout is not None:
                self.warn_of_held_back()
                return

    def __iter__(self) -> Iterator[RecordBatch]:
        """Yield batches without end; leave the loop to stop."""
        return self.batches()

    def seek(self, start: Start | Mapping[str, Start]) -> None:
        """Continue at another place, given as for a new reader; of a mapping, the topics that it lacks do not move.

        Raises as a new reader; then nothing has moved.
        """
        self.move(start)

    def move(self, start: Start | Mapping[str, Start]) -> set[str]:
        """Internal: `seek`; return the topics and partitions that it moved."""
        lifecycle.check(self._forked_from)
        self._check_open()
        moved = {follower.topic: follower for follower in self._opened(self._read_topics.moved(start))}
        for follower in self._followers:
            if follower.topic in moved:
                follower.close()
        known = {follower.topic: moved.get(follower.topic, follower) for follower in self._followers}
        self._followers = [*(known | moved).values()]
        if not isinstance(start, Mapping):
            self._read_topics.start = start
        if self._unread and self._unread.topic in moved:
            self._unread = None
        self._turn = 0
        return {*moved}

    @property
    def epochs(self) -> tuple[int, ...]:
        """The newest epoch of each coordinator whose markers this reader has read."""
        return tuple(epoch for follower in self._followers for epoch in follower.epochs)

    @property
    def first_seqnos(self) -> dict[str, int | None]:
        """By topic: the seqno of the first visible record that the log still had, at or before the start; or None."""
        return {follower.topic: follower.first_seqno for follower in self._followers}

    def lag(self) -> dict[str, Lag]:
        """Return the lag of each topic and partition, by name."""
        self._check_open()
        lags = {}
        for follower in self._followers:
            ledgers = self._broker.ledgers(follower.topic)
            end = self._broker.last_position(follower.topic)
            at, decided = follower.next_position, follower.decided_position
            behind, undecided = (messages_after(ledgers, place, end) for place in (at, max(at, decided)))
            lags[follower.topic] = Lag(at, decided, end, behind, undecided)
        return lags

    def held_back(self) -> list[HeldBack]:
        """Return what this reader has read but does not return yet, because an older transaction is open.

        At most one value for each topic and partition.
        """
        self._check_open()
        return [self._with_end(found) for one in self._followers if (found := one.held_back()) is not None]

    def _with_end(self, found: HeldBack) -> HeldBack:
        ends = self.ends_by(found.txn)
        return found if ends is None else found._replace(until=int(ends * 1000))

    def warn_of_held_back(self) -> None:
        """Internal: log what is held back where the records end, each transaction once."""
        for one in self.held_back():
            if self._warned.get(one.topic) != one.txn:
                self._warned[one.topic] = one.txn
                LOG.warning("%s", one)

    def close(self) -> None:
        """Close the reader. In a forked child this does nothing, because the parent owns the connections and files."""
        if self._forked_from != lifecycle.generation():
            return
        self._closed = True
        for follower in self._followers:
            follower.close()
