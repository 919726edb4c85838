"""Applications of several tasks that share what a client has: a reader, a stream, a transaction, a producer's name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from sim.apps import NOT_COMMITTED, PAUSE, App, Writer
from sim.history import Attempt, Fate, Shown
from sim.readers import changes_of, shown

from broker_io.errors import Error
from txnbuffer.client.client import Client
from txnbuffer.client.streams.streams import Rollback
from txnbuffer.client.streams.tokens import FileTokens
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import AlreadyCommitted, Fenced, NotVisible, TopicNotFound, TransactionCommitted

PADDING = b"." * 100
"""Makes the records of one send so large that it waits in the middle, where clients may send only few bytes ahead."""


class TaskWriter(Writer):
    """Tasks of one client that commit what another one still sends, and share a name."""

    _clients = 0

    async def work(self, client: Client) -> None:
        self._clients += 1
        name = f"{self.name}-{self._clients}"
        await self._send_at_once(client)
        await _together(self._commit_number(client, name), self._commit_number(client, name))
        while self.left > 0:
            self.left -= 1
            await self._commit_while_sending(client)
            await self._cancel_a_commit(client)
            await asyncio.sleep(self._pause())

    async def _commit_number(self, client: Client, name: str) -> None:
        """Commit the first number of a name that nobody else uses."""
        attempt = self.history.attempt(self.name)
        topic = self.setting.topics[0]
        try:
            async with client.transaction(name=name, number=1) as transaction:
                value = self._value()
                where = self._where(topic, value)
                self.history.sent(attempt, topic, value, **where)
                await transaction.send(topic, value, **where)
                self.history.asked(attempt)
        except Fenced as error:
            self.history.report(f"{self.name} was fenced, and nobody else uses the name {name}: {error}")
        except (AlreadyCommitted, *NOT_COMMITTED):
            self._ended(attempt, Fate.ABORTED)
        except Error as error:
            self.log(f"{attempt} failed: {error!r:.300}")
        else:
            self._ended(attempt, Fate.COMMITTED)

    async def _send_at_once(self, client: Client) -> None:
        """Commit what tasks send at once to topics that the client knows nothing of: in the order of their calls."""
        attempt = self.history.attempt(self.name)
        async with self._noted(attempt), client.transaction() as transaction:
            attempt.txn = transaction.id
            sends = []
            for topic in self.setting.topics:
                for _ in range(4):
                    value = self._value()
                    where = self._where(topic, value)
                    self.history.sent(attempt, topic, value, **where)
                    sends.append(transaction.send(topic, value, **where))
            await asyncio.gather(*sends)
            self.history.asked(attempt)

    async def _commit_while_sending(self, client: Client) -> None:
        """Commit a transaction while another task sends records of it, all or none of which are committed."""
        attempt, late = self.history.attempt(self.name), self.history.attempt(self.name)
        topic = self.choose.choice(self.setting.topics)
        values = [self._value() + PADDING for _ in range(6)]
        async with self._noted(attempt, late), client.transaction() as transaction:
            attempt.txn = transaction.id
            for each in self._topics():
                value = self._value()
                where = self._where(each, value)
                self.history.sent(attempt, each, value, **where)
                await transaction.send(each, value, **where)
            for value in values:
                self.history.sent(late, topic, value, self._key(value))
            self.history.asked(attempt, late)
            sending = asyncio.create_task(self._send_values(transaction, topic, values))
            try:
                await asyncio.sleep(self.choose.choice((0.0, 0.001, 0.01)))
                await transaction.commit()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _cancel_a_commit(self, client: Client) -> None:
        """Cancel a commit and abort: the abort says what became of the transaction."""
        attempt = self.history.attempt(self.name)
        topic, value = self.choose.choice(self.setting.topics), self._value()
        async with self._noted(attempt, returned=Fate.ABORTED):
            transaction = await client.transaction().begin()
            attempt.txn = transaction.id
            where = self._where(topic, value)
            self.history.sent(attempt, topic, value, **where)
            await transaction.send(topic, value, **where)
            self.history.asked(attempt)
            commit = asyncio.create_task(transaction.commit())
            await asyncio.sleep(self.choose.choice((0.0, 0.001, 0.003, 0.1)))
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            await transaction.abort()

    @contextlib.asynccontextmanager
    async def _noted(self, attempt: Attempt, *parts: Attempt, returned: Fate = Fate.COMMITTED) -> AsyncIterator[None]:
        """Note what the block makes of a transaction, `returned` if it raises nothing; its `parts` abort with it."""
        try:
            yield
        except (TransactionCommitted, NotVisible):
            self._ended(attempt, Fate.COMMITTED)
        except NOT_COMMITTED:
            for each in (attempt, *parts):
                self._ended(each, Fate.ABORTED)
        except Error as error:
            self.log(f"{attempt} failed: {error!r:.300}")
            await asyncio.sleep(PAUSE)
        else:
            self._ended(attempt, returned)

    async def _send_values(self, transaction: Transaction, topic: str, values: list[bytes]) -> None:
        """Send records together, within a time that may be too short."""
        keys = [self._key(value) for value in values]
        async with asyncio.timeout(self.choose.choice((0.002, 5.0))):
            await transaction.send_many(topic, values, keys=keys)


class SharingApp(App):
    """Tasks that share what reads a topic, which may not exist yet."""

    @property
    def topic(self) -> str:
        """The topic that it reads."""
        return self.setting.topics[0]

    async def work(self, client: Client) -> None:
        while True:
            try:
                await self._share(client, self.topic)
            except TopicNotFound:
                await asyncio.sleep(PAUSE)

    async def _share(self, client: Client, topic: str) -> None:
        raise NotImplementedError


class TaskReader(SharingApp):
    """Tasks that share one reader of a topic: each batch goes to one of them."""

    async def _share(self, client: Client, topic: str) -> None:
        async with await client.reader(topic) as reader:
            readings = self._readings(topic)

            async def take() -> None:
                while True:
                    batch = await reader.read(limit=3, timeout=0.5)
                    if batch is not None:
                        self.history.read(readings[batch.topic], shown(batch))

            await _together(take(), take())


class TaskFollower(SharingApp):
    """Tasks that share one change stream, with a file of tokens: each batch goes to one of them."""

    @property
    def topic(self) -> str:
        return self.setting.logs[0]

    async def _share(self, client: Client, topic: str) -> None:
        given: set[int] = set()
        async with client.stream(topic, store=FileTokens(f"/{self.name}.json")) as stream:

            async def take() -> None:
                while True:
                    try:
                        item = await stream.next(0.5)
                    except TimeoutError:
                        continue
                    if isinstance(item, Rollback):
                        given.intersection_update(range(item.seqno + 1))
                    elif item is not None:
                        self._check(topic, changes_of(item), given)

            await _together(take(), take())

    def _check(self, topic: str, changes: list[Shown], given: set[int]) -> None:
        self.history.shown(self.name, topic, changes)
        for change in changes:
            if change.seqno in given:
                self.history.report(f"{self.name} was given {change} of {topic} twice by one stream")
        given.update(change.seqno or 0 for change in changes)


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run some tasks; when one fails, end the others and raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
