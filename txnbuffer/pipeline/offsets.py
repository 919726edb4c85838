"""How far a streaming query has come, as Spark keeps it in the query's checkpoint.

A JSON object, whose keys are sorted:

    {"version": 1, "topics": {"orders": {"at": "3:17", "incarnation": "9f…", "seqno": 121}}}

Of each topic everything below the position `at` has been read; `incarnation` is the topic's, so that one made
anew under the same name is told from it; `seqno` is the number of the next visible record, left out where
that is not known. A topic that is not named has not been begun: it is read from its beginning. Where a query is to
begin at a time to come, `since` is that time in milliseconds since 1970, and `at` where the log ended when it was told:

    {"at": "3:17", "incarnation": "9f…", "since": 1790000000000}

Where it is known, `mark` names a message that was read, by the position of its entry, and when it was published: should
another stand there, the log is not the one that was read (see `pipeline.marks`):

    {"at": "3:17", "incarnation": "9f…", "mark": {"at": "3:16", "published": 1790000000000}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.pipeline.ranges import Extent, advanced, carried

VERSION = 1

Json: TypeAlias = dict[str, Any]


class OffsetMark(NamedTuple):
    """A message that was read: where its entry stands, and when it was published, in milliseconds since 1970."""

    at: Position
    published: int


class ReadProgress(NamedTuple):
    """How far one topic has been read: up to, but not including, `at`; not begun before what came at `since`."""

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
        """Raises InvalidRequest for what is no offset of this version."""
        try:
            if not isinstance(found, dict) or found["version"] != VERSION:
                raise ValueError("it is of another version")
            return cls({topic: _reached(place) for topic, place in found["topics"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the checkpoint of the query holds an offset that can't be read ({error}): {found!r:.300}; use the "
                f"release that wrote it, or begin with another checkpoint"
            ) from None


def _reached(place: Json) -> ReadProgress:
    seqno, since, incarnation, found = place.get("seqno"), place.get("since"), place["incarnation"], place.get("mark")
    mark = None if found is None else OffsetMark(Position.parse(found["at"]), found["published"])
    numbers = (seqno, since, None if mark is None else mark.published)
    if not isinstance(incarnation, str) or not all(number is None or type(number) is int for number in numbers):
        raise TypeError("it holds no text and number where these belong")
    return ReadProgress(Position.parse(place["at"]), incarnation, seqno, since, mark)


class UnreadRange(NamedTuple):
    """What of a topic could be read next: from `first` up to `stop`."""

    topic: str
    extents: Sequence[Extent]
    first: Position
    stop: Position


def limited(stretches: Sequence[UnreadRange], messages: int | None) -> dict[str, Position]:
    """Where each stretch ends if all of them together have at most so many messages, shared by what each has.

    At least one message of each is read, if it has any, so that none waits for another's backlog. A ledger that is
    read to its end is left.
    """
    ends = _ends(stretches, messages)
    return {one.topic: carried(one.extents, end) for one, end in zip(stretches, ends, strict=True)}


def _ends(stretches: Sequence[UnreadRange], messages: int | None) -> list[Position]:
    if messages is None:
        return [one.stop for one in stretches]
    there = {one.topic: _count(one) for one in stretches}
    total = sum(there.values())
    if total <= messages:
        return [one.stop for one in stretches]
    least = {topic: min(count, 1) for topic, count in there.items()}
    firsts = sum(least.values())
    more, total = max(messages - firsts, 0), total - firsts
    shares = {topic: one + (there[topic] - one) * more // max(total, 1) for topic, one in least.items()}
    left = max(messages - sum(shares.values()), 0)
    for topic in sorted(there, key=lambda topic: shares[topic] - there[topic]):
        rest = min(left, there[topic] - shares[topic])
        shares[topic] += rest
        left -= rest
    return [advanced(one.extents, one.first, one.stop, shares[one.topic])[0] for one in stretches]


def _count(one: UnreadRange) -> int:
    return advanced(one.extents, one.first, one.stop, 2**62)[1]
