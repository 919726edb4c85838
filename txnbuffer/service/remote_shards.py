"""Topics of other shards: no buffer of ours, only markers of transactions that our clients wrote there.

Letters to and from the services of other shards; what they are stands in `coordinator/letters.py`.

All that a turn of the loop has for one shard goes into one letter. Whoever waits for an answer asks again every
second, so nothing is kept of a letter that could not be sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from broker_io.batch import PlacedBatch
from broker_io.errors import Error, ServiceUnavailable, TopicNotFound
from broker_io.port import Broker
from snapshots.shards import Shard, shard_of
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
from txnbuffer.service.appends import Appends
from txnbuffer.service.cluster_topics import MarkerWriters
from txnbuffer.service.registration import FINAL
from txnbuffer.service.sends import MessagesPart
from txnbuffer.service.topic import ServiceTopic, Topics

IDLE = 60.0
"""Seconds after the last marker for a topic until its writer is closed: who has many topics uses few at a time."""


class RemoteTopics:
    """`by_name`: those that markers were written to, or are to be. `run` runs something beside the loop's turns."""

    def __init__(
        self,
        broker: Broker,
        coordinator: Coordinator,
        appends: Appends,
        marker_writers: MarkerWriters,
        run: Callable[[Coroutine[Any, Any, None]], None],
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.by_name: dict[str, ServiceTopic] = {}
        self._broker = broker
        self._coordinator = coordinator
        self._appends = appends
        self._marker_writers = marker_writers
        self._run = run
        self._now = now
        self._wake = wake
        self._stopped: set[str] = set()
        self._used: dict[str, float] = {}
        marker_writers.opened = self.opened

    def topic(self, name: str) -> ServiceTopic:
        """The entry of a topic, to append markers to."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = ServiceTopic(name, shared=True)
        self._used[name] = self._now()
        return found

    def tick(self) -> None:
        """Forget topics that were idle for long."""
        before = self._now() - IDLE
        for name in [name for name, used in self._used.items() if used < before]:
            if name not in self.by_name or self._marker_writers.let_go(self.by_name[name]):
                self.by_name.pop(name, None)
                del self._used[name]

    def opened(self, topic: ServiceTopic, error: Error | None) -> None:
        """What came of opening a writer: a topic that is gone needs no markers."""
        name = topic.name
        if self.by_name.get(name) is not topic:
            return
        if error is None:
            if name in self._stopped:
                self._stopped.discard(name)
                self._coordinator.topic_resumed(name, self._now())
        elif isinstance(error, TopicNotFound):
            del self.by_name[name]
            self._appends.fail(topic, error)  # its markers come again with the next look at the time, if wanted
            self._run(self._look(name))
        elif not error.retryable and name not in self._stopped:
            self._stopped.add(name)
            self._coordinator.topic_stopped(name, error, self._now())
        self._wake()

    async def _look(self, name: str) -> None:
        try:
            there = name in await asyncio.to_thread(self._broker.topics)
        except Error:
            return  # a marker that is still wanted asks again
        if not there:
            self._coordinator.topic_deleted(name, self._now())
            self._wake()


MAX_WAIT = 30.0
"""Seconds after which a registration at another shard is given up."""
KNOWN_TICKS = 10
"""Ticks between two questions whether topics of others are still registered."""
SILENT = 30.0
"""Seconds without a letter after which a shard is taken for one that is away."""
SLOWLY = 3 * KNOWN_TICKS
"""Ticks between two times that it is asked the same: nobody trims its partition meanwhile."""
REPEATED = ("asked", "awaited", "known")
MAX_WAITING = 100
"""Letters that wait for a shard's partition to be written to; beyond them none is kept."""
LETTER_BYTES = 128 * 1024
"""What one letter takes at most, about."""
MAX_IDS = 10_000
"""Transactions of a topic that are asked about at once."""

Ask = Callable[[Callable[[int], None]], Coroutine[Any, Any, Result]]


class ShardMessages:
    """`ask` gives the coordinator's answer to a request; `floor` the lowest ledger of a topic that a group needs."""

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator,
        topics: Topics,
        remote_topics: RemoteTopics,
        appends: Appends,
        marker_writers: MarkerWriters,
        run: Callable[[Coroutine[Any, Any, None]], None],
        ask: Ask,
        floor: Callable[[str], int | None],
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.sent = self.received = 0
        self.inboxes = {
            other.number: ServiceTopic(other.topic(SHARD_MESSAGES), shared=True) for other in shard.others()
        }
        self._shard = shard
        self._coordinator = coordinator
        self._topics = topics
        self._remote_topics = remote_topics
        self._appends = appends
        self._marker_writers = marker_writers
        self._run = run
        self._ask = ask
        self._floor = floor
        self._now = now
        self._wake = wake
        self._out: dict[int, dict[str, list[Any]]] = {}
        self._registering: dict[str, float] = {}
        self._serving: set[tuple[int, str]] = set()
        self._awaited: dict[str, set[TxnId]] = {}
        self._number = 0
        self._floors: dict[int, dict[int, int]] = {}
        self._ticks = KNOWN_TICKS - 1
        self._heard = dict.fromkeys(self.inboxes, now())

    # What we want of others

    def register(self, topic: str) -> None:
        """Have the owner of a topic register it; the coordinator is told what came of it."""
        self._registering[topic] = self._now() + MAX_WAIT
        self._put(self._owner(topic), "register", topic)

    def ask(self, topic: str, txns: Iterable[TxnId]) -> None:
        """Ask the coordinators of other shards about transactions that are ongoing in a topic of ours."""
        found: dict[int, list[int]] = {}
        for txn in txns:
            if txn.most in self.inboxes:
                found.setdefault(txn.most, []).append(txn.least)
        for number, ids in found.items():
            self._put(number, "asked", (topic, tuple(sorted(ids)[:MAX_IDS])))

    def await_applied(self, topic: str, least: int) -> None:
        """Have the owner of a topic tell when a transaction of ours has ended there."""
        self._put(self._owner(topic), "awaited", (topic, (least,)))

    async def floor(self, topic: str) -> int | None:
        """The lowest ledger of a topic of ours that groups of other shards need. Raises ServiceUnavailable."""
        self._number += 1
        number = self._number
        answers: dict[int, int] = {}
        self._floors[number] = answers
        try:
            for _ in range(int(MAX_WAIT)):
                for other in self.inboxes.keys() - answers:
                    self._put(other, "floors_wanted", (topic, number))
                self._wake()
                await self._answered(answers, 1.0)
                if len(answers) == len(self.inboxes):
                    return min((ledger for ledger in answers.values() if ledger >= 0), default=None)
        finally:
            del self._floors[number]
        missing = ", ".join(str(other) for other in sorted(self.inboxes.keys() - answers))
        raise ServiceUnavailable(
            f"the service of shard {missing} does not tell what its groups need of {topic!r}: nothing is trimmed"
        )

    def applied(self, topic: str, ended: Iterable[TxnId]) -> None:
        """A buffer of ours has applied markers."""
        awaited = self._awaited.get(topic)
        if awaited:
            done = awaited.intersection(ended)
            awaited -= done
            self._tell_applied(topic, done)

    def missing(self, topic: str) -> None:
        """A topic of ours was deleted, or is another one now: whoever takes it for registered asks some time, too."""
        for number in self.inboxes:
            self._put(number, "missing", topic)

    def tick(self) -> None:
        """About every second: ask again."""
        now = self._now()
        self._ticks += 1
        for topic, deadline in [*self._registering.items()]:
            if now > deadline:
                del self._registering[topic]
                why = f"the service of shard {self._owner(topic)} does not answer"
                self._coordinator.registration_failed(topic, why, now)
            else:
                self._put(self._owner(topic), "register", topic)
        if self._ticks % KNOWN_TICKS == 0:
            for number in self.inboxes:
                self._out.setdefault(number, {})  # if it is only to be heard of
            self._awaited.clear()
            for topic in self._coordinator.topics():
                if not self._shard.owns(topic):
                    self._put(self._owner(topic), "known", topic)

    def send(self) -> None:
        """Write what there is for others."""
        out, self._out = self._out, {}
        for number, rows in out.items():
            if rows and self._is_away(number):
                rows = {name: found for name, found in rows.items() if name not in REPEATED}
                if not rows:
                    continue
            inbox = self.inboxes[number]
            if len(inbox.waiting) < MAX_WAITING:
                limit = min(LETTER_BYTES, self._coordinator.config.max_message_bytes)
                messages = [
                    encode_shard_message(letter) for letter in pack_shard_messages(self._shard.number, rows, limit)
                ]
                self.sent += len(messages)
                self._appends.add(inbox, MessagesPart(messages, _nothing, _nothing))
            self._marker_writers.need(inbox)

    # What others want of us

    def take(self, placed: PlacedBatch) -> None:
        """Letters that have come."""
        for message in placed.messages:
            letter = decode_shard_message(message)
            if letter is not None and letter.sender in self.inboxes:
                self.received += 1
                self._heard[letter.sender] = self._now()
                self._questions(letter)
                self._answers(letter)

    def _questions(self, letter: ShardMessage) -> None:
        sender = letter.sender
        for topic in letter.register:
            if (sender, topic) not in self._serving:
                self._serving.add((sender, topic))
                self._run(self._register_for(sender, topic))
        for topic in letter.known:
            if not (self._shard.owns(topic) and self._coordinator.is_registered(topic)):
                self._put(sender, "missing", topic)
        for topic, ids in letter.asked:
            if self._owner(topic) == sender and len(self._remote_topics.topic(topic).waiting) < MAX_WAITING:
                self._coordinator.query_outcomes(
                    topic, [TxnId(self._shard.number, least) for least in ids], self._now()
                )
        for topic, ids in letter.awaited:
            self._await(topic, {TxnId(sender, least) for least in ids})
        if letter.floors_wanted:
            self._run(self._tell_floors(sender, letter.floors_wanted))

    def _answers(self, letter: ShardMessage) -> None:
        now, coordinator, sender = self._now(), self._coordinator, letter.sender
        for topic in letter.registered:
            if self._owner(topic) == sender and self._registering.pop(topic, None) is not None:
                coordinator.topic_snapshotted(topic, now)
        for topic, why in letter.refused:
            if self._owner(topic) == sender and self._registering.pop(topic, None) is not None:
                coordinator.registration_failed(topic, why, now, final=topic in letter.final)
        for topic in letter.missing:
            if self._owner(topic) == sender and coordinator.is_registered(topic):
                coordinator.topic_missing(topic, now)
        for topic, ids in letter.applied:
            if self._owner(topic) == sender:
                coordinator.markers_applied(
                    topic, [(TxnId(self._shard.number, least), Outcome.COMMIT) for least in ids], now
                )
        for _, number, ledger in letter.floors:
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
            # The one who asked says of it that it could not be registered, too.
            self._put(sender, "refused", (name, str(result).removeprefix(f"topic {name!r} could not be registered: ")))
            if isinstance(result, (RegistrationRefused, *FINAL)):
                self._put(sender, "final", name)
        else:
            self._put(sender, "registered", name)
        self._wake()

    async def _tell_floors(self, sender: int, wanted: Iterable[tuple[str, int]]) -> None:
        """Not by a zombie: of groups that its successor began it knows nothing."""
        with contextlib.suppress(Error):
            await self._ask(lambda request: self._coordinator.prove_ownership(request, self._now()))
            for topic, number in wanted:
                floor = self._floor(topic)
                self._put(sender, "floors", (topic, number, -1 if floor is None else floor))
            self._wake()

    async def _registered(self, name: str) -> Result:
        """What the coordinator says of a registration. Raises what is wrong with the name, or has stopped the topic."""
        self._topics.check(name)
        topic = self._topics.get(name)
        if topic is not None and topic.problem is not None and not topic.missing:
            raise topic.problem
        return await self._ask(lambda request: self._coordinator.register_for_shard(request, name, self._now()))

    def _await(self, topic: str, txns: set[TxnId]) -> None:
        known = self._topics.get(topic)
        if known is None or known.followed is None:
            return
        buffer = known.followed.buffer
        done = {txn for txn in txns if buffer.has_ended(txn)}
        self._tell_applied(topic, done)
        if len(done) < len(txns):
            self._awaited.setdefault(topic, set()).update(txns - done)

    def _tell_applied(self, topic: str, done: set[TxnId]) -> None:
        for number in {txn.most for txn in done}:
            ids = sorted(txn.least for txn in done if txn.most == number)
            self._put(number, "applied", (topic, tuple(ids)))

    async def _answered(self, answers: dict[int, int], seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while len(answers) < len(self.inboxes) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def _is_away(self, number: int) -> bool:
        """Whether nobody reads what is asked, and this is none of the times when it is asked all the same."""
        return self._now() - self._heard[number] > SILENT and self._ticks % SLOWLY != 0

    def _owner(self, topic: str) -> int:
        return shard_of(topic, self._shard.of)

    def _put(self, number: int, field: str, row: Any) -> None:
        self._out.setdefault(number, {}).setdefault(field, []).append(row)


def _nothing(*_: object) -> None:
    """What became of a letter is seen by what is answered."""
