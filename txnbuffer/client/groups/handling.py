"""Calling handlers: retries, skipped records and dead letters

A handler that fails is called again up to `retries` times, each time after a longer pause and in a new transaction. If
it still fails, the records before the failing one are handled again and committed. Then, depending on `on_error`, the
failing record is skipped or sent to the dead-letter topic in a transaction that moves the group past it, or processing
stops. A batch handler does not report which record failed, so the batch is halved until the record is found. A handler
that takes too long for a single record has failed as well.

A dead letter has the key, value, properties and event time of its record, and properties with the position of the
record and the error. A transactional record can have at most 997 properties; if the record has too many, the last of
them by name are packed into one property, as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from broker_io.waits import Backoff
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.checks import check_awaitable
from txnbuffer.client.base import BaseClient
from txnbuffer.client.groups.membership import BLOCKED, MIN_CALLS, AdaptiveBatch, LoopStalls, Membership
from txnbuffer.client.path.send_columns import SendColumns, many_rows
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import ConsumerPosition, PartitionAssignment
from txnbuffer.errors import (
    CallerError,
    Error,
    Fenced,
    HandlerTooSlow,
    InvalidHandler,
    LimitExceeded,
    OutcomeUnknown,
    StaleGeneration,
    TransactionAborted,
    retry_pause,
)
from txnbuffer.model import Outcome, Position

PACKED = "dead_letter_properties"
MAX_PROPERTIES, KEPT_PROPERTIES = 950, 900
"""From a record with more than the first, the second are kept; so a dead letter of a dead letter still fits."""
ERROR_LENGTH = 1000
"""Characters of the error text in a dead letter."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The topic for records that the handler fails on."""

    topic: str


def dead_letter(topic: str) -> DeadLetter:
    """Return a value for `on_error`: send records that the handler fails on to `topic`, and continue.

    Each keeps its key, value, properties and event time, and gets the properties `dead_letter_topic`,
    `dead_letter_position`, `dead_letter_group`, `dead_letter_attempts` and `dead_letter_error`. If a record has more
    than 950 properties, some are packed into `dead_letter_properties` as a JSON object.
    """
    return DeadLetter(topic)


def dead_letter_columns(record: Record, group: str, attempts: int, error: Exception) -> SendColumns:
    """Return the dead letter of a record after `attempts` calls of the handler, the last of which raised `error`."""
    row = {
        **_bounded(record.properties),
        "dead_letter_topic": record.topic,
        "dead_letter_position": str(record.position),
        "dead_letter_group": group,
        "dead_letter_attempts": str(attempts),
        "dead_letter_error": _error_text(error),
    }
    rows = many_rows([record.value or b""], [record.key], [record.event_time], [row], None)
    return rows._replace(values=(None,)) if record.value is None else rows


def _bounded(properties: Mapping[str, str]) -> Mapping[str, str]:
    if len(properties) <= MAX_PROPERTIES:
        return properties
    kept = {name: properties[name] for name in sorted(properties.keys() - {PACKED})[:KEPT_PROPERTIES]}
    packed = {name: properties[name] for name in sorted(properties.keys() - kept.keys())}
    return kept | {PACKED: json.dumps(packed, separators=(",", ":"), ensure_ascii=False)}


def _error_text(error: Exception) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (no error text)"
    return text[:ERROR_LENGTH].encode(errors="replace").decode()


Handler: TypeAlias = Callable[[Transaction, Record], Awaitable[None]]
BatchHandler: TypeAlias = Callable[[Transaction, RecordBatch], Awaitable[None]]
Work: TypeAlias = Callable[[Transaction, RecordBatch], Awaitable[int]]

LOG = logging.getLogger("txnbuffer.groups")

PAUSE = 0.05
"""Seconds before an aborted transaction is retried."""
FIRST_RETRY = 0.1
"""Seconds before a failed handler is called again; doubles each time, up to LONGEST_RETRY."""
LONGEST_RETRY = 10.0
COMMIT_TIME = 1.0
"""Seconds. A commit that takes longer than this and longer than its handler timed out because of the cluster."""
ABORTS_LOGGED, MAX_ABORTS = 3, 20
"""Consecutive aborts before a warning is logged, and before the error is raised: about two minutes."""
SLOW_CALL = 60.0
"""Seconds of one call of the handler after which a warning is logged."""
TIMED_OUT = "the transaction timed out; handle records faster, or increase the service's transactions.timeout"
LOOP_BLOCKED = (
    "the event loop was blocked; run blocking calls in a thread, because a member without heartbeats for 8 s is removed"
)


OnError: TypeAlias = Literal["stop", "skip"] | DeadLetter


@dataclass(slots=True)
class Processed:
    """The counts of a call of `process`.

    `records` were handled, `skipped` were skipped, and `dead_letters` were sent to the dead-letter topic, in
    `transactions` committed transactions. `retries` is the number of repeated calls of the handler. `held_back`: what
    an open transaction held back when the call ended at its idle timeout, at most one for each topic and partition.
    """

    records: int = 0
    skipped: int = 0
    dead_letters: int = 0
    transactions: int = 0
    retries: int = 0
    held_back: tuple[HeldBack, ...] = ()


