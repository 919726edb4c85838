"""Durable cursors of a service: kept in the snapshots of their topics, asked for by name, in retention's way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from broker_io.port import Ledger
from txnbuffer.recovery.tailing import Tail
from txnbuffer.service.keeping import Keeping
from txnbuffer.service.topics import Topics
from txnbuffer.streams.cursors import acknowledged, check_cursor_name, first_needed
from txnbuffer.streams.errors import StreamTrimmed, TooManyCursors, UnknownCursor
from txnbuffer.streams.requests import TopicFacts
from txnbuffer.streams.token import ResumeToken

At = int | ResumeToken

Facts = Callable[[str], Awaitable[tuple[Tail, TopicFacts]]]


class Cursors:
    """`facts` makes a topic one that has seqnos, and tells what is known of it.

    `limit`: cursors of a topic. `max_bytes`: one that keeps more than that from going is dropped, 0: none is.
    `dropped`: how many were.
    """

    def __init__(self, topics: Topics, keeping: Keeping, facts: Facts, *, limit: int, max_bytes: int) -> None:
        self.dropped = 0
        self._topics = topics
        self._keeping = keeping
        self._facts = facts
        self._limit = limit
        self._max_bytes = max_bytes

    async def add(self, topic: str, name: object, at: At | str) -> int:
        """Begin to hold what stands behind a seqno or token, "beginning" or "now"; durable when this returns.

        One that is there stays where it is; where it stands. Raises TooManyCursors, StreamTrimmed, and as
        `acknowledged`.
        """
        cursor = check_cursor_name(name)
        tail, facts = await self._facts(topic)
        if cursor not in tail.cursors:
            if len(tail.cursors) >= self._limit:
                raise TooManyCursors(f"topic {topic!r} has {self._limit} cursors, no more may be: remove one")
            if isinstance(at, str):
                at = facts.high_seqno if at == "now" else facts.trimmed_seqno
            if (seqno := acknowledged(at, topic, facts)) < facts.trimmed_seqno:
                raise StreamTrimmed(
                    f"topic {topic!r} is trimmed up to seqno {facts.trimmed_seqno}: nothing behind {seqno} can be held"
                )
            tail.cursors = {**tail.cursors, cursor: seqno}
        await self._persist(topic)
        tail, facts = await self._facts(topic)
        if tail.cursors.get(cursor, -1) < facts.trimmed_seqno:  # retention was at it meanwhile
            raise StreamTrimmed(
                f"topic {topic!r} is trimmed up to seqno {facts.trimmed_seqno}, so cursor {cursor!r} does not hold all "
                "that it should: remove it, and start over"
            )
        return tail.cursors[cursor]

    async def advance(self, topic: str, name: object, at: At) -> int:
        """Let go of what stands up to a seqno or token; where the cursor stands then. An older one changes nothing.

        It is kept with the next snapshot of the topic. Raises UnknownCursor, and as `acknowledged`.
        """
        cursor = check_cursor_name(name)
        tail, facts = await self._facts(topic)
        known = tail.cursors.get(cursor)
        if known is None:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r}: it was removed, dropped or never made")
        seqno = max(acknowledged(at, topic, facts), min(known, facts.high_seqno))
        tail.cursors = {**tail.cursors, cursor: seqno}
        return seqno

    async def remove(self, topic: str, name: object) -> None:
        """Hold nothing for it any more; durable when this returns. Raises UnknownCursor."""
        cursor = check_cursor_name(name)
        tail, _ = await self._facts(topic)
        if cursor not in tail.cursors:
            raise UnknownCursor(f"topic {topic!r} has no cursor {cursor!r} to remove")
        tail.cursors = {one: seqno for one, seqno in tail.cursors.items() if one != cursor}
        await self._persist(topic)

    def rows(self) -> list[dict[str, Any]]:
        """All cursors by topic and name: where each stands, and how many mutations are behind it."""
        rows = []
        for name, topic in sorted(self._topics.by_name.items()):
            if topic.tail is None:
                continue
            high = topic.tail.numbering.sequencer.next_seqno - 1
            for cursor, seqno in sorted(topic.tail.cursors.items()):
                needed = first_needed(seqno, dict(topic.tail.numbering.sequencer.first_seqnos))
                held = {"seqno": seqno, "items_remaining": max(high - seqno, 0), "first_ledger": needed}
                rows.append({"topic": name, "cursor": cursor, **held})
        return rows

    def floor(self, topic: str, ledgers: Sequence[Ledger], wanted: int) -> int | None:
        """The lowest ledger that a cursor of a topic needs, where retention wants to keep those from `wanted` on.

        Cursors that keep too much from going are dropped first.
        """
        found = self._topics.get(topic)
        if found is None or (tail := found.tail) is None:
            return None
        firsts = dict(tail.numbering.sequencer.first_seqnos)
        kept: dict[str, int] = {}
        floor: int | None = None
        for name, seqno in tail.cursors.items():
            needed = first_needed(seqno, firsts)
            if needed is not None:
                held = sum(ledger.bytes for ledger in ledgers if needed <= ledger.ledger < wanted)
                if self._max_bytes and held > self._max_bytes:
                    self.dropped += 1
                    continue
                floor = needed if floor is None else min(floor, needed)
            kept[name] = seqno
        if len(kept) < len(tail.cursors):
            tail.cursors = kept
        return floor

    async def _persist(self, topic: str) -> None:
        await self._keeping.snapshot([topic])
        if self._keeping.problem is not None:
            raise self._keeping.problem
