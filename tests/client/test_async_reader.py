"""The asyncio reader: shared by tasks, cancelled during a read, and closed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from client_world import LONG, World, inside, run

from txnbuffer.client.lifecycle import opened
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import InvalidRequest, ServiceUnavailable


class Gate:
    """A reader whose reads wait until they may go on, and may be told to fail."""

    finished = False

    def __init__(self, reader: CommittedReader) -> None:
        self.reader = reader
        self.begun, self.open = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: Exception | None = None
        self.closed = threading.Event()

    def read(self, **options: Any) -> Any:
        self.begun.release()
        assert self.open.acquire(timeout=LONG)
        if self.failure is not None:
            raise self.failure
        return self.reader.read(**options)

    def close(self) -> None:
        self.reader.close()
        self.closed.set()

    async def wait(self) -> None:
        """Until a read has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=LONG)


class Reading(NamedTuple):
    reader: AsyncReader
    gate: Gate


@asynccontextmanager
async def reading_ten() -> AsyncIterator[Reading]:
    async with World() as world:
        client = await world.client()
        async with client.transaction() as txn:
            await txn.send_many("log", [b"%d" % number for number in range(10)])
        gate = Gate(CommittedReader(world.broker, "log"))
        async with AsyncReader(gate, ThreadPoolExecutor(1)) as reader:  # type: ignore[arg-type]  # as far as it is used
            yield Reading(reader, gate)


with_reader = inside(reading_ten)


def values(batch: Any) -> list[int]:
    return [int(record.value) for record in batch or ()]


@with_reader
async def test_tasks_that_share_a_reader_get_each_record_once(reading: Reading) -> None:
    reader, gate = reading
    gate.open.release(100)
    found: Counter[int] = Counter()

    async def work() -> None:
        while (batch := await reader.read(limit=3, timeout=0.2)) is not None:
            found.update(values(batch))

    await asyncio.gather(*(work() for _ in range(3)))
    assert found == Counter(range(10))


@with_reader
async def test_timeout_includes_the_wait_for_other_reads(reading: Reading) -> None:
    reader, gate = reading
    first = asyncio.ensure_future(reader.read(timeout=LONG))
    await gate.wait()
    assert await reader.read(timeout=0.0) is None
    assert await reader.read(timeout=0.01) is None
    gate.open.release()
    assert values(await first) == [*range(10)]


@with_reader
async def test_records_of_a_cancelled_read_are_returned_by_the_next_within_its_limit(
    reading: Reading,
) -> None:
    reader, gate = reading
    first = asyncio.ensure_future(reader.read(limit=8, timeout=LONG))
    await gate.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.open.release(100)
    assert [values(await reader.read(limit=3)) for _ in range(5)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], []]


@with_reader
async def test_reader_continues_after_retryable_errors_only(reading: Reading) -> None:
    reader, gate = reading
    gate.open.release(100)
    with pytest.raises(InvalidRequest, match="at least 1"):
        await reader.read(limit=0)
    gate.failure = ServiceUnavailable("away")
    with pytest.raises(ServiceUnavailable):
        await reader.read()
    gate.failure = None
    assert values(await reader.read(limit=4)) == [0, 1, 2, 3]
    gate.failure = InvalidRequest("damaged")
    with pytest.raises(InvalidRequest, match="damaged"):
        await reader.read()
    gate.failure = None
    with pytest.raises(InvalidRequest, match="damaged"):
        await reader.read()


@with_reader
async def test_reader_is_closed_although_the_caller_of_close_is_cancelled(reading: Reading) -> None:
    reader, gate = reading
    first = asyncio.ensure_future(reader.read(timeout=LONG))
    await gate.wait()
    closing = asyncio.ensure_future(reader.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    gate.open.release()
    assert values(await first) == [*range(10)]
    assert await asyncio.to_thread(gate.closed.wait, LONG)
    with pytest.raises(InvalidRequest, match="open another one"):
        await reader.read()


class Thing:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


async def test_result_of_a_cancelled_open_is_closed() -> None:
    begun, go_on, thing = threading.Event(), threading.Event(), Thing()

    def opening() -> Thing:
        begun.set()
        assert go_on.wait(LONG)
        return thing

    with ThreadPoolExecutor(1) as thread:
        task = asyncio.ensure_future(opened(thread, opening))
        assert await asyncio.to_thread(begun.wait, LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not thing.closed.is_set()
        go_on.set()
        assert await asyncio.to_thread(thing.closed.wait, LONG)


def test_the_error_of_a_cancelled_read_is_not_logged() -> None:
    logged: list[str] = []

    async def test(opened: Reading) -> None:
        reader, gate = opened
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        reading = asyncio.ensure_future(reader.read(timeout=1.0))
        await gate.wait()
        reading.cancel()
        await asyncio.wait([reading])
        gate.failure = ServiceUnavailable("the service is gone")
        gate.open.release()
        await reader.close()
        reader._reading = None
        gc.collect()

    run(with_reader(test)())
    assert logged == []
