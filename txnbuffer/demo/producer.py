"""A producer process of the demo: writes its share of the hours, each exactly once, whoever dies meanwhile.

Its lanes work side by side. A lane is a named producer that counts its hours, so that after a lost
answer or its own death it goes on exactly behind the last hour that committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from txnbuffer.demo.flights import Hour
from txnbuffer.demo.sites import Way

if TYPE_CHECKING:
    from txnbuffer import Client, Transaction

LANES = 16


class OnPurpose(Exception):
    """Leaves a transaction that is to be aborted."""


def produce(pipe: Connection, way: Way, hours: list[Hour], share: int, shares: int) -> None:
    """Write every `shares`-th hour from `share` on; tell the conductor of each that has ended, and of the end."""
    asyncio.run(_produce(pipe, way, hours[share::shares], f"demo-{share}"))
    pipe.send(("done", None))


async def _produce(pipe: Connection, way: Way, hours: list[Hour], name: str) -> None:
    client = await way.open()
    try:
        lanes = [Lane(client, f"{name}-{number}", hours[number::LANES], pipe) for number in range(LANES)]
        await asyncio.gather(*(lane.write_all() for lane in lanes))
    finally:
        await client.close()


async def send(txn: Transaction, hour: Hour) -> None:
    """Send all records of an hour in two halves, so that the transactions of several lanes interleave in the log."""
    for topic, records in hour.records.items():
        middle = len(records) // 2
        for half in (records[:middle], records[middle:]):
            await txn.send_many(
                topic,
                [record.value for record in half],
                keys=[record.key for record in half],
                event_times=[record.event_time for record in half],
            )
            await asyncio.sleep(0)


@dataclass(slots=True)
class Lane:
    client: Client
    name: str
    hours: Sequence[Hour]
    pipe: Connection

    async def write_all(self) -> None:
        """Write all hours behind the last committed one, one after the other."""
        committed = await self.client.committed_number(self.name)
        for number, hour in enumerate(self.hours[committed:], committed + 1):
            txn = await (self._abort(hour) if hour.aborted_on_purpose else self._commit(hour, number))
            self.pipe.send(("ended", (hour.number, txn)))

    async def _commit(self, hour: Hour, number: int) -> str | None:
        """Commit an hour once; the id of its transaction, None if it had committed before anybody was told."""
        from txnbuffer import AlreadyCommitted, OutcomeUnknown, ServiceUnavailable

        async def write(txn: Transaction) -> str:
            await send(txn, hour)
            return str(txn.id)

        while True:
            try:
                return await self.client.run(write, name=self.name, number=number)
            except AlreadyCommitted:
                return None
            except (OutcomeUnknown, ServiceUnavailable):
                continue  # the number tells whether it committed

    async def _abort(self, hour: Hour) -> str | None:
        from txnbuffer import Error

        begun: str | None = None
        try:
            async with self.client.transaction() as txn:
                begun = str(txn.id)
                await send(txn, hour)
                raise OnPurpose
        except (OnPurpose, Error):
            return begun
