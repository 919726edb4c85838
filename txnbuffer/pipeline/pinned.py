"""One topic at one moment: how far it is decided, and by what verdicts.

Whoever looks takes the end of a topic first and its snapshot after that. A topic's first snapshot stands
before its first transactional record, so one that has none has no transactions up to that end, and its log
need not be looked at. For all others the log is folded from where the snapshot ends to the end of the log.

Whether a topic is still the one that was looked at, and its log as long: what was read or planned must be there.

Marks: a message that was read and its time, by which a log is told from an older copy that has grown since.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker, Reader
from broker_io.position import NO_INDEX
from snapshots.records import reaches
from txnbuffer.buffer.sets import AbortedSet, SuppressedRanges
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.errors import LogReplaced, LogTruncated, ProtocolStopped, ReplayStalled
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.offsets import OffsetMark, ReadProgress
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.ranges import Extent, RangeAnchor, behind
from txnbuffer.recovery.followed_topic import TopicSequencer
from txnbuffer.recovery.load import LoadedTopic, SnapshotLoader, load

MESSAGE_TIMEOUT = 60.0
"""Seconds in which a message that is known to be there must come."""

ATTEMPTS = 5
"""So often a topic is looked at anew where a trim falls between its snapshot and its log."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedTopic:
    """One topic at one moment: everything below `stop` can be read, by `verdicts`; `last` is the last record there.

    `registered` is False for a topic that had no transactions, whose records have no seqnos.
    """

    topic: str
    incarnation: str
    registered: bool
    verdicts: PinnedVisibility
    stop: Position
    last: Position | None
    extents: tuple[Extent, ...]
    anchors: tuple[RangeAnchor, ...]

    @property
    def origin(self) -> Position:
        """Where the log begins."""
        return Position(self.extents[0].ledger, 0)


