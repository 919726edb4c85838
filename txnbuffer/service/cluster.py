"""The log of a service beside a cluster, where others write too: its next owner, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.batch import PlacedBatch
from broker_io.errors import ClusterRefused, Error, TopicNotFound
from broker_io.port import Broker
from broker_io.position import Position
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import LogDeleted
from txnbuffer.service.decision_log import newest_owner
from txnbuffer.service.log_followers import GATHER_OWN, LogFollower, LogFollowers

CLUSTER_CONFIG = CoordinatorConfig(one_phase=False, verify_counts=False)
"""How a coordinator decides where others write the topics too."""
CHECK_INTERVAL = 2.0
"""Seconds between two looks whether the decision log is still there."""
MISSED = 2
"""So often one after the other it is missing before it counts as gone."""
NOT_FOUND = 404
"""The status of an answer about what isn't there."""


def as_log_deleted(error: Error) -> Error:
    """What ended a service beside a cluster, or its standing by: where a topic of ours is gone, the log is."""
    gone = isinstance(error, TopicNotFound) or (isinstance(error, ClusterRefused) and error.status == NOT_FOUND)
    return LogDeleted(str(error)) if gone else error


def follow_decisions(
    followers: LogFollowers,
    broker: Broker,
    decisions: str,
    at: Position,
    coordinator: Coordinator,
    fail: Callable[[BaseException], None],
) -> None:
    """Read the decision log behind a position: the entry of the next owner ends this one."""

    def decisions_came(placed: PlacedBatch) -> None:
        epoch = newest_owner(placed)
        if epoch is not None:
            coordinator.newer_epoch_seen(epoch, "the decision log")

    followers.follow(LogFollower(broker, decisions, at, decisions_came, fail)).gather = GATHER_OWN


async def watch_log(broker: Broker, decisions: str, log: str, fail: Callable[[BaseException], None]) -> None:
    """See that the log is still the one that was taken over: what is under way to one that is gone may wait long."""
    missed = 0
    while missed < MISSED:
        await asyncio.sleep(CHECK_INTERVAL)
        try:
            name = await asyncio.to_thread(broker.incarnation, decisions)
        except TopicNotFound:
            name = ""
        except Error:
            continue  # it could not be seen this time
        missed = 0 if name == log else missed + 1
    fail(TopicNotFound(f"topic {decisions!r} was deleted"))
