"""What is to be read of each topic, fixed once: how far it is decided, by what verdicts, in which ranges.

Whoever plans takes the end of a topic first and its snapshot after that. A topic's first snapshot stands
before its first transactional record, so one that has none has no transactions up to that end, and its log
need not be looked at. For all others the log is folded from where the snapshot ends to the end of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker
from snapshots.layout import reaches
from snapshots.loading import Loaded, load
from txnbuffer.buffer.aborts import AbortedSet
from txnbuffer.buffer.suppressed import SuppressedRanges
from txnbuffer.buffer.verdicts import FixedVerdicts
from txnbuffer.errors import InvalidRequest, ProtocolStopped, TailStalled
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.options import BEGINNING, END, READ_COMMITTED, Place, ReadOptions
from txnbuffer.pipeline.ranges import Anchor, Cut, Extent, Range, behind, packed

PATIENCE = 60.0
"""Seconds in which a message that is known to be there must come."""

ATTEMPTS = 5
"""So often a topic is looked at anew where a trim falls between its snapshot and its log."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """One topic at one moment: everything below `stop` can be read, by `verdicts`; `last` is the last record there.

    `registered` is False for a topic that had no transactions, whose records have no seqnos.
    """

    topic: str
    incarnation: str
    registered: bool
    verdicts: FixedVerdicts
    stop: Position
    last: Position | None
    extents: tuple[Extent, ...]
    anchors: tuple[Anchor, ...]

    @property
    def origin(self) -> Position:
        """Where the log begins."""
        return Position(self.extents[0].ledger, 0)


def fix(broker: Broker, topic: str, *, isolation: str = READ_COMMITTED) -> Fixed:
    """A topic as it is now. Raises what reading its snapshot and its log raises, and ProtocolStopped."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _fixed(broker, topic) if isolation == READ_COMMITTED else _as_it_stands(broker, topic)
        except PositionTrimmed:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _fixed(broker: Broker, topic: str) -> Fixed:
    end = broker.last_position(topic)
    loaded = load(broker, topic)
    if not loaded.registered:
        return _of(broker, loaded.topic, loaded.incarnation, end)
    fold(broker, loaded, broker.last_position(topic))
    verdicts = FixedVerdicts.of(loaded.buffer)
    last = verdicts.max_read_position
    return Fixed(
        topic, loaded.incarnation, True, verdicts, behind(last), last, _extents(broker, topic), _anchors(loaded)
    )  # fmt: skip


def _as_it_stands(broker: Broker, topic: str) -> Fixed:
    return _of(broker, topic, broker.incarnation(topic), broker.last_position(topic))


def _of(broker: Broker, topic: str, incarnation: str, last: Position | None) -> Fixed:
    verdicts = FixedVerdicts(AbortedSet(), SuppressedRanges(), last)
    return Fixed(topic, incarnation, False, verdicts, behind(last), last, _extents(broker, topic), ())


def fold(broker: Broker, loaded: Loaded, end: Position | None) -> None:
    """Apply the log up to a position to a topic's buffer. Raises ProtocolStopped, PositionTrimmed, TailStalled."""
    buffer = loaded.buffer
    buffer.replay_until(end)
    if reaches(buffer.applied, end):
        return
    with broker.reader(loaded.topic, loaded.resume, inclusive=False) as reader:
        while not reaches(buffer.applied, end):
            placed = reader.read(timeout=PATIENCE)
            if placed is None:
                raise TailStalled(f"topic {loaded.topic}: none of the messages up to {end} came; try again")
            try:
                buffer.apply_batch(placed)
            except ProtocolStopped as error:
                raise error.of_topic(loaded.topic) from None
            buffer.take_sealed()


def _extents(broker: Broker, topic: str) -> tuple[Extent, ...]:
    return tuple(Extent(ledger.ledger, ledger.entries, ledger.bytes) for ledger in broker.ledgers(topic))


def _anchors(loaded: Loaded) -> tuple[Anchor, ...]:
    """Where the topic's snapshot knows the seqno that comes next, of what the log still holds."""
    known = {Position(ledger, 0): seqno for ledger, seqno in loaded.sequencer.first_seqnos.items()}
    if loaded.numbered > EARLIEST:
        known.setdefault(behind(loaded.numbered), loaded.sequencer.next_seqno)
    lowest = Position(loaded.first_ledger, 0)
    return tuple(Anchor(position, known[position]) for position in sorted(known) if position >= lowest)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Ranges by task, and the topics they are of."""

    tasks: tuple[tuple[Range, ...], ...]
    topics: Mapping[str, Fixed]


def plan(broker: Broker, options: ReadOptions) -> Plan:
    """All that the options ask for. Raises TopicNotFound, PositionTrimmed, InvalidRequest, and what `fix` does."""
    topics = {topic: fix(broker, topic, isolation=options.isolation) for topic in names(broker, options)}
    cut = cut_of(options)
    ranges: list[Range] = []
    for topic, fixed in topics.items():
        first = first_wanted(broker, fixed, options.start_of(topic), fail_on_data_loss=options.fail_on_data_loss)
        stop = stop_of(broker, fixed, options.end_of(topic))
        last = fixed.last if stop == fixed.stop else None
        ranges += cut.ranges(topic, fixed.extents, fixed.anchors, first, stop, last)
    return Plan(tuple(packed(ranges, options.partition_bytes)), topics)


def cut_of(options: ReadOptions) -> Cut:
    """Seqnos that nobody asks for don't say where to cut."""
    return Cut("seqno" in options.columns, options.partition_bytes)


def names(broker: Broker, options: ReadOptions) -> list[str]:
    """The topics to read. Raises TopicNotFound, and InvalidRequest for a place of a topic that is not read."""
    known = broker.topics()
    chosen = options.chosen(known)
    if missing := sorted(set(chosen) - set(known)):
        raise TopicNotFound(f"there is no topic {', '.join(map(repr, missing))} to read")
    for option, places in (("start", options.start), ("end", options.end)):
        if options.pattern is None and (strange := sorted(places.keys() - {"", *chosen})):
            raise InvalidRequest(f"option {option} names {', '.join(strange)}, which is not read")
    return chosen


def first_wanted(broker: Broker, fixed: Fixed, start: Place, *, fail_on_data_loss: bool = True) -> Position:
    """The position of the first record wanted, or one right before it. Raises PositionTrimmed if it is gone."""
    if start == BEGINNING:
        return fixed.origin
    if isinstance(start, Position):
        if EARLIEST < start < fixed.origin and fail_on_data_loss:
            raise PositionTrimmed(
                f"topic {fixed.topic} begins with ledger {fixed.origin.ledger}: {start} is gone; start at the "
                f"beginning, or say fail_on_data_loss=false to go on without what is gone"
            )
        return max(start, fixed.origin)
    return max(_place(broker, fixed, start), fixed.origin)


def stop_of(broker: Broker, fixed: Fixed, end: Place) -> Position:
    """The position of the first record that is not wanted any more."""
    if end == BEGINNING:
        return fixed.origin
    return min(end if isinstance(end, Position) else _place(broker, fixed, end), fixed.stop)


def _place(broker: Broker, fixed: Fixed, place: Place) -> Position:
    if place == END:
        return fixed.stop
    if not isinstance(place, datetime):
        raise TypeError(f"{place!r} is no place in a log")
    try:
        milliseconds = max(round(place.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{place} is no time that a record can have") from None
    found = broker.position_at(fixed.topic, milliseconds)
    return fixed.stop if found is None else found
