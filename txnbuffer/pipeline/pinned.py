"""Pinned topics: the readable end and the visibility of a topic at one moment, and checks that its log is the same

A topic is pinned by taking the end of its log first and its snapshot then. The first snapshot of a topic is written
before its first transactional record, so a topic without a snapshot has no transactions up to that end, and its log
need not be read. The logs of all others are replayed from the end of the snapshot to the end of the log.

A mark is the position and the time of a message that was read. If another message is at that position, the log is an
older copy that has grown since.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from broker_io.environment import current
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker, Ledger, Resource, first_written
from broker_io.position import NO_INDEX
from txnbuffer.buffer.state import AbortedSet, SuppressedRanges
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.errors import LogReplaced, LogTruncated
from txnbuffer.follow import LogFollower, SequencedFollower, publish_time
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.offsets import OffsetMark, ReadProgress
from txnbuffer.pipeline.options import SKIP_LOST, ReadOptions
from txnbuffer.pipeline.ranges import LedgerSize, RangeAnchor, after
from txnbuffer.recovery.restore import LoadedTopic, SnapshotLoader, load

MESSAGE_TIMEOUT = 60.0
"""Seconds to wait for a message that is known to exist."""

ATTEMPTS = 5
"""How often pinning is retried if the log is trimmed between reading the snapshot and the log."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedTopic:
    """One topic at one moment: records before `stop` are decided, by `visibility`; `last` is the last one.

    `registered` is False for a topic without transactions, whose records have no seqnos.
    """

    topic: str
    incarnation: str
    registered: bool
    visibility: PinnedVisibility
    stop: Position
    last: Position | None
    ledgers: tuple[LedgerSize, ...]
    anchors: tuple[RangeAnchor, ...]

    @property
    def origin(self) -> Position:
        """The start of the log."""
        return Position(self.ledgers[0].ledger, 0)


class TopicView(Resource):
    """Pins one topic repeatedly; each time replays only the messages since the last time.

    `isolated`: filter by visibility; else read all records of the log. `numbered`: keep track of seqnos.
    """

    def __init__(self, broker: Broker, topic: str, *, isolated: bool = True, numbered: bool = True) -> None:
        self._broker = broker
        self._topic = topic
        self._isolated = isolated
        self._numbered = numbered
        self._opened: tuple[LoadedTopic, LogFollower] | None = None

    def pin(self, snapshots: SnapshotLoader | None = None) -> PinnedTopic:
        """Pin the topic as it is now, until the next call; `snapshots` are those of several topics, read together.

        Raises what reading its snapshot and its log raises, ProtocolStopped and ReplayStalled.
        """
        if not self._isolated:
            return self._without_transactions(
                self._broker.incarnation(self._topic), self._broker.last_position(self._topic)
            )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._pin(snapshots)
            except PositionTrimmed:
                self.close()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _pin(self, snapshots: SnapshotLoader | None) -> PinnedTopic:
        if self._opened is not None and self._is_old(self._opened[0]):
            self.close()
        if self._opened is None:
            end = self._broker.last_position(self._topic)
            loaded = load(self._broker, self._topic) if snapshots is None else snapshots.load(self._topic)
            if not loaded.registered:
                return self._without_transactions(loaded.incarnation, end)
            buffer, resume = loaded.buffer, loaded.resume
            log = LogFollower(self._broker, self._topic, buffer, resume)
            if self._numbered:
                numbers = loaded.sequencer
                log = SequencedFollower(
                    self._broker, self._topic, buffer, resume, decided_after=loaded.sequenced, sequencer=numbers
                )
            self._opened = loaded, log
        return self._replayed(*self._opened)

    def _is_old(self, loaded: LoadedTopic) -> bool:
        """Whether the topic was created again, or the buffer has aborts of ledgers that were trimmed since."""
        if self._broker.incarnation(self._topic) != loaded.incarnation:
            return True
        first = self._broker.ledgers(self._topic)[0].ledger
        parts = loaded.buffer.segments.summaries
        return first > loaded.first_ledger and bool(parts) and parts[0].last_ledger < first

    def _replayed(self, loaded: LoadedTopic, log: LogFollower) -> PinnedTopic:
        log.replay(timeout=MESSAGE_TIMEOUT)
        if isinstance(log, SequencedFollower):
            log.sequence_all()
        sequencer, ledgers = loaded.sequencer, self._broker.ledgers(self._topic)
        sequencer.begin_at(ledgers[0].ledger, first_written(ledgers))
        known = {Position(ledger, 0): seqno for ledger, seqno in sequencer.first_seqnos.items()}
        numbered = loaded.sequenced if sequencer.position is None else sequencer.position
        known.setdefault(after(numbered), sequencer.next_seqno)
        anchors = tuple(RangeAnchor(at, known[at]) for at in sorted(known) if at >= Position(ledgers[0].ledger, 0))
        visibility = PinnedVisibility.of(loaded.buffer)
        last = visibility.max_read_position
        return PinnedTopic(
            self._topic, loaded.incarnation, True, visibility, after(last), last, _sizes(ledgers), anchors
        )

    def _without_transactions(self, incarnation: str, last: Position | None) -> PinnedTopic:
        visibility = PinnedVisibility(AbortedSet(), SuppressedRanges(), last)
        ledgers = self._broker.ledgers(self._topic)
        return PinnedTopic(self._topic, incarnation, False, visibility, after(last), last, _sizes(ledgers), ())

    def close(self) -> None:
        """Release everything; the next `pin` starts from the snapshot."""
        if self._opened is not None:
            self._opened[1].close()
        self._opened = None


