"""Applications of a simulated world that process records as a consumer group, or write as the same named producer."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sim.apps import PAUSE, App, Setting
from sim.history import Attempt, Fate
from sim.world import Host

from broker_io.errors import Fenced, PositionTrimmed, ServiceUnavailable
from txnbuffer import dead_letter
from txnbuffer.client.client import Client
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import AlreadyCommitted, NotVisible, OutcomeUnknown, TopicNotFound, TransactionAborted

RESULTS, REJECTS = "shipments", "rejects"
AWAY, LONGEST_AWAY = 2.0, 10.0
"""Seconds that a member which has left is away, at most; with retention longer, so that only the group holds data."""
HELD_SECONDS = 5.0
"""Seconds after which a group must not find the same position trimmed again: it has committed that one."""


class HandlerFailed(Exception):
    """What the handler of a group raises."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group works.

    `on_error`: what follows when its handler fails for good. `fails`: how often it fails once. `leaves`: whether
    members leave from time to time, and join again.
    """

    sources: tuple[str, ...]
    on_error: str = "stop"
    fails: float = 0.0
    batches: bool = False
    leaves: bool = False

    def poisonous(self, value: bytes) -> bool:
        """Whether the handler fails for this record for good."""
        return self.on_error != "stop" and zlib.crc32(value) % 9 == 0


class Member(App):
    """A member of a consumer group: makes a record of another topic from each record, exactly once."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, plan: GroupPlan) -> None:
        super().__init__(name, host, setting, choose)
        self._plan = plan
        self._trimmed: dict[str, float] = {}

    async def work(self, client: Client) -> None:
        try:
            await self._take_part(client)
        except PositionTrimmed as error:
            self._check_held(error)
            raise

    def _check_held(self, error: PositionTrimmed) -> None:
        """Report a position that stays trimmed. A group that has none yet may find another one trimmed each time."""
        now = self.host.world.now
        if now > self._trimmed.setdefault(str(error), now) + HELD_SECONDS:
            self.host.world.fail(f"a group holds what it has not processed, and {self.name} got {error!r} again")

    async def _take_part(self, client: Client) -> None:
        while True:
            leaves = self._plan.leaves or self.setting.trims
            stays = self.choose.uniform(0.5, 6.0) if leaves and self.choose.random() < 0.7 else None
            # Some are cancelled once more while they leave.
            again = None if stays is None else stays + self.choose.choice((0.0005, 0.005, 1.0))
            try:
                async with asyncio.timeout(again), asyncio.timeout(stays):
                    await self._process(client)
            except TimeoutError:
                await asyncio.sleep(self.choose.uniform(0.0, LONGEST_AWAY if self.setting.trims else AWAY))
            except HandlerFailed:
                self.host.world.count("handler failed")
            except TopicNotFound:
                await asyncio.sleep(PAUSE)

    async def _process(self, client: Client) -> None:
        plan = self._plan
        on_error: Any = dead_letter(REJECTS) if plan.on_error == "dead letter" else plan.on_error
        options: dict[str, Any] = {"on_error": on_error, "idle_timeout": 3.0, "retries": self.choose.choice((0, 1, 2))}
        if plan.batches:
            await client.process_batches([*plan.sources], "group", self._handle_batch, batch=10, **options)
        else:
            await client.process([*plan.sources], "group", self._handle, **options)

    async def _handle_batch(self, transaction: Transaction, records: RecordBatch) -> None:
        for record in records:
            await self._handle(transaction, record)

    async def _handle(self, transaction: Transaction, record: Record) -> None:
        source = record.value or b""
        if self._plan.poisonous(source) or (self._plan.fails and self.choose.random() < self._plan.fails):
            raise HandlerFailed(repr(source))
        value = b">%s" % source
        self.history.derive(source, value)
        if self.choose.random() < 0.1:
            await asyncio.sleep(self.choose.uniform(0.0, 0.5))
        await transaction.send(RESULTS, value, key=record.key)


