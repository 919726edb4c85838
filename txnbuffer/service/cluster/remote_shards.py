"""Remote shards: marker writers for their topics, and the messages exchanged with their services.

A topic of another shard has no buffer here; this shard writes only the markers of its own transactions there. All
requests and answers that one turn of the loop has for a shard go into one message; `coordinator/shard_messages.py`
defines it. A shard that waits for an answer asks again every second, so a message that could not be sent is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import Error, ServiceUnavailable, TopicNotFound
from broker_io.port import Broker
from snapshots.shards import shard_of
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.messages import Result
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.coordinator.shard_messages import (
    ShardMessage,
    decode_shard_message,
    encode_shard_message,
    pack_shard_messages,
)
from txnbuffer.errors import CoordinatorStopped, RegistrationRefused
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.cluster.cluster import SharedTopic
from txnbuffer.service.loop import Loop
from txnbuffer.service.topics.appends import AppendPart, Appends
from txnbuffer.service.topics.topics import FINAL, Topics

IDLE = 60.0
"""Seconds after the last marker for a topic until its writer is closed: few of many topics are in use at a time."""


@dataclass(eq=False)
class RemoteTopics:
    """Topics of other shards, `by_name`, that get markers from this shard."""

    _loop: Loop
    _broker: Broker
    _coordinator: Coordinator
    _appends: Appends
    by_name: dict[str, SharedTopic] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)
    _used: dict[str, float] = field(default_factory=dict)

    def topic(self, name: str) -> SharedTopic:
        """Return the entry of a topic, to append markers to it."""
        found = self.by_name.get(name)
        if found is None:
            found = SharedTopic(name, self._loop, self._broker, self._appends, self._opened)
            self.by_name[name] = found
        self._used[name] = self._loop.now()
        return found

    def tick(self) -> None:
        """Close the writers of idle topics and forget them."""
        before = self._loop.now() - IDLE
        for name in [name for name, used in self._used.items() if used < before]:
            if name not in self.by_name or self.by_name[name].close_if_idle():
                self.by_name.pop(name, None)
                del self._used[name]

    def _opened(self, topic: SharedTopic, error: Error | None) -> None:
        """Handle the result of opening a writer: a deleted topic needs no markers."""
        name, now = topic.name, self._loop.now()
        if self.by_name.get(name) is not topic:
            return
        if error is None:
            if name in self._stopped:
                self._stopped.discard(name)
                self._coordinator.topic_resumed(name, now)
        elif isinstance(error, TopicNotFound):
            del self.by_name[name]
            self._appends.fail(topic, error)  # the next tick appends its markers again if they are still wanted
            self._loop.run(self._check_deleted(name))
        elif not error.retryable and name not in self._stopped:
            self._stopped.add(name)
            self._coordinator.topic_stopped(name, error, now)
        self._loop.wake()

    async def _check_deleted(self, name: str) -> None:
        try:
            there = name in await asyncio.to_thread(self._broker.topics)
        except Error:
            return  # the next attempt to write a marker checks again
        if not there:
            self._coordinator.topic_deleted(name, self._loop.now())
            self._loop.wake()


MAX_WAIT = 30.0
"""Seconds after which a registration at another shard fails."""
KNOWN_TICKS = 10
"""Ticks between two checks that remote topics are still registered."""
SILENT = 30.0
"""Seconds without a message after which a shard counts as silent."""
SILENT_TICKS = 3 * KNOWN_TICKS
"""Ticks between two repeated requests to a silent shard: nobody trims its inbox meanwhile."""
REPEATED = ("asked", "awaited", "known")
MAX_WAITING = 100
"""Maximum number of messages that wait for a shard's inbox to become writable; further ones are dropped."""
MESSAGE_BYTES = 128 * 1024
"""Approximate maximum size of one message."""
MAX_IDS = 10_000
"""Transactions of a topic in one request."""


