"""What an engine needs beside a cluster: markers need writers, counts tails, and other shards letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.position import EARLIEST, Position
from txnbuffer.service.beginning import Beginning
from txnbuffer.service.counting import Counting
from txnbuffer.service.decision_log import newest_owner
from txnbuffer.service.elsewhere import Elsewhere
from txnbuffer.service.following import GATHER_OWN, Follower, Following
from txnbuffer.service.letters import Letters
from txnbuffer.service.marking import MarkerWriters
from txnbuffer.service.remaking import Remaking
from txnbuffer.shards import LETTERS

if TYPE_CHECKING:
    from txnbuffer.service.engine import Engine
    from txnbuffer.service.topic import Topic


def read_others(engine: Engine, following: Following, decisions: str, at: Position, inbox: Position | None) -> None:
    """Read what others write: the decision log behind `at`, for the next owner's entry ends this one, and letters."""
    coordinator, topics, carrying = engine.coordinator, engine.topics, engine.carrying
    marking = carrying.marking = MarkerWriters(engine.broker, engine.run, engine.appends.release)
    carrying.counting = Counting(engine.broker, engine.run, carrying.count)
    again = engine.registering.again
    carrying.remaking = Remaking(coordinator, topics, engine.run, again, engine.now, engine.wake)
    engine.registering.beginning = Beginning(engine.broker, coordinator.border)

    def decisions_came(placed: PlacedBatch) -> None:
        epoch = newest_owner(placed)
        if epoch is not None:
            coordinator.newer_epoch_seen(epoch, "the decision log")

    following.follow(Follower(engine.broker, decisions, at, decisions_came, engine.fail)).gather = GATHER_OWN
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


def troubles_elsewhere(engine: Engine) -> dict[str, Error | None]:
    """What keeps markers and letters from topics of other shards, by what they are."""
    return {f"writing to {topic.name}": topic.trouble for topic in writers_elsewhere(engine)}


def writers_elsewhere(engine: Engine) -> list[Topic]:
    """Topics of other shards that have writers of ours."""
    elsewhere, letters = engine.carrying.elsewhere, engine.carrying.letters
    if elsewhere is None or letters is None:
        return []
    return [*elsewhere.by_name.values(), *letters.inboxes.values()]
