"""Producer and reader processes of the demo

A producer process writes every n-th hour exactly once, in several concurrent lanes. A lane is a named producer that
numbers its hours, so after a lost response or a kill it resumes after the last committed hour. The reader process reads
both topics live and at the end compares its records with the input.
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
    from txnbuffer.client.reading.records import Record, RecordBatch


LANES = 16


class PlannedAbort(Exception):
    """Raised to abort a transaction on purpose."""


def produce(pipe: Connection, arguments: ConnectArguments, hours: list[Hour], share: int, shares: int) -> None:
    """Write every `shares`-th hour from `share` on; report each ended transaction and the end to the conductor."""
    asyncio.run(_produce(pipe, arguments, hours[share::shares], f"demo-{share}"))
    pipe.send(("done", None))


async def _produce(pipe: Connection, arguments: ConnectArguments, hours: list[Hour], name: str) -> None:
    client = await arguments.open()
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
        """Write all hours after the last committed one, in order."""
        committed = await self.client.committed_number(self.name)
        for number, hour in enumerate(self.hours[committed:], committed + 1):
            txn = await (self._abort(hour) if hour.aborted_on_purpose else self._commit(hour, number))
            self.pipe.send(("ended", (hour.number, txn)))

    async def _commit(self, hour: Hour, number: int) -> str | None:
        """Commit an hour once; the id of its transaction, or None if it had committed without a response."""
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
                continue  # the number shows whether it committed

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


def follow(pipe: Connection, arguments: ConnectArguments, hours: list[Hour]) -> None:
    """Read live until the conductor sends the outcomes; then read everything again, compare and report."""
    with contextlib.closing(arguments.open_sync()) as client:
        live = read(client, pipe)
        again = read(client, None)
        pipe.send(("counts", compare(hours, pipe.recv(), live, again)))


def compare(hours: list[Hour], ended: Mapping[int, str | None], live: Seen, again: Seen) -> dict[str, int]:
    """Compare the records of two readers with the input; the counts of the report.

    `ended`: the id of the transaction that ended each hour, None if its producer was killed before it reported it.
    """
    counts: Counter[str] = Counter(records_expected=0, records_read=0, lost=0, duplicated=0, uncommitted_seen=0)
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
        counts["records_expected"] += expected.total()
        for seen in (live, again):
            records = list(itertools.chain.from_iterable(seen[topic]))
            found = Counter((record.key, record.value, record.event_time) for record in records)
            counts["lost"] += (expected - found).total()
            counts["duplicated"] += (found - expected).total()
            counts["duplicated"] += sum(record.seqno != n for n, record in enumerate(records, 1))
            counts["uncommitted_seen"] += sum(not _committed(record, hour_of, aborted, ended) for record in records)
        counts["records_read"] += sum(map(len, live[topic]))
    return dict(counts)


def _committed(record: Record, hour_of: Mapping[int, int], aborted: set[int], ended: Mapping[int, str | None]) -> bool:
    """Whether a record belongs to the transaction that committed its hour, if that is known."""
    try:
        hour = hour_of[record_id(record.value or b"")]
    except (ValueError, KeyError):
        return False
    if hour in aborted or record.txn is None:
        return False
    committed = ended.get(hour)
    return committed is None or TxnId.parse(committed) == record.txn


def read(client: SyncClient, pipe: Connection | None) -> Seen:
    """Read both topics from the beginning to their end; with a pipe, live until a message arrives in it."""
    seen: Seen = {topic: [] for topic in TOPICS}
    with client.reader(TOPICS) as reader:
        while True:
            batch = reader.read(timeout=0.2)
            if batch is not None:
                seen[batch.topic].append(batch)
            elif (pipe is None or pipe.poll()) and not any(lag.behind for lag in reader.lag().values()):
                return seen