def _sizes(ledgers: Iterable[Ledger]) -> tuple[LedgerSize, ...]:
    return tuple(LedgerSize(ledger.ledger, ledger.entries, ledger.bytes, ledger.lasting) for ledger in ledgers)


def pin_topics(
    broker: Broker, topics: Collection[str], *, isolated: bool = True, numbered: bool = True
) -> dict[str, PinnedTopic]:
    """Pin several topics, with one scan for all their snapshots. Raises as `TopicView.pin`."""
    pinned: dict[str, PinnedTopic] = {}
    with SnapshotLoader(broker, topics) as snapshots:
        for topic in topics:
            with TopicView(broker, topic, isolated=isolated, numbered=numbered) as view:
                pinned[topic] = view.pin(snapshots)
    return pinned


def check_same(broker: Broker, topic: str, incarnation: str) -> None:
    """Raises TopicNotFound if the topic was deleted, or deleted and created again.

    A reader stays with the topic that it was opened on, so one check after the opening is enough.
    """
    if broker.incarnation(topic) != incarnation:
        raise TopicNotFound(
            f"topic {topic} was deleted and created again before its records were read: run the query again to read "
            f"the new topic, or {SKIP_LOST} to continue without the old one"
        )


def check_log_end(broker: Broker, topic: str, place: Position) -> None:
    """Raises LogTruncated if a log ends before a position up to which it had messages."""
    end = end_of_log(broker, topic)
    if place > end:
        raise LogTruncated(
            f"topic {topic} ends at {end}, but had records up to {place}: the log lost its end, or is an older copy; "
            f"restore the lost records, or start over (a query with another checkpoint, an export with another "
            f"directory), or {SKIP_LOST} to continue from the present end"
        )


def end_of_log(broker: Broker, topic: str) -> Position:
    """The end of a log, trimmed messages included; no reader has read beyond it."""
    newest = broker.ledgers(topic)[-1]
    last = broker.last_position(topic)
    return max(EARLIEST if last is None else after(last), Position(newest.ledger, newest.entries))


def end_below(broker: Broker, one: PinnedTopic, at: Position, *, fail_on_data_loss: bool) -> Position | None:
    """The end of a log if it is now before the position `at` that was read; else None. Raises LogTruncated."""
    newest = one.ledgers[-1]
    if at <= max(one.stop, Position(newest.ledger, newest.entries)):
        return None
    if fail_on_data_loss:
        check_log_end(broker, one.topic, at)
    end = end_of_log(broker, one.topic)
    return end if end < at else None