class ShardMessages:
    """Sends and receives messages of shards; a service without other shards has none.

    `queued`: what `send` appends, by shard and field. `awaited`: by topic, transactions whose end other shards await.
    """

    def __init__(
        self, loop: Loop, coordinator: Coordinator, topics: Topics, remote_topics: RemoteTopics, appends: Appends
    ) -> None:
        self.sent = self.received = 0
        self.inboxes = {
            other.number: SharedTopic(other.topic(SHARD_MESSAGES), loop, topics.broker, appends)
            for other in topics.shard.others()
        }
        self.queued: dict[int, dict[str, list[Any]]] = {}
        self.awaited: dict[str, set[TxnId]] = {}
        self._shard = topics.shard
        self._coordinator = coordinator
        self._topics = topics
        self._remote_topics = remote_topics
        self._appends = appends
        self._loop = loop
        self._now = loop.now
        self._registering: dict[str, float] = {}
        self._serving: set[tuple[int, str]] = set()
        self._number = 0
        self._floors: dict[int, dict[int, int]] = {}
        self._ticks = KNOWN_TICKS - 1
        self._last_heard = dict.fromkeys(self.inboxes, loop.now())

    # Requests to other shards

    def register(self, topic: str) -> None:
        """Ask the owner of a topic to register it; the coordinator is notified of the result."""
        self._registering[topic] = self._now() + MAX_WAIT
        self._queue(self._owner(topic), "register", topic)

    def ask(self, topic: str, txns: Iterable[TxnId]) -> None:
        """Ask the coordinators of other shards about ongoing transactions in a topic of this shard."""
        found: dict[int, list[int]] = {}
        for txn in txns:
            if txn.most in self.inboxes:
                found.setdefault(txn.most, []).append(txn.least)
        for number, ids in found.items():
            self._queue(number, "asked", (topic, tuple(sorted(ids)[:MAX_IDS])))

    def await_applied(self, topic: str, least: int) -> None:
        """Ask the owner of a topic to report when a transaction of this shard has ended there."""
        self._queue(self._owner(topic), "awaited", (topic, (least,)))

    async def floor(self, topic: str) -> int | None:
        """The lowest ledger of a local topic that groups of other shards need. Raises ServiceUnavailable."""
        self._number = number = self._number + 1
        answers: dict[int, int] = {}
        self._floors[number] = answers
        try:
            for _ in range(int(MAX_WAIT)):
                for other in self.inboxes.keys() - answers:
                    self._queue(other, "floors_wanted", (topic, number))
                self._loop.wake()
                deadline = self._now() + 1.0
                while len(answers) < len(self.inboxes) and self._now() < deadline:
                    await asyncio.sleep(0.02)
                if len(answers) == len(self.inboxes):
                    return min((ledger for ledger in answers.values() if ledger >= 0), default=None)
        finally:
            del self._floors[number]
        missing = ", ".join(str(other) for other in sorted(self.inboxes.keys() - answers))
        raise ServiceUnavailable(
            f"shard {missing} did not report what its groups need of {topic!r}, nothing is trimmed: check its service"
        )

    def applied(self, topic: str, ended: Iterable[TxnId]) -> None:
        """Report transactions that have ended in a local topic to the shards that wait for them."""
        done = self.awaited[topic].intersection(ended)
        self.awaited[topic] -= done
        self._report_applied(topic, done)

    def missing(self, topic: str) -> None:
        """Report that a local topic was deleted or created again; shards that miss this message ask later."""
        for number in self.inboxes:
            self._queue(number, "missing", topic)

    def tick(self) -> None:
        """Every second: repeat requests without an answer."""
        now = self._now()
        self._ticks += 1
        for topic, deadline in [*self._registering.items()]:
            if now > deadline:
                del self._registering[topic]
                why = f"the service of shard {self._owner(topic)} does not answer: check that it is running"
                self._coordinator.registration_failed(topic, why, now)
            else:
                self._queue(self._owner(topic), "register", topic)
        if self._ticks % KNOWN_TICKS == 0:
            for number in self.inboxes:
                self.queued.setdefault(number, {})  # an empty message shows that this shard is alive
            self.awaited.clear()
            for topic in self._coordinator.topics():
                if not self._shard.owns(topic):
                    self._queue(self._owner(topic), "known", topic)

    def send(self) -> None:
        """Append the messages for other shards."""
        queued, self.queued = self.queued, {}
        for number, rows in queued.items():
            if rows and self._is_silent(number):
                rows = {name: found for name, found in rows.items() if name not in REPEATED}
                if not rows:
                    continue
            inbox = self.inboxes[number]
            if len(inbox.waiting) < MAX_WAITING:
                limit = min(MESSAGE_BYTES, self._coordinator.config.max_message_bytes)
                messages = [
                    encode_shard_message(message) for message in pack_shard_messages(self._shard.number, rows, limit)
                ]
                self.sent += len(messages)
                # The answers show whether a message arrived.
                batch = Batch.of(messages)
                self._appends.add(inbox, AppendPart(batch, batch.weight, lambda: None, lambda _: None))

    # Messages from other shards

    def take(self, placed: PlacedBatch) -> None:
        """Handle messages of other shards."""
        for row in placed.messages:
            message = decode_shard_message(row)
            if message is not None and message.sender in self.inboxes:
                self.received += 1
                self._last_heard[message.sender] = self._now()
                self._handle_requests(message)
                self._handle_answers(message)

    def _handle_requests(self, message: ShardMessage) -> None:
        sender = message.sender
        for topic in message.register:
            if (sender, topic) not in self._serving:
                self._serving.add((sender, topic))
                self._loop.run(self._register_for(sender, topic))
        for topic in message.known:
            if not (self._shard.owns(topic) and topic in self._coordinator.topics()):
                self._queue(sender, "missing", topic)
        for topic, ids in message.asked:
            if self._owner(topic) == sender and len(self._remote_topics.topic(topic).waiting) < MAX_WAITING:
                self._coordinator.query_outcomes(
                    topic, [TxnId(self._shard.number, least) for least in ids], self._now()
                )
        for topic, ids in message.awaited:
            self._await(topic, {TxnId(sender, least) for least in ids})
        if message.floors_wanted:
            self._loop.run(self._report_floors(sender, message.floors_wanted))

    def _handle_answers(self, message: ShardMessage) -> None:
        now, coordinator, sender = self._now(), self._coordinator, message.sender
        for topic in message.registered:
            if self._owner(topic) == sender and self._registering.pop(topic, None) is not None:
                coordinator.topic_snapshotted(topic, now)
        for topic, why in message.refused:
            if self._owner(topic) == sender and self._registering.pop(topic, None) is not None:
                coordinator.registration_failed(topic, why, now, final=topic in message.final)
        for topic in message.missing:
            if self._owner(topic) == sender and topic in coordinator.topics():
                coordinator.topic_missing(topic, now)
        for topic, ids in message.applied:
            if self._owner(topic) == sender:
                coordinator.markers_applied(
                    topic, [(TxnId(self._shard.number, least), Outcome.COMMIT) for least in ids], now
                )
        for _, number, ledger in message.floors:
            if number in self._floors:
                self._floors[number][sender] = ledger

    async def _register_for(self, sender: int, name: str) -> None:
        try:
            result: Result = await self._registered(name)
        except CoordinatorStopped:
            return
        except Error as error:
            result = error
        finally:
            self._serving.discard((sender, name))
        if isinstance(result, Error):
            # The asking shard adds this prefix itself.
            self._queue(
                sender, "refused", (name, str(result).removeprefix(f"topic {name!r} could not be registered: "))
            )
            if isinstance(result, (RegistrationRefused, *FINAL)):
                self._queue(sender, "final", name)
        else:
            self._queue(sender, "registered", name)
        self._loop.wake()

    async def _report_floors(self, sender: int, wanted: Iterable[tuple[str, int]]) -> None:
        """Report floors, but not after losing ownership: the next owner may have groups unknown here."""
        with contextlib.suppress(Error):
            await self._loop.ask(lambda request: self._coordinator.prove_ownership(request, self._now()))
            for topic, number in wanted:
                floor = self._coordinator.consumer_groups.floor(topic)
                self._queue(sender, "floors", (topic, number, -1 if floor is None else floor))
            self._loop.wake()

    async def _registered(self, name: str) -> Result:
        """The coordinator's answer to a registration. Raises on an invalid name or a stopped topic."""
        self._topics.check(name)
        topic = self._topics.get(name)
        if topic is not None and topic.problem is not None and not topic.missing:
            raise topic.problem
        return await self._loop.ask(lambda request: self._coordinator.register_for_shard(request, name, self._now()))

    def _await(self, topic: str, txns: set[TxnId]) -> None:
        known = self._topics.get(topic)
        if known is None or known.followed is None:
            return
        buffer = known.followed.buffer
        done = {txn for txn in txns if buffer.has_ended(txn)}
        self._report_applied(topic, done)
        if len(done) < len(txns):
            self.awaited.setdefault(topic, set()).update(txns - done)

    def _report_applied(self, topic: str, done: set[TxnId]) -> None:
        for number in {txn.most for txn in done}:
            ids = sorted(txn.least for txn in done if txn.most == number)
            self._queue(number, "applied", (topic, tuple(ids)))

    def _is_silent(self, number: int) -> bool:
        """Whether a shard is silent and this tick does not repeat requests to silent shards."""
        return self._now() - self._last_heard[number] > SILENT and self._ticks % SILENT_TICKS != 0

    def _owner(self, topic: str) -> int:
        return shard_of(topic, self._shard.of)

    def _queue(self, number: int, field: str, row: Any) -> None:
        self.queued.setdefault(number, {}).setdefault(field, []).append(row)
