"""What an engine needs beside a cluster: markers need writers, counts tails, and other shards letters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from broker_io.batch import PlacedBatch
from broker_io.errors import ClusterRefused, Error, TopicNotFound
from broker_io.position import EARLIEST, Position
from txnbuffer.coordinator.letters import TOPIC as LETTERS
from txnbuffer.errors import LogDeleted
from txnbuffer.service.beginning import Beginning
from txnbuffer.service.counting import Counting
from txnbuffer.service.decision_log import newest_owner
from txnbuffer.service.elsewhere import Elsewhere
from txnbuffer.service.following import GATHER_OWN, Follower, Following
from txnbuffer.service.letters import Letters
from txnbuffer.service.marking import MarkerWriters
from txnbuffer.service.remaking import Remaking

if TYPE_CHECKING:
    from txnbuffer.service.engine import Engine
    from txnbuffer.service.topic import Topic

LOOK = 2.0
"""Seconds between two looks whether the decision log is still there."""
MISSED = 2
"""So often one after the other it is missing before it counts as gone."""
NOT_FOUND = 404
"""The status of an answer about what isn't there."""


def of_log(error: Error) -> Error:
    """What ended a service beside a cluster, or its standing by: where a topic of ours is gone, the log is."""
    gone = isinstance(error, TopicNotFound) or (isinstance(error, ClusterRefused) and error.status == NOT_FOUND)
    return LogDeleted(str(error)) if gone else error


def read_others(engine: Engine, following: Following, decisions: str, at: Position, inbox: Position | None) -> None:
    """Read what others write: the decision log behind `at`, for the next owner's entry ends this one, and letters."""
    coordinator, topics, carrying = engine.coordinator, engine.topics, engine.carrying
    marking = carrying.marking = MarkerWriters(engine.broker, engine.run, engine.appends.release)
    carrying.counting = Counting(engine.broker, engine.run, carrying.count)
    carrying.doubting = Counting(engine.broker, engine.run, carrying.doubt)
    again = engine.registering.again
    carrying.remaking = Remaking(coordinator, topics, engine.run, again, engine.now, engine.wake)
    engine.registering.beginning = Beginning(engine.broker, coordinator.border)

    def decisions_came(placed: PlacedBatch) -> None:
        epoch = newest_owner(placed)
        if epoch is not None:
            coordinator.newer_epoch_seen(epoch, "the decision log")

    following.follow(Follower(engine.broker, decisions, at, decisions_came, engine.fail)).gather = GATHER_OWN
    engine.run(_watch_log(engine, decisions))
    shard = topics.shard
    if shard.of > 1:
        elsewhere = Elsewhere(engine.broker, coordinator, engine.appends, marking, engine.run, engine.now, engine.wake)
        letters = Letters(
            shard,
            coordinator,
            topics,
            elsewhere,
            engine.appends,
            marking,
            engine.run,
            engine.ask,
            engine.group_floor,
            engine.now,
            engine.wake,
        )
        carrying.elsewhere, carrying.letters = elsewhere, letters
        following.follow(Follower(engine.broker, shard.topic(LETTERS), inbox or EARLIEST, letters.take, engine.fail))


async def _watch_log(engine: Engine, decisions: str) -> None:
    """See that the log is still the one that was taken over: what is under way to one that is gone may wait long."""
    missed = 0
    while missed < MISSED:
        await asyncio.sleep(LOOK)
        try:
            name = await asyncio.to_thread(engine.broker.incarnation, decisions)
        except TopicNotFound:
            name = ""
        except Error:
            continue  # it could not be seen this time
        missed = 0 if name == engine.log else missed + 1
    engine.fail(TopicNotFound(f"topic {decisions!r} was deleted"))


def troubles_elsewhere(engine: Engine) -> dict[str, Error | None]:
    """What keeps markers and letters from topics of other shards, by what they are."""
    return {f"writing to {topic.name}": topic.trouble for topic in writers_elsewhere(engine)}


def writers_elsewhere(engine: Engine) -> list[Topic]:
    """Topics of other shards that have writers of ours."""
    elsewhere, letters = engine.carrying.elsewhere, engine.carrying.letters
    if elsewhere is None or letters is None:
        return []
    return [*elsewhere.by_name.values(), *letters.inboxes.values()]