class TopicView:
    """Looks at one topic again and again, and folds only what has come since.

    `isolated` is False for every record as it stands in the log; `numbered` keeps track of seqnos.
    """

    def __init__(self, broker: Broker, topic: str, *, isolated: bool = True, numbered: bool = True) -> None:
        self._broker = broker
        self._topic = topic
        self._isolated = isolated
        self._numbered = numbered
        self._loaded: LoadedTopic | None = None
        self._reader: Reader | None = None
        self._numbering: TopicSequencer | None = None

    def look(self, snapshots: SnapshotLoader | None = None) -> PinnedTopic:
        """The topic as it is now, good until the next look; its snapshot is one of those that are read together.

        Raises what reading its snapshot and its log raises, ProtocolStopped and ReplayStalled.
        """
        if not self._isolated:
            return self._as_it_stands(self._broker.incarnation(self._topic), self._broker.last_position(self._topic))
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._look(snapshots)
            except PositionTrimmed:
                self.close()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _look(self, snapshots: SnapshotLoader | None) -> PinnedTopic:
        if self._loaded is not None and self._is_old(self._loaded):
            self.close()
        if self._loaded is None:
            end = self._broker.last_position(self._topic)
            loaded = load(self._broker, self._topic) if snapshots is None else snapshots.load(self._topic)
            if not loaded.registered:
                return self._as_it_stands(loaded.incarnation, end)
            self._open(loaded)
        return self._folded()

    def _open(self, loaded: LoadedTopic) -> None:
        self._loaded = loaded
        self._reader = self._broker.reader(self._topic, loaded.resume, inclusive=False)
        if self._numbered:
            self._numbering = TopicSequencer(
                self._broker,
                self._topic,
                loaded.buffer,
                loaded.sequencer,
                sequenced=loaded.sequenced,
                resume=loaded.resume,
            )

    def _is_old(self, loaded: LoadedTopic) -> bool:
        """Whether another topic has the name now, or the buffer holds aborts whose ledgers are gone since."""
        if self._broker.incarnation(self._topic) != loaded.incarnation:
            return True
        first = self._broker.ledgers(self._topic)[0].ledger
        parts = loaded.buffer.segments.summaries
        return first > loaded.first_ledger and bool(parts) and parts[0].last_ledger < first

    def _folded(self) -> PinnedTopic:
        loaded = self._loaded
        if loaded is None:
            raise AssertionError("the topic was not opened")
        self._fold(loaded, self._broker.last_position(self._topic))
        sequencer = loaded.sequencer
        known = {Position(ledger, 0): seqno for ledger, seqno in sequencer.first_seqnos.items()}
        numbered = loaded.sequenced if sequencer.position is None else sequencer.position
        known.setdefault(behind(numbered), sequencer.next_seqno)
        extents = self._extents()
        anchors = tuple(RangeAnchor(at, known[at]) for at in sorted(known) if at >= Position(extents[0].ledger, 0))
        verdicts = PinnedVisibility.of(loaded.buffer)
        last = verdicts.max_read_position
        return PinnedTopic(self._topic, loaded.incarnation, True, verdicts, behind(last), last, extents, anchors)

    def _fold(self, loaded: LoadedTopic, end: Position | None) -> None:
        buffer, reader = loaded.buffer, self._reader
        buffer.replay_until(end)
        while reader is not None and not reaches(buffer.applied, end):
            placed = reader.read(timeout=MESSAGE_TIMEOUT)
            if placed is None:
                raise ReplayStalled(f"topic {self._topic}: none of the messages up to {end} came; try again")
            try:
                buffer.apply_batch(placed)
            except ProtocolStopped as error:
                raise error.of_topic(self._topic) from None
            buffer.take_sealed()
            if self._numbering is not None:
                self._numbering.applied(placed)
        if self._numbering is not None:
            self._numbering.advance()

    def _as_it_stands(self, incarnation: str, last: Position | None) -> PinnedTopic:
        verdicts = PinnedVisibility(AbortedSet(), SuppressedRanges(), last)
        return PinnedTopic(self._topic, incarnation, False, verdicts, behind(last), last, self._extents(), ())

    def _extents(self) -> tuple[Extent, ...]:
        return tuple(
            Extent(ledger.ledger, ledger.entries, ledger.bytes, ledger.lasting)
            for ledger in self._broker.ledgers(self._topic)
        )

    def close(self) -> None:
        """Let go of everything; another look begins anew."""
        for held in (self._reader, self._numbering):
            if held is not None:
                held.close()
        self._loaded = self._reader = self._numbering = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fix_all(
    broker: Broker, topics: Collection[str], *, isolated: bool = True, numbered: bool = True
) -> dict[str, PinnedTopic]:
    """Topics as they are now, with one scan for the snapshots of all of them. Raises as `TopicView.look` does."""
    fixed: dict[str, PinnedTopic] = {}
    with SnapshotLoader(broker, topics) as snapshots:
        for topic in topics:
            with TopicView(broker, topic, isolated=isolated, numbered=numbered) as view:
                fixed[topic] = view.look(snapshots)
    return fixed


def check_same(broker: Broker, topic: str, incarnation: str) -> None:
    """Raises TopicNotFound if the name is another topic's by now, or none's.

    Readers stay with the topic that they were opened at, so for theirs one look behind the opening is enough.
    """
    if broker.incarnation(topic) != incarnation:
        raise TopicNotFound(
            f"topic {topic} was deleted and made anew since its records were to be read: run the query again to read "
            f"the new one, or say fail_on_data_loss=false to go on without the old one"
        )


def check_as_long(broker: Broker, topic: str, place: Position) -> None:
    """Raises LogTruncated if a log ends below a place up to which there were messages."""
    end = end_of_log(broker, topic)
    if place > end:
        raise LogTruncated(
            f"topic {topic} ends at {end}, and there were records up to {place}: the log lost its end, or is an older "
            f"copy; bring the lost records back, or begin anew (a query with another checkpoint, an export with "
            f"another directory), or say fail_on_data_loss=false to go on from the end that there is"
        )


def end_of_log(broker: Broker, topic: str) -> Position:
    """Behind all that a log holds or has held: no place where somebody has read to is above it."""
    newest = broker.ledgers(topic)[-1]
    last = broker.last_position(topic)
    return max(EARLIEST if last is None else behind(last), Position(newest.ledger, newest.entries))


