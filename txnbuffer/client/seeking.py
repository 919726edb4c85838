"""Seeking: a group without members gets other positions

A member that joins for a moment commits them in one transaction, so all partitions get theirs or none does. It commits
in its generation: once another member has got a partition, the transaction is refused.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from broker_io.port import Broker
from broker_io.position import before_ledger
from txnbuffer.checks import check_name
from txnbuffer.client.client import Client
from txnbuffer.client.groups.membership import Membership
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.starts import ReadTopics, Seqno, Start, canonical, start_point
from txnbuffer.client.topic_names import check_source
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import ConsumerPosition
from txnbuffer.errors import InvalidRequest, PositionConflict, StaleGeneration, counted
from txnbuffer.model import EARLIEST, Position


class MovedPosition(NamedTuple):
    """The last record that a group had consumed of a topic or partition, None if it had none, and the new one."""

    topic: str
    old: Position | None
    new: Position


async def seek(client: Client, group: str, topic: str, start: Start, *, dry_run: bool = False) -> list[MovedPosition]:
    """Let a group without members continue at `start` on a topic and all its partitions.

    `dry_run`: only return what would change. Raises InvalidRequest if the group has members, or gets one meanwhile:
    then nothing has changed.
    """
    check_name(group, "a group")
    check_source(topic)
    known = await _positions(client, group)
    places = await asyncio.to_thread(lambda: _places(client.open_broker(), topic, canonical(start)))
    if dry_run:
        return [MovedPosition(name, known.get(name), place) for name, place in places.items()]
    member = Membership(client, group, [topic], from_end=False)
    try:
        await member.join()
        await _positions(client, group, except_for=member.name)
        ends = {name: one.end for name, one in member.assignments.items()}
        if places.keys() - ends.keys():
            raise _joined_meanwhile(group)
        async with Transaction(client, group=group) as txn:
            for name, place in places.items():
                txn.consumed(ConsumerPosition(group, name, member.generation, ends[name], place))
    except (StaleGeneration, PositionConflict):
        raise _joined_meanwhile(group) from None
    finally:
        await member.leave()
    return [
        MovedPosition(name, None if ends[name] == EARLIEST else ends[name], place) for name, place in places.items()
    ]


def _joined_meanwhile(group: str) -> InvalidRequest:
    return InvalidRequest(f"a member joined group {group!r} meanwhile, so no position has changed: stop it, try again")


async def _positions(client: Client, group: str, except_for: str | None = None) -> dict[str, Position]:
    """The positions of a group. Raises InvalidRequest if it has members, `except_for` one."""
    rows = await client.admin.ask(group, "Groups", {"group": group}, client.admin.max_unavailable)
    members = {row["member"] for row in rows} - {None, except_for}
    if members:
        raise InvalidRequest(
            f"group {group!r} has {counted(len(members), 'member')} ({', '.join(sorted(members)[:3])}), and can be "
            "moved without members only: stop them first"
        )
    return {row["topic"]: Position.parse(row["position"]) for row in rows if row["topic"] and row["position"]}


def _places(broker: Broker, topic: str, start: Start) -> dict[str, Position]:
    """For each partition the position after which `start` is. Raises InvalidRequest, TopicNotFound, PositionTrimmed."""
    return {name: _place(broker, name, one) for name, one in ReadTopics(broker, topic, start).first()}


def _place(broker: Broker, topic: str, start: Start) -> Position:
    if start == "beginning":
        ledgers = broker.ledgers(topic)
        return before_ledger(ledgers[0].ledger) if ledgers else EARLIEST
    if isinstance(start, Seqno):
        with CommittedReader(broker, topic, start=start) as reader:
            found = reader.read(limit=1)
        if found is None:
            raise InvalidRequest(f"topic {topic!r} has no visible record with {start} or a later one: give end")
        return position_before(found.positions.first)
    last = broker.last_position(topic) or EARLIEST
    if isinstance(start, Position) and start > Position(last.ledger, last.entry + 1):
        raise InvalidRequest(f"position {start} is after the end of topic {topic!r}: give end")
    return position_before(start_point(broker, topic, start).position)


def position_before(position: Position) -> Position:
    """The last position of a group that continues at this one."""
    if position == EARLIEST:
        return position
    ledger, entry, batch = position
    return Position(ledger, entry, batch - 1) if batch > 0 else Position(ledger, entry - 1)
