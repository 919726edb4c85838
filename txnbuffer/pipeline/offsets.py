"""Offsets of streaming queries and exports: the positions up to which topics were read

A JSON object with sorted keys, which Spark stores in the checkpoint of a query:

    {"version": 1, "topics": {"orders": {"at": "3:17", "incarnation": "9f…", "seqno": 121}}}

Everything before the position `at` of a topic has been read. `incarnation` identifies the topic: a topic that was
deleted and created again has another one. `seqno` is the number of the next visible record, missing if unknown. A topic
that is missing is read from its beginning. If a query starts at a time in the future, `since` is that time in
milliseconds since 1970, and `at` the end of the log when the query started:

    {"at": "3:17", "incarnation": "9f…", "since": 1790000000000}

`mark`, if known, is the position of the entry of a message that was read, and its publish time. If another message is
there, the log is not the one that was read (see `pipeline.pinned`):

    {"at": "3:17", "incarnation": "9f…", "mark": {"at": "3:16", "published": 1790000000000}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.pipeline.ranges import LedgerSize, advanced, carried

VERSION = 1

Json: TypeAlias = dict[str, Any]


class OffsetMark(NamedTuple):
    """A message that was read: the position of its entry, and its publish time in milliseconds since 1970."""

    at: Position
    published: int


class ReadProgress(NamedTuple):
    """Progress in one topic: everything before `at` was read; reading starts at the time `since`, if given."""

    at: Position
    incarnation: str
    seqno: int | None = None
    since: int | None = None
    mark: OffsetMark | None = None


@dataclass(frozen=True, slots=True)
class Offset:
    topics: Mapping[str, ReadProgress]

    def to_json(self) -> Json:
        topics: Json = {}
        for topic, (at, incarnation, seqno, since, mark) in sorted(self.topics.items()):
            topics[topic] = {"at": str(at), "incarnation": incarnation}
            if seqno is not None:
                topics[topic]["seqno"] = seqno
            if since is not None:
                topics[topic]["since"] = since
            if mark is not None:
                topics[topic]["mark"] = {"at": str(mark.at), "published": mark.published}
        return {"topics": topics, "version": VERSION}

    @classmethod
    def of_json(cls, found: object) -> Offset:
        """Raises InvalidRequest if it is not an offset of this version."""
        try:
            if not isinstance(found, dict) or found["version"] != VERSION:
                raise ValueError("unknown version")
            return cls({topic: _reached(place) for topic, place in found["topics"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"cannot read the offset in the checkpoint of the query ({error}): {found!r:.300}; use the release "
                f"that wrote it, or start with another checkpoint"
            ) from None


def _reached(place: Json) -> ReadProgress:
    seqno, since, incarnation, found = place.get("seqno"), place.get("since"), place["incarnation"], place.get("mark")
    mark = None if found is None else OffsetMark(Position.parse(found["at"]), found["published"])
    numbers = (seqno, since, None if mark is None else mark.published)
    if not isinstance(incarnation, str) or not all(number is None or type(number) is int for number in numbers):
        raise TypeError("a field has the wrong type")
    return ReadProgress(Position.parse(place["at"]), incarnation, seqno, since, mark)


class UnreadRange(NamedTuple):
    """The unread messages of a topic, from `first` up to `stop` (exclusive)."""

    topic: str
    ledgers: Sequence[LedgerSize]
    first: Position
    stop: Position


def limited(unread: Sequence[UnreadRange], messages: int | None) -> dict[str, Position]:
    """The end of each unread range if all together have at most `messages` messages, in proportion to their sizes.

    At least one message of each is read, if it has any, so that none waits for another's backlog. An end at the end of
    a ledger is moved to the start of the next one.
    """
    ends = _ends(unread, messages)
    return {one.topic: carried(one.ledgers, end) for one, end in zip(unread, ends, strict=True)}


def _ends(unread: Sequence[UnreadRange], messages: int | None) -> list[Position]:
    if messages is None:
        return [one.stop for one in unread]
    there = {one.topic: _count(one) for one in unread}
    total = sum(there.values())
    if total <= messages:
        return [one.stop for one in unread]
    least = {topic: min(count, 1) for topic, count in there.items()}
    firsts = sum(least.values())
    more, total = max(messages - firsts, 0), total - firsts
    shares = {topic: one + (there[topic] - one) * more // max(total, 1) for topic, one in least.items()}
    left = max(messages - sum(shares.values()), 0)
    for topic in sorted(there, key=lambda topic: shares[topic] - there[topic]):
        rest = min(left, there[topic] - shares[topic])
        shares[topic] += rest
        left -= rest
    return [advanced(one.ledgers, one.first, one.stop, shares[one.topic])[0] for one in unread]


def _count(one: UnreadRange) -> int:
    return advanced(one.ledgers, one.first, one.stop, 2**62)[1]
