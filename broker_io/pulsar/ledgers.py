"""Ledgers and cursors of a cluster's topics: their state at one moment, and rolling, trimming and compacting them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker_io.errors import ClusterRefused, ServiceUnavailable
from broker_io.port import Ledger
from broker_io.position import EARLIEST, Position
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.answers import integer, mapping, read_answer
from broker_io.pulsar.cluster import Cluster, path_of

SUBSCRIPTION = "__txnbuffer"
"""The durable subscription that keeps the messages of a topic."""
COMPACTION = "__compaction"
"""The cursor of Pulsar's compaction, at the end of what was compacted."""
LAST = "txnbuffer.last"
"""The property that stores the last position when trimming leaves no message."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledgers of a topic, ascending, and its cursors.

    `last` is the last entry ever written, as far as the cluster remembers, without its batch index. `cursors` maps the
    names of all cursors to the last position that each has acknowledged. `closing`: the topic is being unloaded.
    """

    ledgers: list[Ledger]
    last: Position
    cursors: dict[str, Position]
    closing: bool = False

    @property
    def newest(self) -> int:
        return self.ledgers[-1].ledger

    def find(self, number: int) -> Ledger | None:
        return next((ledger for ledger in self.ledgers if ledger.ledger == number), None)

    def empty_between(self, low: int, high: int) -> bool:
        """Whether all ledgers between two are empty."""
        return not any(ledger.entries for ledger in self.ledgers if low < ledger.ledger < high)


CLOSING = ("Closed", "Fenced", "FencedForDeletion")
"""States of a managed ledger that takes no more messages until its topic is loaded again."""
NEW = LedgerState([], Position(-1, -1), {})
"""The state of a topic that was just created."""


def topic_state(cluster: Cluster, topic: str, *, retry: bool = True) -> LedgerState:
    return read_state(cluster.ask("GET", topic, "internalStats", retry=retry))


def entry_position(message_id: Any) -> Position:
    """The position of the entry in an answer that is a message id."""
    return Position(integer(message_id["ledgerId"]), integer(message_id["entryId"]))


def last_position(cluster: Cluster, topic: str) -> Position | None:
    found = cluster.query(
        topic, "lastMessageId", lambda answer: entry_position(answer)._replace(batch=integer(answer["batchIndex"]))
    )
    if found.entry >= 0:
        return found
    # The last message is gone, if there ever was one: take the latest position that is recorded somewhere.
    state = topic_state(cluster, topic)
    kept = cluster.property(topic, LAST)
    known = [state.last, state.cursors.get(SUBSCRIPTION, state.last)]
    known = [place for place in known if place.entry >= 0]
    if kept is not None:
        known.append(read_answer(f"property {LAST} of topic {topic!r}", kept, _place))
    return max(known, default=None)


def read_state(stats: Any) -> LedgerState:
    """The state in an answer to `internalStats`. Of positions, `LEDGER:-1` is before the first entry.

    Raises ClusterRefused for an answer of another form.
    """
    return read_answer("internalStats of a topic", stats, _state_in)


def _state_in(stats: Any) -> LedgerState:
    rows = stats["ledgers"]
    ledgers = []
    for index, row in enumerate(rows):
        entries, size, newest = integer(row["entries"]), integer(row["size"]), index == len(rows) - 1
        if newest:  # the row of an open ledger has no counts
            entries = max(entries, integer(stats["currentLedgerEntries"]))
            size = max(size, integer(stats["currentLedgerSize"]))
        # The next broker that loads the topic replaces an empty ledger.
        ledgers.append(Ledger(integer(row["ledgerId"]), entries, size, not newest, lasting=entries > 0))
    if not ledgers:
        raise ValueError("a loaded topic has a ledger")
    cursors = {name: _place(cursor["markDeletePosition"]) for name, cursor in stats["cursors"].items()}
    closing = str(stats.get("state")) in CLOSING
    return LedgerState(ledgers, _place(stats["lastConfirmedEntry"]), cursors, closing)


def _place(text: str) -> Position:
    return Position(*map(integer, Position.parse(text)))


TRIM_SECONDS = 3.0
"""Seconds that trimming waits for ledgers to go; other subscriptions may keep them for ever."""
LOOK_SECONDS = 0.05
LONGEST_PAUSE = 0.5
EARLIEST_ID = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}


def create_subscription(admin: AdminClient, path: str) -> None:
    """Keep all existing and future messages of a topic."""
    try:
        admin.ask("PUT", f"{path}/subscription/{SUBSCRIPTION}", EARLIEST_ID)
    except ClusterRefused as error:
        if error.status != 409:  # it is there already
            raise


class LedgerUpkeep:
    """Changes of a topic's ledgers by the REST interface."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clock = cluster.environment.clock

    def roll(self, topic: str) -> None:
        """Unload the topic: it is loaded again with a new ledger, and its readers and writers reconnect."""
        newest = topic_state(self._cluster, topic).ledgers[-1]
        if not newest.entries:
            return

        def attempt() -> None:
            self._cluster.ask("PUT", topic, "unload")
            if topic_state(self._cluster, topic).newest == newest.ledger:
                raise ServiceUnavailable(f"topic {topic!r} was unloaded and has no new ledger yet")

        self._cluster.retry(f"a new ledger of topic {topic!r}", attempt)

    def trim(self, topic: str, first_ledger: int, *, wait: float = TRIM_SECONDS) -> None:
        """Move the subscription to the first ledger that stays; ledgers that no other cursor needs are then dropped."""
        state = topic_state(self._cluster, topic)
        numbers = [ledger.ledger for ledger in state.ledgers]
        first = next((number for number in numbers if number >= first_ledger), numbers[-1])
        if first == numbers[0]:
            return
        if not any(ledger.entries for ledger in state.ledgers if ledger.ledger >= first):
            last = last_position(self._cluster, topic)  # no message will be left to show it
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
        """Compact all messages, and drop the compacted ledgers below `floor`.

        The ledger of the last message stays, so that the end of the topic remains known.
        """
        end = topic_state(self._cluster, topic).last
        if end.entry < 0:
            return
        self._cluster.retry(f"topic {topic!r} to be compacted", lambda: self._compacted(topic, end))
        state = topic_state(self._cluster, topic)
        horizon = state.cursors.get(COMPACTION, EARLIEST)
        first = min(horizon.ledger, state.last.ledger if state.last.entry >= 0 else state.newest)
        if floor is not None:
            first = min(first, max(floor, state.ledgers[0].ledger))
        self.trim(topic, first, wait=0.0)  # the last ledger, though compacted, is dropped at the next roll

    def _compacted(self, topic: str, end: Position) -> None:
        """Raises ServiceUnavailable if compaction did not reach the end, for example because the topic moved."""
        try:
            self._cluster.ask("PUT", topic, "compaction")
        except ClusterRefused as error:
            if error.status != 409:  # one is running: wait for it, then check how far it came
                raise
        while (status := self._cluster.query(topic, "compaction", mapping)).get("status") == "RUNNING":
            self._clock.sleep(LOOK_SECONDS)
            self._cluster.check()
        if topic_state(self._cluster, topic).cursors.get(COMPACTION, Position(-1, -1)) < end:
            raise ServiceUnavailable(
                f"compaction of topic {topic!r} ended with {status.get('status')} before {end} "
                f"({status.get('lastError')})"
            )

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = self._clock.monotonic() + seconds
        pause = LOOK_SECONDS
        while not done() and self._clock.monotonic() < deadline:
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
