"""Destroyed data: a topic of a cluster is deleted, truncated or expired while it is in use, or loses a ledger.

A cluster keeps what it acknowledged, except what these administrative actions destroy. They hit a topic of its own, so
all rules stay as they are for the other topics, also for transactions on both. For this topic `docs/service.md` and
`docs/recover.md` promise: what is shown was committed and is in order; a reader that misses something because its
topic was deleted gets an error; everything that was not destroyed is still there. In the end the topic can be used
again, if it was only deleted; otherwise once an operator has deleted it.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sim.apps import NOT_COMMITTED, PAUSE, App
from sim.checker import followed
from sim.cluster import NAMESPACE
from sim.history import Attempt, Fate, History, Reading, Shown
from sim.readers import Follower, Reader, shown
from sim.roles import Role
from sim.world import Finding

from broker_io.errors import Error
from txnbuffer import connect
from txnbuffer.client.client import Client
from txnbuffer.errors import InvalidRequest, NotVisible

if TYPE_CHECKING:
    from sim.cluster_topics import StoredLedger, StoredTopic
    from sim.scenario import ClusterScenario

TOPIC = "scrap"
STORED = f"{NAMESPACE}/{TOPIC}"
BEHIND = 0.6
"""How often the readers of the topic are behind when something is destroyed."""
BEHIND_SECONDS = 0.8
"""The most virtual seconds of writes that they lack then; a reader that gets nothing for a second looks for more."""
WRITE_SECONDS = 1.0
"""Virtual seconds in which something is written before each destruction that happens after the faults have ended."""
TRY_SECONDS = 60.0
"""Virtual seconds within which a topic that was only deleted can be used again, once all faults have ended."""
STOPPED_SECONDS = 5.0
"""Virtual seconds without success after which an operator deletes a topic that has lost data otherwise."""


class Wrecker(App):
    """Commits one record after the other on the topic, some of them in transactions with other topics.

    `own`: the history of the topic; that of the scenario has what was written to the others.
    """

    ended = False

    def __init__(self, *arguments: Any, own: History) -> None:
        super().__init__(*arguments)
        self.own = own

    async def work(self, client: Client) -> None:
        while not self.ended:
            await self._transaction(client)
            await asyncio.sleep(self.choose.choice((0.02, 0.02, 0.2, 0.5)))

    async def _transaction(self, client: Client) -> None:
        choose = self.choose
        writes = {(self.own, TOPIC): self.own.attempt(self.name)}
        if choose.random() < 0.4:
            writes[self.history, choose.choice(self.setting.topics)] = self.history.attempt(self.name)
        aborts = choose.random() < 0.15
        try:
            async with asyncio.timeout(30.0):
                await self._write(client, writes, aborts=aborts)
        except NotVisible:
            self._end(writes, Fate.COMMITTED)
        except NOT_COMMITTED:
            self._end(writes, Fate.ABORTED)
        except InvalidRequest:  # the client is of no use any more
            raise
        except (Error, TimeoutError) as error:
            self.log(f"a transaction failed: {error!r:.200}")
            await asyncio.sleep(PAUSE)
        else:
            self._end(writes, Fate.ABORTED if aborts else Fate.COMMITTED)

    async def _write(self, client: Client, writes: dict[tuple[History, str], Attempt], *, aborts: bool) -> None:
        transaction = client.transaction()
        await transaction.begin()
        for (history, topic), attempt in writes.items():
            attempt.txn = transaction.id
            value = self._value()
            key = self._key(value)
            history.sent(attempt, topic, value, key)
            await transaction.send(topic, value, key=key)
        if aborts:
            await transaction.abort()
            return
        for (history, _), attempt in writes.items():
            history.asked(attempt)
        await transaction.commit()

    def _end(self, writes: dict[tuple[History, str], Attempt], fate: Fate) -> None:
        for (history, _), attempt in writes.items():
            history.ended(attempt, fate)
        self.log(f"{[*map(str, writes.values())]}")


class Destruction(Role):
    """The topic, its writer, reader and follower, and what happens to its data."""

    scenario: ClusterScenario
    damaged = (TOPIC,)

    def begin(self) -> None:
        scenario, world = self.scenario, self.scenario.world
        self.history = History(lambda: world.now, world.fail)
        self.destroyed: set[bytes] = set()
        """Values of which a stored copy was destroyed."""
        self.kinds: list[str] = []
        """What happened to the topic."""
        self._lost_at = -1.0
        """When it lost a ledger last."""
        self.final: list[Shown] | None = None
        own = replace(scenario.setting, history=self.history, topics=(TOPIC,), trims=True)
        self.writer = scenario.add(
            Wrecker, "wrecker", setting=scenario.writer_setting(scenario.topics), own=self.history
        )
        scenario.add(Reader, "scrap-reader", setting=own)
        self.follower = scenario.add(Follower, "scrap-follower", setting=own)
        self.planned = self.choose.choice((2, 3, 4))
        for _ in range(self.planned):
            world.scheduler.after(self.choose.uniform(1.0, scenario.size.seconds), self._destroy)

    # What happens

    def _written(self) -> StoredTopic | None:
        """The topic, if it has messages."""
        topic = self.scenario.cluster.topics.get(STORED)
        return None if topic is None or topic.last.entry < 0 else topic

    def _destroy(self) -> None:
        """Destroy something once there is something; after the faults have ended, `finish` does it."""
        after = self.scenario.world.scheduler.after
        if self.scenario.faults.calm:
            return
        if (topic := self._written()) is None:
            after(0.5, self._destroy)
        else:
            after(self._fall_behind(topic), lambda: None if self.scenario.faults.calm else self._destroy_now(topic))

    def _fall_behind(self, topic: StoredTopic) -> float:
        """Sometimes let the topic's readers fall behind, so that they miss what they have not read; return how long."""
        if self.choose.random() >= BEHIND:
            return 0.0
        seconds = self.choose.uniform(0.2, BEHIND_SECONDS)
        for reader in [*topic.readers]:
            reader.fall_behind(2 * seconds)
        return seconds

    def _destroy_now(self, topic: StoredTopic) -> None:
        if topic.deleted:
            return
        kind = self.choose.choice([*DESTRUCTIONS])
        self.kinds.append(kind)
        self.scenario.world.count(kind)
        gone = DESTRUCTIONS[kind](self, topic)
        self._note(gone)
        if kind == "lost ledger":
            self._lost_at = self.scenario.world.now
        numbers = [ledger.number for ledger in gone]
        self.scenario.world.log("fault", f"{kind}: {TOPIC} loses what ledgers {numbers} have")

    def _note(self, ledgers: Iterable[StoredLedger]) -> None:
        """Note the values that ledgers had which were destroyed."""
        for ledger in ledgers:
            for entry in ledger.entries:
                for message in entry.messages:
                    self.destroyed.update(re.findall(rb"(?:wrecker|scrap-final)\.\d+", message.data()))

    def _delete(self, topic: StoredTopic) -> list[StoredLedger]:
        self.scenario.cluster.delete(STORED)
        if self.choose.random() < 0.5:
            self.scenario.cluster.create(STORED)
        return topic.ledgers

    def _truncate(self, topic: StoredTopic) -> list[StoredLedger]:
        """Truncate it: a ledger that is still open is dropped once it is closed, because the cursors are at its end."""
        if self.choose.random() < 0.5:
            topic.roll()
        before = [*topic.ledgers]
        topic.truncate()
        return before

    def _lose_ledger(self, topic: StoredTopic) -> list[StoredLedger]:
        """Lose a ledger for good; the topic is loaded without it."""
        topic.roll()
        ledger = self.choose.choice(topic.ledgers[:-1] or topic.ledgers)
        if ledger is topic.ledgers[-1]:
            return []
        topic.drop(ledger.number)
        self.scenario.cluster.unload(STORED)
        return [ledger]

    def _expire(self, topic: StoredTopic) -> list[StoredLedger]:
        """Let all subscriptions skip what they have not acknowledged, as a message TTL does, and trim the topic."""
        topic.roll()
        before = [*topic.ledgers]
        topic.cursors = dict.fromkeys(topic.cursors, topic.last)
        topic.trim()
        return before

    # The end

    def finish(self) -> None:
        """Destroy the rest, then use the topic until it can be used again. Raises Finding if that takes too long."""
        scenario, world = self.scenario, self.scenario.world
        self._destroy_rest()
        scenario.calm = world.now
        self.writer.ended = True
        scenario.wait(lambda: self.writer.done, f"the last transaction on {TOPIC} has not ended")
        world.host("delta").start("scrap-final", self._use_again)
        self._wait_until_used(lambda: self.final is not None)

    def _wait_until_used(self, done: Callable[[], bool]) -> None:
        """Wait for something that needs the topic; a topic that was not only deleted may have to be deleted for it."""
        deleted = {*self.kinds} <= {"deleted topic"}
        if not self.scenario.world.run(TRY_SECONDS if deleted else STOPPED_SECONDS, done):
            if deleted:
                raise Finding(f"{TOPIC} cannot be used again after {TRY_SECONDS:g} s, and was only deleted")
            self._repair()
            self.scenario.wait(done, f"{TOPIC} cannot be used again after it was deleted")

    def _destroy_rest(self) -> None:
        """Destroy as often as planned, although the faults have ended."""
        world = self.scenario.world
        for _ in range(self.planned - len(self.kinds)):
            world.run(self.choose.uniform(0.0, WRITE_SECONDS))
            self._wait_until_used(lambda: self._written() is not None)
            topic = self.scenario.cluster.topics[STORED]
            world.run(self._fall_behind(topic))
            self._destroy_now(topic)

    def _repair(self) -> None:
        """Delete the topic and restart the services, as an operator does with a topic that has stopped."""
        scenario = self.scenario
        scenario.world.log("operator", f"deletes {TOPIC}")
        if (topic := scenario.cluster.topics.get(STORED)) is not None:
            self._note(topic.ledgers)
            scenario.cluster.delete(STORED)
        for service in scenario.services:
            if service.running is not None:
                service.running.signal(signal.SIGTERM)

    async def _use_again(self) -> None:
        scenario = self.scenario
        number = 0
        while self.final is None:
            number += 1
            try:
                async with connect(scenario.address, **scenario.options) as client:
                    value = await self._commit_one(client, number)
                    found = await self._read_all(client, value)
                    if value in [record.value for record in found]:
                        self.final = found
            except Error as error:
                scenario.world.log("scrap-final", f"tries again after {error!r:.300}")
            await asyncio.sleep(PAUSE)

    async def _commit_one(self, client: Client, number: int) -> bytes:
        attempt = self.history.attempt("scrap-final")
        value = b"scrap-final.%d" % number
        async with client.transaction() as transaction:
            attempt.txn = transaction.id
            self.history.sent(attempt, TOPIC, value)
            await transaction.send(TOPIC, value, key=b"final")
            self.history.asked(attempt)
        self.history.ended(attempt, Fate.COMMITTED)
        return value

    async def _read_all(self, client: Client, last: bytes) -> list[Shown]:
        found: list[Shown] = []
        until = self.scenario.world.now + 10.0
        async with await client.reader(TOPIC) as reader:
            while self.scenario.world.now < until and last not in [record.value for record in found[-5:]]:
                found += shown(await reader.read(timeout=0.5) or ())
        return found

    # What must hold

    def missing(self) -> Iterator[str]:
        following = self.follower.followings.get(TOPIC)
        values = [] if following is None else [change.value for change in following.changes.values()]
        if self.final is None or self.final[-1].value not in values:
            yield f"the follower of {TOPIC} was not shown its newest record"

    def wrong(self) -> Iterator[str]:
        assert self.final is not None
        yield from unharmed(self.final, self.history.attempts, self.destroyed, self._lost_at)
        for reading in self.history.readings:
            yield from without_gaps(reading, self.history.attempts, self._spared)
        following = self.follower.followings[TOPIC]
        if {*self.kinds} <= {"deleted topic"}:
            yield from followed(following, self.final, self.history)

    def _spared(self, attempt: Attempt) -> bool:
        """Whether a reader that passes over the attempt must get an error."""
        return attempt.first_sent > self._lost_at