def deleted_topics(options: ReadOptions, begun: Iterable[str], there: Container[str]) -> list[str]:
    """Topics of the query that were read before and no longer exist. Raises TopicNotFound."""
    missing = [topic for topic in begun if topic not in there and topic in options.chosen([topic])]
    if missing and options.fail_on_data_loss:
        raise TopicNotFound(
            f"topic {', '.join(missing)} was deleted, perhaps with unread records: {SKIP_LOST} to continue without it"
        )
    return missing


MARK_TIMEOUT = 10.0
"""Seconds to wait for the message of a mark; without it nothing is checked."""

CHECK_INTERVAL = 300.0
"""Seconds between two checks of a mark in a running query; a restored cluster is usually older."""


class Marks:
    """Marks of the topics of a query, checked when the query continues with a topic, and then every `every` seconds.

    With 0 the mark is always the last message that was read, so that every older copy is detected.
    """

    def __init__(self, every: float = CHECK_INTERVAL) -> None:
        self._every = every
        self._monotonic = current().clock.monotonic
        self._checked: dict[str, float] = {}
        self._made: dict[str, float] = {}

    def check(self, broker: Broker, one: PinnedTopic, before: ReadProgress) -> None:
        """Raises LogReplaced if the log is not the one that was read before."""
        if before.mark is not None and one.stop > before.at and self._due(self._checked, one.topic):
            check_mark(broker, one.topic, before.mark)

    def of(self, broker: Broker, one: PinnedTopic, before: ReadProgress | None, at: Position) -> OffsetMark | None:
        """A mark for a position up to which a topic was read; finding one may take long."""
        known = None if before is None else before.mark
        if _before(one.ledgers, at) is None or not self._due(self._made, one.topic):
            return known
        return mark_below(broker, one, at, known)

    def _due(self, times: dict[str, float], topic: str) -> bool:
        now = self._monotonic()
        if now < times.get(topic, float("-inf")) + self._every:
            return False
        times[topic] = now
        return True


def mark_below(broker: Broker, one: PinnedTopic, at: Position, known: OffsetMark | None) -> OffsetMark | None:
    """The mark of the last message before a position; if it is unreadable, the known mark."""
    place = _before(one.ledgers, at)
    published = None if place is None else publish_time(broker, one.topic, place, MARK_TIMEOUT)
    return known if place is None or published is None else OffsetMark(place, published)


def check_mark(broker: Broker, topic: str, mark: OffsetMark) -> None:
    """Raises LogReplaced if another message is at the position of a mark, or never was any; not for a trimmed one."""
    published = publish_time(broker, topic, mark.at, MARK_TIMEOUT)
    if published is None and _never_held(broker.ledgers(topic), mark.at):
        raise LogReplaced(
            f"topic {topic} never had the message that was read at {mark.at}: its log was restored from a backup, and "
            f"records after it that were read are lost; start over (a query with another checkpoint, an export with "
            f"another directory), or {SKIP_LOST} to continue from that position"
        )
    if published is not None and published != mark.published:
        raise LogReplaced(
            f"topic {topic} has another message at {mark.at} than the one read there: its log is an older copy that "
            f"has grown since, and its new records before the position already read would be skipped; start over (a "
            f"query with another checkpoint, an export with another directory), or {SKIP_LOST} to "
            f"continue from that position"
        )


def _never_held(ledgers: Sequence[Ledger], at: Position) -> bool:
    """Whether a log has older ledgers than that of a message, or that ledger, but not the message."""
    older = [ledger for ledger in ledgers if ledger.ledger <= at.ledger]
    if not older:
        return False
    last = older[-1]
    return last.closed and (last.ledger < at.ledger or last.entries <= at.entry)


def _before(ledgers: Sequence[LedgerSize], at: Position) -> Position | None:
    """The position of the last entry that starts before a position."""
    if at.batch > NO_INDEX:
        return at._replace(batch=NO_INDEX)
    if at.entry > 0:
        return Position(at.ledger, at.entry - 1)
    full = [ledger for ledger in ledgers if ledger.ledger < at.ledger and ledger.entries]
    return Position(full[-1].ledger, full[-1].entries - 1) if full else None
