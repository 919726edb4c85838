"""Planning of a query: the ranges that it reads of each topic, and their tasks"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.partitions import whole_name
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from snapshots.keys import check_data_topic
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.options import A_TIME, BEGINNING, END, READ_COMMITTED, Place, ReadOptions
from txnbuffer.pipeline.pinned import PinnedTopic, end_of_log, pin_topics
from txnbuffer.pipeline.ranges import Cut, RecordRange, packed


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Ranges by task, and the topics they are of."""

    tasks: tuple[tuple[RecordRange, ...], ...]
    topics: Mapping[str, PinnedTopic]


def plan(broker: Broker, options: ReadOptions) -> ReadPlan:
    """All that the options ask for. Raises TopicNotFound, PositionTrimmed, InvalidRequest, and as `pin_topics`."""
    cut = cut_of(options)
    isolated = options.isolation == READ_COMMITTED
    topics = pin_topics(broker, names(broker, options), isolated=isolated, numbered=cut.numbered)
    ranges: list[RecordRange] = []
    strict = options.fail_on_data_loss
    for topic, pinned in topics.items():
        first = first_wanted(broker, pinned, options.start_of(topic), fail_on_data_loss=strict)
        stop = stop_of(broker, pinned, options.end_of(topic))
        last = pinned.last if stop == pinned.stop else None
        ranges += cut.ranges(topic, pinned.extents, pinned.anchors, first, stop, last)
    return ReadPlan(tuple(packed(ranges, options.partition_bytes)), topics)


def cut_of(options: ReadOptions) -> Cut:
    """Seqnos that nobody asks for don't say where to cut."""
    return Cut("seqno" in options.columns, options.partition_bytes)


def names(broker: Broker, options: ReadOptions, *, all_there: bool = True) -> list[str]:
    """The topics to read; those that are named and not there are left out unless `all_there`.

    Raises TopicNotFound, InvalidTopicName for one of our own, InvalidRequest for a place of a topic that is not read.
    """
    known = broker.topics()
    chosen = options.chosen(known)
    missing = set(chosen) - set(known)
    if missing and all_there:
        raise TopicNotFound(
            f"there is no topic {', '.join(map(repr, sorted(missing)))} to read: make it, or leave it out"
        )
    for topic in chosen:
        check_data_topic(topic)
    for option, places in (("start", options.start), ("end", options.end)):
        _check_places(option, places, options, chosen)
    return [topic for topic in chosen if topic not in missing]


def _check_places(option: str, places: Mapping[str, Place], options: ReadOptions, chosen: Sequence[str]) -> None:
    """Raises InvalidRequest for a place of what is not read, or of several topics at once."""
    there = {"", *chosen}
    wholes = {whole_name(topic) for topic in chosen} - there
    for topic, place in places.items():
        if topic in wholes and isinstance(place, Position):
            raise InvalidRequest(f"option {option}: {place} is in one partition of {topic}, name each of them instead")
        read = topic in there or topic in wholes or (options.pattern is not None and options.chosen([topic]))
        if not read:
            raise InvalidRequest(f"option {option} names {topic}, which is not read")


def first_wanted(broker: Broker, pinned: PinnedTopic, start: Place, *, fail_on_data_loss: bool = True) -> Position:
    """The position of the first record wanted, or one right before it.

    Raises PositionTrimmed if it is gone, InvalidRequest for a place that the log has not come to.
    """
    if start == BEGINNING:
        return begun_at(pinned, EARLIEST)
    if not isinstance(start, Position):
        return begun_at(pinned, _place(broker, pinned, start))
    if fail_on_data_loss:
        check_still_there(broker, pinned, start)
        if start > pinned.stop and start > (end := end_of_log(broker, pinned.topic)):
            raise InvalidRequest(
                f"option start is position {start}, and topic {pinned.topic} ends at {end}: give a place before that; "
                f"a time has its date, such as {A_TIME}"
            )
    return begun_at(pinned, start)


def begun_at(pinned: PinnedTopic, at: Position) -> Position:
    """A place, or the start of the log if that is later: the reader there is told what was trimmed.

    Not at an empty ledger that may give place to another one without a word.
    """
    return max(at, pinned.origin) if any(extent.lasting for extent in pinned.extents) else at


def check_still_there(broker: Broker, pinned: PinnedTopic, start: Position) -> None:
    """Raises PositionTrimmed if records behind a place are gone; a place where a ledger ended may well be left."""
    if not EARLIEST < start < pinned.origin:
        return
    try:
        with broker.reader(pinned.topic, start._replace(batch=NO_INDEX)) as reader:
            reader.read(limit=1)
    except PositionTrimmed:
        raise PositionTrimmed(
            f"topic {pinned.topic} begins with ledger {pinned.origin.ledger}: {start} is gone; start at the "
            f"beginning, or say fail_on_data_loss=false to go on without what is gone"
        ) from None


def stop_of(broker: Broker, pinned: PinnedTopic, end: Place) -> Position:
    """The position of the first record that is not wanted any more."""
    if end == BEGINNING:
        return pinned.origin
    return min(end if isinstance(end, Position) else _place(broker, pinned, end), pinned.stop)


def _place(broker: Broker, pinned: PinnedTopic, place: Place) -> Position:
    if place == END:
        return pinned.stop
    if not isinstance(place, datetime):
        raise TypeError(f"{place!r} is no place in a log")
    found = broker.position_at(pinned.topic, milliseconds(place))
    return pinned.stop if found is None else found


def milliseconds(time: datetime) -> int:
    """Since 1970. Raises InvalidRequest."""
    try:
        return max(round(time.timestamp() * 1000), 0)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"{time} is no time that a record can have") from None