@dataclass(slots=True)
class HandlerTask:
    """The handler (two of the three are None), what follows when it fails, and what was done.

    `turn`: the lock that a runner holds while the handler runs, so that it runs for one partition at a time.
    `work`: a handler of batches that returns how many of the first records it has handled. If it returns 0, it is
    called again; once `stop` is set, processing ends instead, with everything committed that was handled.
    """

    handler: Handler | None
    batch_handler: BatchHandler | None
    on_error: OnError
    retries: int
    done: Processed = field(default_factory=Processed)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    work: Work | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class NoMoreTaken(Exception):
    """The handler takes no more records: processing has to end."""


class _NoneHandled(Exception):
    """The handler has handled none of the records, so its transaction aborts."""


class _Failed(Exception):
    """The handler failed on the record with this index; None: on an unknown record of the batch."""

    def __init__(self, index: int | None, error: Exception) -> None:
        super().__init__(index)
        self.index = index
        self.error = error


class HandlerRunner:
    """Handles the records of one partition."""

    def __init__(
        self,
        client: BaseClient,
        member: Membership,
        assignment: PartitionAssignment,
        task: HandlerTask,
        batch_size: AdaptiveBatch,
    ) -> None:
        self.end = assignment.end
        """The last position that the group has consumed."""
        self._client = client
        self._member = member
        self._assignment = assignment
        self._task = task
        self._batch_size = batch_size
        self._aborts = 0
        self._backoff = Backoff(PAUSE, LONGEST_RETRY)
        self._tried = 0
        self._last_at = 0.0

    async def handle(self, records: RecordBatch, *, halved: bool = False) -> None:
        """Handle consecutive records.

        Raises NoMoreTaken, StaleGeneration, PositionConflict, and the error of the handler.
        """
        failures: dict[int | None, int] = {}
        while len(records):
            at: int | None
            error: Exception
            calls = self._batch_size.calls(records.positions.first)
            if calls >= self._max_slow_calls:
                at, error, count = 0, self._too_slow(records.positions.first), calls
            else:
                try:
                    handled = await self._commit(records, self._call)
                except _Failed as failed:
                    at, error = failed.index, failed.error
                else:
                    self._task.done.records += handled
                    records, failures = records.take(slice(handled, None)), {} if handled else failures
                    continue
                failures[at] = count = failures.get(at, 0) + 1
            several = at is None and len(records) > 1
            if count <= (0 if halved and several else self._task.retries):
                self._task.done.retries += 1
                await asyncio.sleep(min(FIRST_RETRY * 2 ** (count - 1), LONGEST_RETRY))
            elif self._task.on_error == "stop":
                raise error
            elif several:
                middle = len(records) // 2
                await self.handle(records.take(slice(middle)), halved=True)
                records, failures, halved = records.take(slice(middle, None)), {}, True
            else:
                at = at or 0
                # The records before it were aborted with it: handle them again.
                await self.handle(records.take(slice(at)))
                await self._skip_record(records.take(slice(at, at + 1)), error, count)
                records, failures = records.take(slice(at + 1, None)), {}

    async def _commit(self, records: RecordBatch, work: Work) -> int:
        """Run `work` and move the group in one transaction; return how many of the first records it has handled.

        Returns 0 if the transaction aborted. If it timed out, the next attempt handles fewer records.
        Raises NoMoreTaken.
        """
        group, topic = self._member.group, self._assignment.partition
        records = records.take(slice(self._batch_size.records))
        clock = asyncio.get_running_loop().time
        txn = Transaction(self._client, group=group)
        began = self._last_at = done = clock()
        self._tried = len(records)
        stalls = LoopStalls()
        try:
            async with AsyncExitStack() as turn:
                await turn.enter_async_context(self._task.turn)
                generation = self._member.generation_of(self._assignment)
                async with txn:
                    began = self._last_at = clock()
                    try:
                        with txn.handler_scope(), stalls:
                            count = await work(txn, records)
                    finally:
                        done = clock()
                    await turn.aclose()
                    if not count:
                        raise _NoneHandled
                    end = records.take(slice(count)).positions.last
                    txn.consumed(ConsumerPosition(group, topic, generation, self.end, end))
                    await txn.commit()
        except (TransactionAborted, LimitExceeded) as aborted:
            timed_out = isinstance(aborted, TransactionAborted) and aborted.timed_out
            if timed_out and clock() - done <= max(done - began, COMMIT_TIME):
                self._took_too_long(records, done - began, done, TIMED_OUT)
                await asyncio.sleep(PAUSE)
            else:
                await self._pause(aborted)
            return 0
        except _NoneHandled:
            if self._task.stop.is_set():
                raise NoMoreTaken from None
            return 0
        except StaleGeneration:
            if stalls.longest >= BLOCKED:
                self._took_too_long(records, stalls.longest, done, LOOP_BLOCKED)
            raise
        except OutcomeUnknown as unknown:
            if unknown.txn != txn.id:
                raise  # of another transaction, which the handler created
            if await self._client.outcome(unknown.txn) is not Outcome.COMMIT:
                return 0  # if it commits later, the retry is rejected because the group has moved
        self.end = end
        self._task.done.transactions += 1
        self._batch_size.committed()
        self._aborts = 0
        return count

    async def _call(self, txn: Transaction, records: RecordBatch) -> int:
        """Call the handler; return how many records it handled."""
        at: int | None = None
        clock = asyncio.get_running_loop().time
        until = clock() + self._batch_size.seconds
        slow_warning = self._warn_if_slow(records)
        try:
            if self._task.work is not None:
                return await self._task.work(txn, records)
            if self._task.batch_handler is not None:
                await check_awaitable(self._task.batch_handler(txn, records))
            elif self._task.handler is not None:
                rows = iter(records)
                for index in range(len(records)):
                    at = index  # also if its value can't be decoded
                    await check_awaitable(self._task.handler(txn, next(rows)))
                    if (now := clock()) >= until:
                        self._tried = index + 1
                        return index + 1
                    self._last_at = now
        except InvalidHandler:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._tried = len(records) if at is None else at + 1
            raise _Failed(at, RuntimeError("the call that the handler awaited was cancelled")) from error
        except Exception as error:
            self._tried = len(records) if at is None else at + 1
            if isinstance(error, Error) and not _is_fault_of_record(error, txn):
                raise
            raise _Failed(at, error) from error
        finally:
            slow_warning.cancel()
        return len(records)

    def _warn_if_slow(self, records: RecordBatch) -> asyncio.TimerHandle:
        """Log a warning if the handler does not return; until then no other member gets the partition."""
        return asyncio.get_running_loop().call_later(
            SLOW_CALL,
            LOG.warning,
            "group %r: the handler has been running for %.0f s on records from %s of %r; other members cannot get them",
            self._member.group, SLOW_CALL, records.positions.first, self._assignment.partition,
        )  # fmt: skip

    async def _skip_record(self, records: RecordBatch, error: Exception, attempts: int) -> None:
        """Move the group past a failed record, and send the record to the dead-letter topic if there is one."""
        (record,) = records.as_stored()
        target = self._task.on_error
        if not isinstance(target, DeadLetter):
            await self._commit_all(records, _nothing)
            self._task.done.skipped += 1
            return
        topic, rows = target.topic, dead_letter_columns(record, self._member.group, attempts, error)

        async def send(txn: Transaction, records: RecordBatch) -> int:
            await txn.send_rows(topic, rows, "messages")  # a single message can match the schema of its topic
            return len(records)

        await self._commit_all(records, send)
        self._task.done.dead_letters += 1

    async def _commit_all(self, records: RecordBatch, work: Work) -> None:
        while not await self._commit(records, work):
            pass

    async def _pause(self, aborted: TransactionAborted | LimitExceeded) -> None:
        """Wait before the retry of a transaction that aborted for another reason than a slow handler.

        Raises the error after MAX_ABORTS in a row.
        """
        self._aborts += 1
        if self._aborts >= MAX_ABORTS:
            raise aborted
        if self._aborts >= ABORTS_LOGGED:
            LOG.warning(
                "group %r retries a transaction on %r: %s", self._member.group, self._assignment.partition, aborted
            )
        await asyncio.sleep(retry_pause(aborted, self._backoff.after(self._aborts)))

    def _took_too_long(self, records: RecordBatch, seconds: float, done: float, why: str) -> None:
        """Reduce the batch size, because handling these records took too long; `done`: when the last one was done."""
        first = records.positions.first
        # A batch handler does not tell how long a single record took.
        last = 0.0 if self._task.handler is None else done - self._last_at
        self._batch_size.too_long(first, self._tried, seconds, last)
        what = "the record at" if self._tried == 1 else f"{self._tried} records from"
        LOG.warning(
            "group %r handled %s %s of %r for %.1f s, and has to repeat it: %s",
            self._member.group, what, first, self._assignment.partition, seconds, why,
        )  # fmt: skip

    @property
    def _max_slow_calls(self) -> int:
        """How many times a handler may be too slow for the same record before the record counts as failed."""
        return max(self._task.retries + 1, MIN_CALLS)

    def _too_slow(self, position: Position) -> HandlerTooSlow:
        return HandlerTooSlow(
            f"the handler took too long {self._batch_size.calls(position)} times for the record at {position} of "
            f"{self._assignment.partition!r}; handle it faster, run blocking calls in a thread, or increase "
            "the service's transactions.timeout"
        )


async def _nothing(_: Transaction, records: RecordBatch) -> int:
    """Handle no record: the transaction only moves the group."""
    return len(records)


def _is_fault_of_record(error: Error, txn: Transaction) -> bool:
    """Return whether an error of this package would occur again in a retry of the same record."""
    if isinstance(error, TransactionAborted):
        return error.txn != txn.id  # of another transaction, which the handler created
    if isinstance(error, LimitExceeded):
        return False
    return isinstance(error, CallerError) and not isinstance(error, Fenced)
