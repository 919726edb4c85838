"""A program that any release can run: it writes transactions of all kinds until SIGTERM, or reads topics.

    python -P tests/release_life.py ADDRESS write NAME [ADMIN_URL]
    python -P tests/release_life.py ADDRESS read TOPIC,TOPIC… [ADMIN_URL]

PYTHONPATH says which release; ADMIN_URL is that of a Pulsar. Each line of stdout is a JSON value: first the file of
the package, then of `write` what became of each transaction, as [topics, values, whether it committed], and at last
"done"; of `read` the committed records, as [topic, seqno, the value up to its first space].

The topics of a writer are NAME-a and NAME-b, and NAME-in, from which the group NAME copies to NAME-out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from typing import Any

import txnbuffer
from broker_io import PulsarOptions
from txnbuffer import Client, Outcome, OutcomeUnknown, Record, Transaction, TransactionAborted, connect

PATIENCE = 280.0
"""Seconds for which a client waits for a service."""
LARGE = 25_000
"""Bytes of a record, of which three make a transaction that is not sent whole."""
END = "end"
"""The last record of NAME-in."""


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


class Writer:
    """Tasks of one client that write at the same time until they are stopped."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self.stopping = asyncio.Event()
        self._both = [f"{name}-a", f"{name}-b"]

    async def run(self) -> None:
        member = asyncio.create_task(self._client.process(f"{self._name}-in", self._name, self._copy, wait=True))
        await asyncio.gather(
            self._plain(self._both[:1], 1, 0),
            self._plain(self._both, 2, 0),
            self._plain(self._both, 3, LARGE),
            self._aborted(),
            self._numbers(),
            self._feed(),
        )
        await self._until_copied(member)
        member.cancel()
        await asyncio.gather(member, return_exceptions=True)
        say("done")

    async def _write(self, txn: Transaction, topics: list[str], values: list[str], padding: int = 0) -> None:
        for value in values:
            for topic in topics:
                await txn.send(topic, f"{value} {'x' * padding}", key=value)

    async def _plain(self, topics: list[str], records: int, padding: int) -> None:
        for number in itertools.count():
            if self.stopping.is_set():
                return
            values = [f"{self._name}.{records}.{number}.{part}" for part in range(records)]
            txn = await self._client.transaction().begin()
            await self._write(txn, topics, values, padding)
            say([topics, values, await self._committed(txn)])

    async def _committed(self, txn: Transaction) -> bool:
        """Whether a transaction has committed; asks until it is known."""
        try:
            await txn.commit()
        except TransactionAborted:
            return False
        except OutcomeUnknown as error:
            while (outcome := await self._client.outcome(error.txn)) is None:
                await asyncio.sleep(0.05)
            return outcome is Outcome.COMMIT
        return True

    async def _aborted(self) -> None:
        for number in itertools.count():
            if self.stopping.is_set():
                return
            values = [f"{self._name}.aborted.{number}.{part}" for part in range(3)]
            txn = await self._client.transaction().begin()
            await self._write(txn, self._both, values, LARGE if number % 2 else 0)
            await txn.abort()
            say([self._both, values, False])

    async def _numbers(self) -> None:
        """Number after number of a producer; the same again until it has committed."""
        for number in itertools.count(1):
            if self.stopping.is_set():
                return
            values = [f"{self._name}.number.{number}"]
            while await self._client.committed_number(self._name) < number:
                txn = await self._client.transaction(name=self._name, number=number).begin()
                await self._write(txn, self._both, values)
                await self._committed(txn)
            say([self._both, values, True])

    async def _feed(self) -> None:
        topic = f"{self._name}-in"
        for number in itertools.count():
            value = END if self.stopping.is_set() else f"{self._name}.in.{number}"
            committed = False
            while not committed:
                txn = await self._client.transaction().begin()
                await self._write(txn, [topic], [value])
                committed = await self._committed(txn)
                say([[topic], [value], committed] if committed else [[topic], [f"{value}!"], False])
            if value == END:
                return

    async def _copy(self, txn: Transaction, record: Record) -> None:
        await txn.send(f"{self._name}-out", record.value, key=record.key)

    async def _until_copied(self, member: asyncio.Task[Any]) -> None:
        async with await self._client.reader(f"{self._name}-out", wait=True) as reader:
            async for record in reader.records(timeout=PATIENCE):
                if record.value.decode().split()[0] == END:
                    return
                assert not member.done(), member.exception()


def connected(address: str, admin_url: str | None) -> Client:
    options: PulsarOptions | None = None if admin_url is None else {"admin_url": admin_url}
    return connect(address, max_unavailable=PATIENCE, broker_options=options)


async def write(address: str, name: str, admin_url: str | None = None) -> None:
    async with connected(address, admin_url) as client:
        writer = Writer(client, name)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, writer.stopping.set)
        await writer.run()


async def read(address: str, topics: str, admin_url: str | None = None) -> None:
    async with connected(address, admin_url) as client:
        for topic in topics.split(","):
            end = await client.last_visible(topic)
            async with await client.reader(topic) as reader:
                async for record in reader.records(timeout=PATIENCE):
                    say([topic, record.seqno, record.value.decode().split()[0]])
                    if record.position == end:
                        break


if __name__ == "__main__":
    say(txnbuffer.__file__)
    _, address, action, *arguments = sys.argv
    asyncio.run({"write": write, "read": read}[action](address, *arguments))
