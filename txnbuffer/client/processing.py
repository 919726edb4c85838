"""Consume, transform, produce: each record is handled exactly once, as far as what the handler sends goes.

What a handler sends and how far the group has come commit in one transaction. A consumer that was given up
can't commit any more once another one has joined the group, and nobody can commit the same stretch twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from broker_io.partitions import partition_of
from txnbuffer.client.read_topics import Start
from txnbuffer.client.records import Record
from txnbuffer.client.rows import many_rows
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import ConsumerPosition
from txnbuffer.errors import CallerError, Error, Fenced, InvalidRequest, OutcomeUnknown, TransactionAborted
from txnbuffer.model import EARLIEST, Outcome, Position

if TYPE_CHECKING:
    from txnbuffer.client.client import Client

Handler: TypeAlias = Callable[[Transaction, Record], Awaitable[None]]

Work: TypeAlias = Callable[[Transaction, list[Record]], Awaitable[None]]

WAIT = 1.0
"""Seconds of one wait for records."""
PAUSE = 0.05
"""Seconds before what was aborted is done again."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Records that the handler fails on go to this topic."""

    topic: str


OnError: TypeAlias = Literal["stop", "skip"] | DeadLetter


def dead_letter(topic: str) -> DeadLetter:
    """For `on_error`: put records that the handler fails on into a topic, and go on.

    Each keeps its key, value, properties and event time, and gets the properties `dead_letter_topic`,
    `dead_letter_position` and `dead_letter_error`.
    """
    return DeadLetter(topic)


class Group(NamedTuple):
    """A consumer group, and where it begins on a topic that it never consumed."""

    name: str
    start: Start = "beginning"


@dataclass(slots=True)
class Processed:
    """What was done: records handled, skipped and put aside, in so many transactions."""

    records: int = 0
    skipped: int = 0
    dead_letters: int = 0
    transactions: int = 0


class _Failed(Exception):
    """The handler failed on the record of this index."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index)
        self.index = index
        self.error = error


async def process(
    client: Client,
    source: str | Sequence[str],
    group: Group,
    handler: Handler,
    on_error: OnError,
    batch: int,
    idle_timeout: float | None,
) -> Processed:
    """Join the group and handle what its topics hold, until cancelled or idle for `idle_timeout` seconds.

    Raises StaleGeneration when another consumer joins, and with "stop" what the handler raised.
    """
    if on_error not in ("stop", "skip") and not isinstance(on_error, DeadLetter):
        raise InvalidRequest(f"on_error is 'stop', 'skip' or dead_letter(topic), not {on_error!r}")
    topics = [source] if isinstance(source, str) else list(source)
    joined = await client.join(group.name)
    ends = dict(joined.positions)
    starts: Mapping[str, Start] = dict.fromkeys(topics, group.start) | {
        name: behind(end) for name, end in ends.items() if name in topics or _parent(name) in topics
    }
    work = _Work(client, group.name, joined.generation, ends, handler, on_error)
    loop = asyncio.get_running_loop()
    idle_since = loop.time()
    async with await client.reader(topics, start=starts) as reader:
        while True:
            wait = WAIT if idle_timeout is None else max(min(WAIT, idle_since + idle_timeout - loop.time()), 0.0)
            found = await reader.read(limit=batch, timeout=wait)
            if found is not None:
                await work.handle(list(found))
                idle_since = loop.time()
            elif idle_timeout is not None and loop.time() >= idle_since + idle_timeout:
                return work.done


def behind(end: Position) -> Position:
    """The first position that can be behind another one."""
    if end.batch >= 0:
        return end._replace(batch=end.batch + 1)
    return Position(end.ledger, end.entry + 1)


def _parent(name: str) -> str | None:
    """The topic of a partition."""
    partition = partition_of(name)
    return None if partition is None else partition.topic


class _Work:
    """`ends`: the last position that the group has consumed of each topic."""

    def __init__(
        self,
        client: Client,
        group: str,
        generation: int,
        ends: dict[str, Position],
        handler: Handler,
        on_error: OnError,
    ) -> None:
        self.done = Processed()
        self._client = client
        self._group = group
        self._generation = generation
        self._ends = ends
        self._handler = handler
        self._on_error = on_error

    async def handle(self, records: list[Record]) -> None:
        """Handle records of one topic that follow one another."""
        waiting = deque([records])
        while waiting:
            part = waiting.popleft()
            try:
                await self._commit(part, self._call_handler)
                self.done.records += len(part)
            except _Failed as failed:
                if self._on_error == "stop":
                    raise failed.error from None
                poison, rest = part[failed.index], part[failed.index + 1 :]
                # What stood before it is done again without it, so that it commits.
                if failed.index:
                    await self.handle(part[: failed.index])
                await self._put_aside(poison, failed.error)
                if rest:
                    waiting.appendleft(rest)

    async def _commit(
        self, records: list[Record], work: Callable[[Transaction, list[Record]], Awaitable[None]]
    ) -> None:
        """Do the work and move the group, in one transaction; again where that was aborted."""
        topic, end = records[0].topic, records[-1].position
        start = self._ends.get(topic, EARLIEST)
        while True:
            txn = self._client.transaction()
            try:
                async with txn:
                    await work(txn, records)
                    txn.consumed(ConsumerPosition(self._group, topic, self._generation, start, end))
            except TransactionAborted:
                await asyncio.sleep(PAUSE)
                continue
            except OutcomeUnknown as unknown:
                if await self._client.outcome(unknown.txn) is not Outcome.COMMIT:
                    continue  # if it commits after all, the group has moved and this one is refused
            self._ends[topic] = end
            self.done.transactions += 1
            return

    async def _call_handler(self, txn: Transaction, records: list[Record]) -> None:
        for index, record in enumerate(records):
            try:
                await self._handler(txn, record)
            except Exception as error:
                if isinstance(error, Error) and not _is_fault_of_record(error):
                    raise
                raise _Failed(index, error) from error

    async def _put_aside(self, record: Record, error: Exception) -> None:
        if isinstance(self._on_error, DeadLetter):
            topic = self._on_error.topic
            row = {
                **record.properties,
                "dead_letter_topic": record.topic,
                "dead_letter_position": str(record.position),
                "dead_letter_error": f"{type(error).__name__}: {error}",
            }
            rows = many_rows([record.value or b""], [record.key], [record.event_time], [row], None)
            if record.value is None:
                rows = rows._replace(values=(None,))

            async def send(txn: Transaction, _: list[Record]) -> None:
                await txn.send_rows(topic, rows)

            await self._commit([record], send)
            self.done.dead_letters += 1
        else:

            async def nothing(txn: Transaction, _: list[Record]) -> None:
                """Only the group moves."""

            await self._commit([record], nothing)
            self.done.skipped += 1


def _is_fault_of_record(error: Error) -> bool:
    """Whether an error of ours is one that the record itself would meet again."""
    return isinstance(error, CallerError) and not isinstance(error, (TransactionAborted, Fenced))