def end_below(broker: Broker, one: PinnedTopic, at: Position, *, fail_on_data_loss: bool) -> Position | None:
    """The end of a log that was read up to a place, if that is above it by now; else None. Raises LogTruncated."""
    newest = one.extents[-1]
    if at <= max(one.stop, Position(newest.ledger, newest.entries)):
        return None
    if fail_on_data_loss:
        check_as_long(broker, one.topic, at)
    end = end_of_log(broker, one.topic)
    return end if end < at else None


def gone(options: ReadOptions, begun: Iterable[str], there: Container[str]) -> list[str]:
    """Topics that were begun and are to be read, and are not there any more. Raises TopicNotFound."""
    missing = [topic for topic in begun if topic not in there and topic in options.chosen([topic])]
    if missing and options.fail_on_data_loss:
        raise TopicNotFound(
            f"topic {', '.join(missing)} was deleted, and with it what had not been read of it, if anything: say "
            f"fail_on_data_loss=false to go on without it"
        )
    return missing


MARK_TIMEOUT = 10.0
"""Seconds in which a message that is there comes; where none does, nothing is told by it."""

EVERY = 300.0
"""So many seconds a mark is good for in a query that goes on: whoever restores a cluster goes back farther."""


class Marks:
    """Marks of a query's topics, each looked at when the query goes on with the topic, and every so many seconds after.

    With 0 each is the last message that was read: an older copy in which that is missing is told, however young it is.
    """

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._checked: dict[str, float] = {}
        self._made: dict[str, float] = {}

    def check(self, broker: Broker, one: PinnedTopic, before: ReadProgress) -> None:
        """Raises LogReplaced if what follows is not of the log that was read."""
        if before.mark is not None and one.stop > before.at and self._due(self._checked, one.topic):
            check_mark(broker, one.topic, before.mark)

    def of(self, broker: Broker, one: PinnedTopic, before: ReadProgress | None, at: Position) -> OffsetMark | None:
        """A mark for a place up to which a topic is read; looking for one may take long where there is none."""
        known = None if before is None else before.mark
        place = _before(one.extents, at)
        if place is None or not self._due(self._made, one.topic):
            return known
        return _mark_at(broker, one, place) or known

    def _due(self, times: dict[str, float], topic: str) -> bool:
        now = time.monotonic()
        if now < times.get(topic, float("-inf")) + self._every:
            return False
        times[topic] = now
        return True


def mark_below(broker: Broker, one: PinnedTopic, at: Position, known: OffsetMark | None) -> OffsetMark | None:
    """The last message below a place, if it can be had; else what was known before."""
    place = _before(one.extents, at)
    return known if place is None else _mark_at(broker, one, place) or known


def _mark_at(broker: Broker, one: PinnedTopic, place: Position) -> OffsetMark | None:
    published = _published(broker, one.topic, place)
    return None if published is None else OffsetMark(place, published)


def check_mark(broker: Broker, topic: str, mark: OffsetMark) -> None:
    """Raises LogReplaced if another message stands where one was read. One that is gone tells nothing."""
    published = _published(broker, topic, mark.at)
    if published is not None and published != mark.published:
        raise LogReplaced(
            f"topic {topic} has another message at {mark.at} than was read there: its log is an older copy that has "
            f"grown since, and what was written below the place up to which it was read would be passed over; begin "
            f"anew (a query with another checkpoint, an export with another directory), or say "
            f"fail_on_data_loss=false to go on from that place"
        )


def _before(extents: Sequence[Extent], at: Position) -> Position | None:
    """The place of the last entry that begins below another place."""
    if at.batch > NO_INDEX:
        return at._replace(batch=NO_INDEX)
    if at.entry > 0:
        return Position(at.ledger, at.entry - 1)
    full = [extent for extent in extents if extent.ledger < at.ledger and extent.entries]
    return Position(full[-1].ledger, full[-1].entries - 1) if full else None


def _published(broker: Broker, topic: str, at: Position) -> int | None:
    """When the message at a place was published, in milliseconds since 1970; None if it can't be had."""
    try:
        with broker.reader(topic, at) as reader:
            placed = reader.read(limit=1, timeout=MARK_TIMEOUT)
    except PositionTrimmed:
        return None
    if placed is None or placed.positions.first[:2] != at[:2]:
        return None
    return int(placed.publish_times[0])
