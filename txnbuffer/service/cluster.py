"""The decision log in cluster mode: detection of its next owner and of its deletion."""

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
from txnbuffer.service.log_followers import OWN_BATCH_DELAY, LogFollower, LogFollowers

CLUSTER_CONFIG = CoordinatorConfig(one_phase=False, verify_counts=False)
"""The coordinator's configuration in cluster mode."""
CHECK_INTERVAL = 2.0
"""Seconds between two checks that the decision log exists."""
MISSED = 2
"""Consecutive checks that must find it missing before it counts as deleted."""
NOT_FOUND = 404
"""The HTTP status of the admin interface for a missing topic."""


def as_log_deleted(error: Error) -> Error:
    """LogDeleted for an error in cluster mode that says that an internal topic is missing; other errors as they are."""
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
    """Follow the decision log after a position: the entry of another owner ends this one."""

    def decisions_came(placed: PlacedBatch) -> None:
        epoch = newest_owner(placed)
        if epoch is not None:
            coordinator.newer_epoch_seen(epoch, "the decision log")

    followers.follow(LogFollower(broker, decisions, at, decisions_came, fail)).batch_delay = OWN_BATCH_DELAY


async def watch_log(broker: Broker, decisions: str, log: str, fail: Callable[[BaseException], None]) -> None:
    """Fail once the log was deleted or created again: appends in flight to it might wait for a long time."""
    missed = 0
    while missed < MISSED:
        await asyncio.sleep(CHECK_INTERVAL)
        try:
            name = await asyncio.to_thread(broker.incarnation, decisions)
        except TopicNotFound:
            name = ""
        except Error:
            continue  # this check failed
        missed = 0 if name == log else missed + 1
    fail(TopicNotFound(f"topic {decisions!r} was deleted"))