class Rival(App):
    """One of several processes with the same producer name: it commits numbers until another one fences it.

    At times it commits two at the same time, and gives up the first of them if that takes long: then neither is there,
    the first one alone, or both.
    """

    NAME = "rivals"
    TWO = 0.3
    """How often it commits two numbers at the same time."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, count: int) -> None:
        super().__init__(name, host, setting, choose)
        self.left = count
        self.attempts: list[Attempt] = []

    async def work(self, client: Client) -> None:
        while self.left > 0:
            number = await client.committed_number(self.NAME) + 1  # this fences the others
            holds = True
            while holds and self.left > 0:
                two = self.choose.random() < self.TWO
                holds = await (self._commit_two(client, number) if two else self._commit(client, number))
                number += 1 + two
                await asyncio.sleep(self.choose.choice((0.01, 0.3, 1.0)))
            await asyncio.sleep(self.choose.uniform(0.0, 3.0))

    async def _commit(self, client: Client, number: int) -> bool:
        """Commit a number; False if another instance has the name now, or had committed the number before."""
        values = {topic: self._value() for topic in self.setting.topics}
        instance = f"{self.name} from {self._values}"
        while True:
            attempt = self._attempt(instance, number)
            committed = await self._outcome(attempt, self._all(client, attempt, values))
            if committed is not None:
                return committed

    async def _commit_two(self, client: Client, number: int) -> bool:
        """Commit a number and the next one; False unless both have committed."""
        values = [{topic: self._value() for topic in self.setting.topics} for _ in range(2)]
        instance = f"{self.name} from {self._values}"
        attempts = [self._attempt(instance, number), self._attempt(instance, number + 1)]
        try:
            written = [await self._written(client, *each) for each in zip(attempts, values, strict=True)]
        except (TransactionAborted, AlreadyCommitted, Fenced, ServiceUnavailable):
            return False
        patience = (self.choose.choice((0.0005, 0.005, 0.05)), None)
        ends = [self._in_time(*each) for each in zip(attempts, written, patience, strict=True)]
        outcomes = await asyncio.gather(*map(self._outcome, attempts, ends))
        return all(outcomes)

    def _attempt(self, instance: str, number: int) -> Attempt:
        attempt = self.history.attempt(self.name, (instance, number))
        self.attempts.append(attempt)
        self.left -= 1
        return attempt

    async def _written(self, client: Client, attempt: Attempt, values: dict[str, bytes]) -> Transaction:
        """A transaction of a number, with its records."""
        assert attempt.producer is not None
        transaction = await client.transaction(name=self.NAME, number=attempt.producer[1]).begin()
        attempt.txn = transaction.id
        for topic, value in values.items():
            where = self._where(topic, value)
            self.history.sent(attempt, topic, value, **where)
            await transaction.send(topic, value, **where)
        return transaction

    async def _all(self, client: Client, attempt: Attempt, values: dict[str, bytes]) -> None:
        await self._in_time(attempt, await self._written(client, attempt, values), None)

    async def _in_time(self, attempt: Attempt, transaction: Transaction, seconds: float | None) -> None:
        """Commit in so many seconds, or give up; then nobody knows what has become of it."""
        self.history.asked(attempt)
        try:
            async with asyncio.timeout(seconds):
                await transaction.commit()
        except TimeoutError:
            raise OutcomeUnknown(transaction.id, "it took too long") from None

    async def _outcome(self, attempt: Attempt, end: Coroutine[Any, Any, None]) -> bool | None:
        """Whether an attempt has committed; None if it is to be tried again."""
        try:
            await end
        except TransactionAborted:
            self._ended(attempt, Fate.ABORTED)
            return None
        except (AlreadyCommitted, Fenced):
            self._ended(attempt, Fate.ABORTED)
            return False
        except NotVisible:
            pass
        except (OutcomeUnknown, ServiceUnavailable):
            await asyncio.sleep(PAUSE)
            return None
        self._ended(attempt, Fate.COMMITTED)
        return True
