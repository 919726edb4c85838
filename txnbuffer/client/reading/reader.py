"""Readers of committed records

`CommittedReader` reads the snapshot topic and the logs directly, in any process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from broker_io.environment import Clock, current
from broker_io.errors import Error
from broker_io.port import Broker, Resource, messages_after
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.checks import check_flag, check_limit, check_wait
from txnbuffer.client import lifecycle
from txnbuffer.client.reading.ends import SLICE, EndingFollower
from txnbuffer.client.reading.followers import CommittedFollower, UncommittedFollower
from txnbuffer.client.reading.records import Decode, Record, RecordBatch, UnreadRecords
from txnbuffer.client.reading.starts import Isolation, ReadTopics, Start, StartPoint, Until, start_point
from txnbuffer.client.serializers import DeserializerChoice, Deserializers, optional
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position, TxnId

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger("txnbuffer.client")

ISOLATIONS = ("read_committed", "read_uncommitted")

PARTITION_CHECK_INTERVAL = 10.0
"""Seconds between checks for new partitions of a topic."""
TOPIC_CHECK_INTERVAL = 0.5
"""Seconds between checks for topics that do not exist yet."""
CLOSED = "the reader is closed: open another one"
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


Follower: TypeAlias = CommittedFollower | UncommittedFollower | EndingFollower


class CommittedReader(Resource):
    """Reads the committed records of one or more topics, each topic in log order. It needs no running service.

        with open_broker("file:DIR") as broker, CommittedReader(broker, "orders") as reader:
            for batch in reader: ...

    - `topics`: one name or several. The name of a partitioned topic means all its partitions (`T-partition-0` and so
      on). Partitions that are added later are read from their beginning.
    - `start`: "beginning" (or "earliest"); "end" (or "latest"); the Position of the first record to read, or its
      Seqno; or a datetime, for the first record published at or after it (local time if it has no time zone). A mapping
      gives a start for each topic or partition.
    - `until`: where the records end; None: nowhere. "now": at the last record that is visible when the reader opens;
      what an open transaction holds back then is not read (`held_back` says it). Or a Position, a Seqno, or a datetime,
      before the first message published at or after it: the reader waits until all records up to there are decided,
      and may be in the future. A mapping gives an end for each topic or partition, "now" for others. Partitions that
      are added later are not read. With "read_uncommitted", "now" is the end of the log.
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
        until: Until | Mapping[str, Until] | None = None,
        isolation: Isolation = "read_committed",
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
        self._followers: list[Follower] = []
        self._turn = 0
        self._unread: UnreadRecords | None = None
        self._closed = False
        self._warned: dict[str, TxnId] = {}
        self.ends_by: EndsBy = unknown_end
        self._committed = isolation == "read_committed"
        self._ends = until is not None
        self._read_topics = ReadTopics(broker, topics, start, until, wait=check_flag(wait, "wait"))
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
            if left <= 0 or (self._ends and self.finished):
                return None
            if not self._followers:  # no topic or partition exists yet
                self._clock.sleep(min(left, SLICE))
                continue
            alone = len(self._followers) == 1 and not self._read_topics.missing
            self._followers[self._turn].advance(left if alone else min(left, SLICE))
            self._turn = (self._turn + 1) % len(self._followers)

    @property
    def finished(self) -> bool:
        """Whether all records up to `until` were read, so that `read` returns None at once, until a `seek`."""
        if not self._ends or self._read_topics.missing or self._unread:
            return False
        return all(isinstance(follower, EndingFollower) and follower.ended for follower in self._followers)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest(CLOSED)

    def _opened(self, topics: list[tuple[str, Start]]) -> list[Follower]:
        """Followers of topics at their starts; if one cannot be opened, the others are closed."""
        followers: list[Follower] = []
        try:
            for topic, start in topics:
                point = start_point(self._broker, topic, start)
                followers.append(self._follower(topic, point))
        except BaseException:
            for follower in followers:
                follower.close()
            raise
        return followers

    def _follower(self, topic: str, start: StartPoint) -> Follower:
        deserializer = self._deserializers.of(topic, self._broker)
        if (until := self._read_topics.until_of(topic)) is not None:
            options = (self._broker, topic, start, until, deserializer, self._clock)
            return EndingFollower(*options, committed=self._committed)
        kind = CommittedFollower if self._committed else UncommittedFollower
        return kind(self._broker, topic, start, deserializer)

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

        Ends at `until` of the reader, or when nothing has come for `timeout` seconds, and logs a warning if an open
        transaction holds back more (`held_back`). Raises as `read`, and UndecodableValue for a
        record whose value cannot be decoded: another call continues with the record after it.
        """
        while True:
            if not self._unread:
                batch = self.read(limit=ONE_BY_ONE, timeout=IDLE_WAIT if timeout is None else timeout)
                if batch is None and (timeout is not None or self.finished):
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
            elif timeout is not None or self.finished:
                self.warn_of_held_back()
                return

    def arrow_batches(
        self, columns: Sequence[str] | None = None, decode: Decode | None = None, *, limit: int = 10_000
    ) -> pa.RecordBatchReader:
        """Return the records up to `until` as an Arrow stream of batches, for tables that memory does not hold.

        polars and DuckDB read it batch by batch, and `read_all()` and `read_pandas()` return all of it. The arguments
        are those of `SyncClient.read_table`; types are those of the first batch. Raises InvalidRequest for a reader
        without `until`, MissingDependency without pyarrow, and as `batches` and UndecodableValue as it is read.
        """
        record_batches = self._tables().record_batches
        found: pa.RecordBatchReader = record_batches(self.batches(limit=limit), columns, decode)
        return found

    def _tables(self) -> Any:
        optional("pyarrow", "arrow")
        from txnbuffer.client.reading import tables

        if not self._ends:
            raise InvalidRequest("a table needs an end: open the reader with until, such as until='now'")
        return tables

    def __iter__(self) -> Iterator[RecordBatch]:
        """Yield batches up to `until`, or without end; leave the loop to stop."""
        return self.batches()

    def seek(self, start: Start | Mapping[str, Start]) -> None:
        """Continue at another place, given as for a new reader; of a mapping, the topics that it lacks do not move.

        Then the records up to `until` are read again; "now" is the moment of this call. Raises as a new reader; then
        nothing has moved.
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


def read_table(
    broker: Callable[[], Broker],
    topics: str | Iterable[str],
    columns: Sequence[str] | None,
    start: Start | Mapping[str, Start],
    until: Until | Mapping[str, Until],
    decode: Decode | None,
    deserializers: Deserializers,
) -> pa.Table:
    """The records of topics as a table; see `SyncClient.read_table`."""
    with CommittedReader(broker(), topics, start=start, until=until, deserializers=deserializers) as reader:
        table: pa.Table = reader._tables().whole_table(reader.batches(), columns, decode)
        return table