def values_of(attempt: Attempt) -> list[bytes]:
    """What an attempt wrote to the topic."""
    return attempt.writes.get(TOPIC, [])


def unharmed(
    records: Sequence[Shown], attempts: Sequence[Attempt], destroyed: set[bytes], lost_at: float
) -> Iterator[str]:
    """What is committed and was not destroyed is there, once and in order; nothing else is.

    `lost_at`: when a ledger was lost last, perhaps with the markers of older records.
    """
    found = [record.value for record in records]
    order = {value: number for number, attempt in enumerate(attempts) for value in values_of(attempt)}
    if (numbers := [order.get(value, -1) for value in found]) != sorted({*numbers}):
        yield f"the records of {TOPIC} are twice there, or not in their order: {found}"
    for attempt in attempts:
        for value in values_of(attempt):
            if value in found and not attempt.fate.may_be_visible:
                yield f"{attempt} must not be visible, and {TOPIC} has {value!r}"
            committed = attempt.fate is Fate.COMMITTED and attempt.first_sent > lost_at
            if committed and value not in found and value not in destroyed:
                yield f"{attempt} wrote {value!r}, which nobody destroyed, and {TOPIC} does not have it"


def without_gaps(reading: Reading, attempts: Sequence[Attempt], counts: Callable[[Attempt], bool]) -> Iterator[str]:
    """A reader shows committed records one after the other, or ends with an error: it passes over none.

    Each attempt begins when the one before has ended. `counts`: whether a reader must not pass over an attempt.
    """
    order = {value: number for number, attempt in enumerate(attempts) for value in values_of(attempt)}
    numbers = [order.get(record.value, -1) for record in reading.records]
    for before, after in pairwise(numbers):
        if after <= before:
            yield f"{reading.reader} was shown {attempts[after]} of {TOPIC} after {attempts[before]}"
            return
        between = [one for one in attempts[before + 1 : after] if one.fate is Fate.COMMITTED and counts(one)]
        if between:
            missed = [*map(str, between)]
            yield f"{reading.reader} was shown {attempts[after]} of {TOPIC} and not {missed}, without an error"
            return


DESTRUCTIONS: dict[str, Callable[[Destruction, StoredTopic], list[StoredLedger]]] = {
    "deleted topic": Destruction._delete,
    "truncated topic": Destruction._truncate,
    "lost ledger": Destruction._lose_ledger,
    "expired topic": Destruction._expire,
}
"""What happens to the topic; each returns the ledgers whose entries are gone, or will be."""
