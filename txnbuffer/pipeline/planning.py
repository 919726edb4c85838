"""Planning of a query: the ranges that it reads of each topic, and their tasks"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.partitions import whole_name
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from snapshots.format import check_data_topic
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.options import A_TIME, BEGINNING, END, READ_COMMITTED, SKIP_LOST, ReadOptions, StartOrEnd
from txnbuffer.pipeline.pinned import PinnedTopic, end_of_log, pin_topics
from txnbuffer.pipeline.ranges import RangePlanner, RecordRange, packed


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The ranges of each task, and the pinned topics by name."""

    tasks: tuple[tuple[RecordRange, ...], ...]
    topics: Mapping[str, PinnedTopic]


def plan(broker: Broker, options: ReadOptions) -> ReadPlan:
    """The plan for the options. Raises TopicNotFound, PositionTrimmed, InvalidRequest, and as `pin_topics`."""
    planner = range_planner(options)
    isolated = options.isolation == READ_COMMITTED
    topics = pin_topics(broker, names(broker, options), isolated=isolated, numbered=planner.numbered)
    ranges: list[RecordRange] = []
    strict = options.fail_on_data_loss
    for topic, pinned in topics.items():
        first = first_wanted(broker, pinned, options.start_of(topic), fail_on_data_loss=strict)
        stop = stop_of(broker, pinned, options.end_of(topic))
        last = pinned.last if stop == pinned.stop else None
        ranges += planner.ranges(topic, pinned.ledgers, pinned.anchors, first, stop, last)
    return ReadPlan(tuple(packed(ranges, options.partition_bytes)), topics)


def range_planner(options: ReadOptions) -> RangePlanner:
    """A planner that restricts boundaries to anchors only if the column seqno is read."""
    return RangePlanner("seqno" in options.columns, options.partition_bytes)


def names(broker: Broker, options: ReadOptions, *, require_all: bool = True) -> list[str]:
    """The topics to read. Missing topics raise TopicNotFound with `require_all`, else they are left out.

    Raises InvalidTopicName for an internal topic, InvalidRequest for a place of a topic that is not read.
    """
    known = broker.topics()
    chosen = options.chosen(known)
    missing = set(chosen) - set(known)
    if missing and require_all:
        raise TopicNotFound(f"topic {', '.join(map(repr, sorted(missing)))} does not exist: create it, or leave it out")
    for topic in chosen:
        check_data_topic(topic)
    for option, places in (("start", options.start), ("end", options.end)):
        _check_places(option, places, options, chosen)
    return [topic for topic in chosen if topic not in missing]


def _check_places(option: str, places: Mapping[str, StartOrEnd], options: ReadOptions, chosen: Sequence[str]) -> None:
    """Raises InvalidRequest for a place of a topic that is not read, and for a position in a partitioned topic."""
    there = {"", *chosen}
    wholes = {whole_name(topic) for topic in chosen} - there
    for topic, place in places.items():
        if topic in wholes and isinstance(place, Position):
            raise InvalidRequest(
                f"option {option} has position {place} for {topic}, which has partitions: give one per partition"
            )
        read = topic in there or topic in wholes or (options.pattern is not None and options.chosen([topic]))
        if not read:
            raise InvalidRequest(f"option {option} has topic {topic}, which is not read: leave it out")


def first_wanted(broker: Broker, pinned: PinnedTopic, start: StartOrEnd, *, fail_on_data_loss: bool = True) -> Position:
    """The position of the first record to read, or one right before it.

    Raises PositionTrimmed if it was trimmed, InvalidRequest for a position beyond the end of the log.
    """
    if start == BEGINNING:
        return not_before_origin(pinned, EARLIEST)
    if not isinstance(start, Position):
        return not_before_origin(pinned, _place(broker, pinned, start))
    if fail_on_data_loss:
        check_not_trimmed(broker, pinned, start)
        if start > pinned.stop and start > (end := end_of_log(broker, pinned.topic)):
            raise InvalidRequest(
                f"option start is position {start}, but topic {pinned.topic} ends at {end}: use a lower position; a "
                f"time requires a date, such as {A_TIME}"
            )
    return not_before_origin(pinned, start)


def not_before_origin(pinned: PinnedTopic, at: Position) -> Position:
    """The later of `at` and the start of the log, where a reader detects later trimming.

    `at` if all ledgers are empty and not `lasting`: another ledger may replace them, which a reader does not detect.
    """
    return max(at, pinned.origin) if any(ledger.lasting for ledger in pinned.ledgers) else at


def check_not_trimmed(broker: Broker, pinned: PinnedTopic, start: Position) -> None:
    """Raises PositionTrimmed if records after `start` were trimmed; the end of a trimmed ledger is no error."""
    if not EARLIEST < start < pinned.origin:
        return
    try:
        with broker.reader(pinned.topic, start._replace(batch=NO_INDEX)) as reader:
            reader.read(limit=1)
    except PositionTrimmed:
        raise PositionTrimmed(
            f"topic {pinned.topic} begins with ledger {pinned.origin.ledger}, and records after {start} were trimmed: "
            f"start at the beginning, or {SKIP_LOST} to continue without them"
        ) from None


def stop_of(broker: Broker, pinned: PinnedTopic, end: StartOrEnd) -> Position:
    """The position before which reading stops; at most `pinned.stop`."""
    if end == BEGINNING:
        return pinned.origin
    return min(end if isinstance(end, Position) else _place(broker, pinned, end), pinned.stop)


def _place(broker: Broker, pinned: PinnedTopic, place: StartOrEnd) -> Position:
    if place == END:
        return pinned.stop
    if not isinstance(place, datetime):
        raise TypeError(f"{place!r} is not a place in a log")
    found = broker.position_at(pinned.topic, milliseconds(place))
    return pinned.stop if found is None else found


def milliseconds(time: datetime) -> int:
    """A time in milliseconds since 1970; 0 for earlier times. Raises InvalidRequest."""
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"the time {time} is out of range: use another one") from None
