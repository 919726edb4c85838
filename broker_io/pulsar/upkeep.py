"""Rolling, trimming and compacting topics of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker_io.errors import ClusterRefused, ServiceUnavailable
from broker_io.position import Position
from broker_io.pulsar.address import path_of
from broker_io.pulsar.admin import Admin
from broker_io.pulsar.cluster import Cluster
from broker_io.pulsar.state import COMPACTION, HOLD, LAST, TopicState, last_position, topic_state

TRIM_SECONDS = 3.0
"""How long trimming waits for ledgers to go; other subscriptions may keep them for ever."""
LOOK_SECONDS = 0.05
LONGEST_PAUSE = 0.5
EARLIEST_ID = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}


def hold(admin: Admin, path: str) -> None:
    """Keep every message that a topic still has, and all that come."""
    try:
        admin.ask("PUT", f"{path}/subscription/{HOLD}", EARLIEST_ID)
    except ClusterRefused as error:
        if error.status != 409:  # it is there already
            raise


class Upkeep:
    """What changes a topic's ledgers, by the REST interface."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def roll(self, topic: str) -> None:
        """Unload the topic: it comes back with a new ledger, and takes its readers and writers with it."""
        newest = topic_state(self._cluster, topic).ledgers[-1]
        if not newest.entries:
            return

        def attempt() -> None:
            self._cluster.ask("PUT", topic, "unload")
            if topic_state(self._cluster, topic).newest == newest.ledger:
                raise ServiceUnavailable(f"topic {topic!r} was unloaded and has no new ledger yet")

        self._cluster.retry(f"a new ledger of topic {topic!r}", attempt)

    def trim(self, topic: str, first_ledger: int, *, wait: float = TRIM_SECONDS) -> None:
        """Move our hold to the first ledger that stays; what nothing else holds goes then, at once as a rule."""
        state = topic_state(self._cluster, topic)
        numbers = [ledger.ledger for ledger in state.ledgers]
        first = next((number for number in numbers if number >= first_ledger), numbers[-1])
        if first == numbers[0]:
            return
        if not any(ledger.entries for ledger in state.ledgers if ledger.ledger >= first):
            last = last_position(self._cluster, topic)  # nothing will be left that tells it
            if last is not None:
                self._cluster.ask("PUT", topic, "properties", {LAST: str(last)})
        self._move_hold(topic, first)
        self._wait(lambda: self._trimmed(topic, first), wait)

    def _move_hold(self, topic: str, first: int) -> None:
        hold(self._cluster.admin, path_of(self._cluster.namespace, topic))  # a topic of others may have none yet
        place = {"ledgerId": first, "entryId": 0, "partitionIndex": -1, "batchIndex": -1}
        self._cluster.ask("POST", topic, f"subscription/{HOLD}/resetcursor", place)

    def _trimmed(self, topic: str, first: int) -> bool:
        self._cluster.ask("POST", topic, "trim")
        return topic_state(self._cluster, topic).ledgers[0].ledger >= first

    def compact(self, topic: str, floor: int | None) -> None:
        """Compact all there is, and drop the ledgers behind; from `floor` on they are kept.

        The ledger of the last message stays, so that the end of the topic remains known.
        """
        end = topic_state(self._cluster, topic).last
        if end.entry < 0:
            return
        self._cluster.retry(f"topic {topic!r} to be compacted", lambda: self._compacted(topic, end))
        state = topic_state(self._cluster, topic)
        horizon = state.cursors[COMPACTION]
        first = min(horizon.ledger, state.last.ledger if state.last.entry >= 0 else state.newest)
        if floor is not None:
            first = min(first, max(floor, state.ledgers[0].ledger))
        self.trim(topic, first, wait=0.0)  # a ledger that was compacted while it was the last goes at the next roll

    def _compacted(self, topic: str, end: Position) -> None:
        """Raises ServiceUnavailable if compaction did not reach the end, as when the topic moved meanwhile."""
        try:
            self._cluster.ask("PUT", topic, "compaction")
        except ClusterRefused as error:
            if error.status != 409:  # it is under way: wait for that one, and then see how far it came
                raise
        status = self._cluster.ask("GET", topic, "compaction")
        while status["status"] == "RUNNING":
            time.sleep(LOOK_SECONDS)
            self._cluster.check()
            status = self._cluster.ask("GET", topic, "compaction")
        if self._horizon(topic_state(self._cluster, topic)) < end:
            raise ServiceUnavailable(
                f"compaction of topic {topic!r} ended with {status['status']} before {end} ({status.get('lastError')})"
            )

    def _horizon(self, state: TopicState) -> Position:
        return state.cursors.get(COMPACTION, Position(-1, -1))

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = LOOK_SECONDS
        while not done() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
