"""What a cluster knows of a topic's ledgers and cursors, as of one moment.

Rolling, trimming and compacting topics of a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker_io.errors import ClusterRefused, ServiceUnavailable
from broker_io.port import Ledger
from broker_io.position import Position
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.cluster import Cluster, path_of

SUBSCRIPTION = "__txnbuffer"
"""The durable subscription of ours by which a topic's messages are kept."""
COMPACTION = "__compaction"
"""The cursor of Pulsar's compaction: it saw everything up to there."""
LAST = "txnbuffer.last"
"""The property that keeps the last position where trimming leaves no message."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """`ledgers` ascend; `last` is the last entry ever written as far as the cluster remembers, its batch not told.

    `cursors` maps the names of durable and other cursors to the last position that each has done with.
    """

    ledgers: list[Ledger]
    last: Position
    cursors: dict[str, Position]

    @property
    def newest(self) -> int:
        return self.ledgers[-1].ledger

    def find(self, number: int) -> Ledger | None:
        return next((ledger for ledger in self.ledgers if ledger.ledger == number), None)

    def empty_between(self, low: int, high: int) -> bool:
        """Whether no ledger between two holds an entry."""
        return not any(ledger.entries for ledger in self.ledgers if low < ledger.ledger < high)


NEW = LedgerState([], Position(-1, -1), {})
"""What is known of a topic that was made just now."""


def topic_state(cluster: Cluster, topic: str, *, retry: bool = True) -> LedgerState:
    return read_state(cluster.ask("GET", topic, "internalStats", retry=retry))


def last_position(cluster: Cluster, topic: str) -> Position | None:
    found = cluster.ask("GET", topic, "lastMessageId")
    if found["entryId"] >= 0:
        return Position(found["ledgerId"], found["entryId"], found["batchIndex"])
    # The message itself is gone, if there ever was one: the best of what remembers it.
    state = topic_state(cluster, topic)
    kept = (cluster.ask("GET", topic, "properties") or {}).get(LAST)
    known = [state.last, state.cursors.get(SUBSCRIPTION, state.last)]
    known = [place for place in known if place.entry >= 0]
    if kept is not None:
        known.append(Position.parse(kept))
    return max(known, default=None)


def read_state(stats: Any) -> LedgerState:
    """The state that an answer to `internalStats` tells."""
    rows = stats["ledgers"]
    ledgers = []
    for index, row in enumerate(rows):
        entries, size, newest = row["entries"], row["size"], index == len(rows) - 1
        if newest:  # its own row counts nothing while it is open
            entries, size = max(entries, stats["currentLedgerEntries"]), max(size, stats["currentLedgerSize"])
        # Whoever loads the topic next replaces an empty one.
        ledgers.append(Ledger(row["ledgerId"], entries, size, not newest, lasting=entries > 0))
    cursors = {name: read_place(cursor["markDeletePosition"]) for name, cursor in stats["cursors"].items()}
    return LedgerState(ledgers, read_place(stats["lastConfirmedEntry"]), cursors)


def read_place(text: str) -> Position:
    """`LEDGER:ENTRY` as the cluster writes it, which may be `LEDGER:-1`, behind no entry."""
    ledger, _, entry = text.partition(":")
    return Position(int(ledger), int(entry))


TRIM_SECONDS = 3.0
"""How long trimming waits for ledgers to go; other subscriptions may keep them for ever."""
LOOK_SECONDS = 0.05
LONGEST_PAUSE = 0.5
EARLIEST_ID = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}


def create_subscription(admin: AdminClient, path: str) -> None:
    """Keep every message that a topic still has, and all that come."""
    try:
        admin.ask("PUT", f"{path}/subscription/{SUBSCRIPTION}", EARLIEST_ID)
    except ClusterRefused as error:
        if error.status != 409:  # it is there already
            raise


class LedgerUpkeep:
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
        self._move_subscription(topic, first)
        self._wait(lambda: self._trimmed(topic, first), wait)

    def _move_subscription(self, topic: str, first: int) -> None:
        create_subscription(
            self._cluster.admin, path_of(self._cluster.namespace, topic)
        )  # a topic of others may have none yet
        place = {"ledgerId": first, "entryId": 0, "partitionIndex": -1, "batchIndex": -1}
        self._cluster.ask("POST", topic, f"subscription/{SUBSCRIPTION}/resetcursor", place)

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

    def _horizon(self, state: LedgerState) -> Position:
        return state.cursors.get(COMPACTION, Position(-1, -1))

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = LOOK_SECONDS
        while not done() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
