"""Applications of a simulated world: writers, readers, followers of change streams, and members of a consumer group.

Each is a process that can be killed and started again: it then continues where its history ends. It treats errors as
users are told to, and reports every other exception.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim.history import DELETION, Attempt, Fate, History, Reading
from sim.world import Host, Process

from broker_io.errors import Error, Fenced, PositionTrimmed
from snapshots.errors import AppliedPositionTrimmed
from txnbuffer import connect
from txnbuffer.client.client import Client
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import (
    AlreadyCommitted,
    InvalidRequest,
    LogRestored,
    NotVisible,
    OutcomeUnknown,
    PositionConflict,
    SendUnknown,
    ServiceUnavailable,
    TransactionAborted,
)

PAUSE = 0.5
KEYS = 8
DELETIONS = 7
"""One in so many records is a deletion where they are written."""
NOT_COMMITTED = (TransactionAborted, Fenced, PositionConflict)
"""Errors of a commit after which the transaction has no effect."""


BROKEN = (InvalidRequest, LogRestored)
"""Errors after which a client is of no use any more."""
TRIMMED = (PositionTrimmed, AppliedPositionTrimmed)
"""Errors of a topic whose messages were trimmed. Without retention no fault does that to the topics of applications."""
LEAVES = 0.6
"""How often a writer closes its client while it has transactions open."""


class Leaves(Exception):
    """An application closes its client, and goes on with another one."""


@dataclass(slots=True)
class Setting:
    """What all applications of a world share."""

    address: str
    history: History
    topics: tuple[str, ...]
    log: Callable[[str, str], None]
    options: dict[str, Any] = field(default_factory=dict)
    sends_double: bool = False
    """Whether what is sent without a transaction may be stored twice."""
    least_operations: int = 0
    """Writers go on until there were so many operations of clients."""
    longest_pause: float = 0.0
    """Seconds that writers wait between transactions, at most; faults should meet them while they write."""
    trims: bool = False
    """Whether retention drops what nothing holds."""
    deletes: bool = False
    """Whether some records are deletions."""

    @property
    def logs(self) -> tuple[str, ...]:
        """The logs of its topics."""
        return self.history.partitions.logs(*self.topics)

    @property
    def lacks_operations(self) -> bool:
        return self.history.operations < self.least_operations


class App:
    """An application: `work` runs with a client until it returns; after errors of the client it connects again."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random) -> None:
        self.name = name
        self.host = host
        self.setting = setting
        self.choose = choose
        self.done = False
        self.process: Process | None = None
        self._values = 0

    @property
    def history(self) -> History:
        return self.setting.history

    def start(self) -> None:
        """Start a process of it, if it has not done everything."""
        if not self.done:
            self.process = self.host.start(self.name, self._main)

    async def _main(self) -> None:
        while not self.done:
            try:
                async with connect(self.setting.address, **self.setting.options) as client:
                    await self.work(client)
                    self.done = True
            except Leaves:
                self.log("closed its client")
            except Error as error:
                self.log(f"connects again after {error!r:.200}")
                if isinstance(error, TRIMMED) and not self.setting.trims:
                    self.history.report(f"{self.name} got an error about lost messages, and none were lost: {error}")
                await asyncio.sleep(PAUSE)

    async def work(self, client: Client) -> None:
        raise NotImplementedError

    def _readings(self, topic: str) -> dict[str, Reading]:
        """What a new reader of a topic shows, by log."""
        return {log: self.history.reading(self.name, log) for log in self.history.partitions.logs(topic)}

    def log(self, text: str) -> None:
        self.setting.log(self.name, text)

    def _ended(self, attempt: Attempt, fate: Fate) -> None:
        self.history.ended(attempt, fate)
        self.log(str(attempt))

    def _pause(self) -> float:
        """The seconds between two transactions."""
        choose = self.choose
        return choose.choice((0.0, 0.01, 0.3, *(choose.uniform(0.0, self.setting.longest_pause) for _ in range(2))))

    def _value(self) -> bytes:
        self._values += 1
        return b"%s.%d" % (self.name.encode(), self._values)

    def _where(self, topic: str, value: bytes) -> dict[str, Any]:
        """The key of a value, and sometimes the partition that it is sent to: always the same ones."""
        digest = zlib.crc32(value)
        count = self.history.partitions.counts.get(topic)
        where: dict[str, Any] = {"key": self._key(value)}
        if count is not None and digest % 5 == 0:
            where["partition"] = digest // 5 % count
        return where

    def _write(self, to: Any, topic: str, value: bytes, where: dict[str, Any]) -> Any:
        """Send a value with a client or a transaction as it is, or as a deletion that has it as a property."""
        if self.setting.deletes and zlib.crc32(value) % DELETIONS == 0:
            return to.delete(topic, properties={DELETION: value.decode()}, **where)
        return to.send(topic, value, **where)

    @staticmethod
    def _key(value: bytes) -> bytes:
        return b"k%d" % (zlib.crc32(value) % KEYS)


