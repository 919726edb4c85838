"""A producer process of the demo: writes its share of the hours, each exactly once, whoever dies meanwhile.

Its lanes work side by side. A lane is a named producer that counts its hours, so that after a lost
answer or its own death it goes on exactly behind the last hour that committed.

The demo's reader process: follows both topics live and judges at the end what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

from txnbuffer.demo.flights import TOPICS, Hour, record_id
from txnbuffer.demo.sites import ConnectArguments
from txnbuffer.model import TxnId

if TYPE_CHECKING:
    from txnbuffer import Client, SyncClient, Transaction
    from txnbuffer.client.records import Record, RecordBatch


LANES = 16


class PlannedAbort(Exception):
    """Leaves a transaction that is to be aborted."""


def produce(pipe: Connection, way: ConnectArguments, hours: list[Hour], share: int, shares: int) -> None:
    """Write every `shares`-th hour from `share` on; tell the conductor of each that has ended, and of the end."""
    asyncio.run(_produce(pipe, way, hours[share::shares], f"demo-{share}"))
    pipe.send(("done", None))


async def _produce(pipe: Connection, way: ConnectArguments, hours: list[Hour], name: str) -> None:
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
                raise PlannedAbort
        except (PlannedAbort, Error):
            return begun


Seen: TypeAlias = "dict[str, list[RecordBatch]]"


def follow(pipe: Connection, way: ConnectArguments, hours: list[Hour]) -> None:
    """Read live until the conductor tells how all transactions ended; then read all again, compare, and report."""
    with contextlib.closing(way.open_sync()) as client:
        live = read(client, pipe)
        again = read(client, None)
        pipe.send(("verdict", judge(hours, pipe.recv(), live, again)))


def judge(hours: list[Hour], ended: Mapping[int, str | None], live: Seen, again: Seen) -> dict[str, int]:
    """Compare record by record what two readers saw with what the source says must be there.

    `ended`: the id of the transaction that ended each hour, None where its producer died before it could tell.
    """
    verdict: Counter[str] = Counter(records_expected=0, records_read=0, lost=0, duplicated=0, uncommitted_seen=0)
    hour_of = {
        record_id(message.value or b""): hour.number
        for hour in hours
        for messages in hour.records.values()
        for message in messages
    }
    aborted = {hour.number for hour in hours if hour.aborted_on_purpose}
    for topic in TOPICS:
        expected = Counter(
            (message.key, message.value, message.event_time)
            for hour in hours
            if hour.number not in aborted
            for message in hour.records[topic]
        )
        verdict["records_expected"] += expected.total()
        for seen in (live, again):
            records = list(itertools.chain.from_iterable(seen[topic]))
            found = Counter((record.key, record.value, record.event_time) for record in records)
            verdict["lost"] += (expected - found).total()
            verdict["duplicated"] += (found - expected).total()
            verdict["duplicated"] += sum(record.seqno != n for n, record in enumerate(records, 1))
            verdict["uncommitted_seen"] += sum(not _committed(record, hour_of, aborted, ended) for record in records)
        verdict["records_read"] += sum(map(len, live[topic]))
    return dict(verdict)


def _committed(record: Record, hour_of: Mapping[int, int], aborted: set[int], ended: Mapping[int, str | None]) -> bool:
    """Whether a record belongs to the very transaction that committed its hour, as far as anybody was told."""
    try:
        hour = hour_of[record_id(record.value or b"")]
    except (ValueError, KeyError):
        return False
    if hour in aborted or record.txn is None:
        return False
    told = ended.get(hour)
    return told is None or TxnId.parse(told) == record.txn


def read(client: SyncClient, pipe: Connection | None) -> Seen:
    """Read both topics from the beginning to their end; with a pipe, live until there is a word in it."""
    seen: Seen = {topic: [] for topic in TOPICS}
    with client.reader(TOPICS) as reader:
        while True:
            batch = reader.read(timeout=0.2)
            if batch is not None:
                seen[batch.topic].append(batch)
            elif (pipe is None or pipe.poll()) and not any(lag.behind for lag in reader.lag().values()):
                return seen