class Writer(App):
    """Writes transactions in a few lanes, some of them as a named producer, and single records."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, count: int) -> None:
        super().__init__(name, host, setting, choose)
        self.left = count
        self._numbered: dict[int, dict[str, list[bytes]]] = {}

    async def work(self, client: Client) -> None:
        lanes = self.choose.choice((1, 2, 4))
        stays = self.choose.uniform(0.5, 5.0) if self.choose.random() < LEAVES else None
        try:
            async with asyncio.timeout(stays) as limit:
                await asyncio.gather(self._named(client), *(self._lane(client) for _ in range(lanes)))
        except TimeoutError:
            if limit.expired():
                raise Leaves from None
            raise

    async def _lane(self, client: Client) -> None:
        while self.left > 0 or self.setting.lacks_operations:
            self.left -= 1
            if self.choose.random() < 0.1:
                await self._send(client)
            else:
                await self._transaction(client)
            await asyncio.sleep(self._pause())

    async def _send(self, client: Client) -> None:
        attempt = self.history.attempt(self.name, doubles=self.setting.sends_double)
        topic = self.choose.choice(self.setting.topics)
        value = self._value()
        where = self._where(topic, value)
        self.history.sent(attempt, topic, value, **where)
        self.history.asked(attempt)
        try:
            await self._write(client, topic, value, where)
        except SendUnknown:
            return
        except LogRestored:
            raise
        except Error as error:  # the record was not sent
            self.log(f"a send failed: {error!r:.200}")
            self._ended(attempt, Fate.ABORTED)
        else:
            self._ended(attempt, Fate.COMMITTED)

    async def _transaction(self, client: Client) -> None:
        attempt = self.history.attempt(self.name)
        timeout = self.choose.choice((None, None, None, 1.0, 30.0))
        plan = {topic: [self._value() for _ in range(self.choose.randint(1, 3))] for topic in self._topics()}
        await self._attempt(client.transaction(timeout=timeout), attempt, plan, patient=self.choose.random() < 0.1)

    async def _named(self, client: Client) -> None:
        """Commit the numbers of a producer, each until it is certain that it committed."""
        name = f"{self.name}-name"
        number = await client.committed_number(name) + 1
        while self.left > 0:
            if number not in self._numbered:
                self._numbered[number] = {topic: [self._value()] for topic in self._topics()}
            attempt = self.history.attempt(self.name, (name, number))
            transaction = client.transaction(name=name, number=number)
            await self._attempt(transaction, attempt, self._numbered[number], commits=True)
            if attempt.fate is Fate.COMMITTED:
                number += 1
                self.left -= 1
            await asyncio.sleep(self._pause())

    async def _attempt(
        self,
        transaction: Transaction,
        attempt: Attempt,
        plan: dict[str, list[bytes]],
        *,
        commits: bool = False,
        patient: bool = False,
    ) -> None:
        """Write what is planned in a transaction and end it."""
        end = "commit" if commits else self.choose.choices(("commit", "abort", "fail", "leave"), (16, 3, 1, 1))[0]
        try:
            await transaction.begin()
            attempt.txn = transaction.id
            for topic, values in plan.items():
                for value in values:
                    where = self._where(topic, value)
                    self.history.sent(attempt, topic, value, **where)
                    await self._write(transaction, topic, value, where)
                    if self.choose.random() < 0.2:
                        await asyncio.sleep(self.choose.choice((0.001, 0.05, 0.5)))
            if patient:
                await asyncio.sleep(self.choose.uniform(0.0, 4.0))
            await self._finish(transaction, attempt, end)
        except AlreadyCommitted:
            self._ended(attempt, Fate.COMMITTED)
        except NOT_COMMITTED:
            self._ended(attempt, Fate.ABORTED)
        except OutcomeUnknown:
            await self._resolve(transaction, attempt)
        except NotVisible:
            self._ended(attempt, Fate.COMMITTED)
        except ServiceUnavailable:
            await asyncio.sleep(PAUSE)
        except BROKEN:
            raise
        except Error as error:
            self.log(f"{attempt} failed: {error!r:.300}")
            await asyncio.sleep(PAUSE)

    async def _finish(self, transaction: Transaction, attempt: Attempt, end: str) -> None:
        if end == "commit":
            self.history.asked(attempt)
            await transaction.commit(wait_visible=self.choose.random() < 0.1)
            self._ended(attempt, Fate.COMMITTED)
        elif end == "abort":
            await transaction.abort()
            self._ended(attempt, Fate.ABORTED)
        elif end == "fail":
            await transaction.__aexit__(ValueError, ValueError("the application failed"), None)

    async def _resolve(self, transaction: Transaction, attempt: Attempt) -> None:
        """Ask for an outcome that is unknown, once."""
        try:
            outcome = await transaction._client.outcome(transaction.id)
        except Error:
            return
        if outcome is not None:
            self._ended(attempt, Fate.COMMITTED if outcome.name == "COMMIT" else Fate.ABORTED)

    def _topics(self) -> list[str]:
        topics = self.setting.topics
        return self.choose.sample(topics, self.choose.randint(1, len(topics)))
