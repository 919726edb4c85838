"""Pulsar's own transactions on a topic of ours: what readers and services make of them is what the manual says."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_app import App, app_on
from pulsar_container import distribution
from service_setup import engine_on, on_a_loop_for

from bench.pulsar_broker import DRIVER
from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import StorageError
from broker_io.port import Broker
from broker_io.testing.standalone import NoPulsar, Standalone
from txnbuffer import CommittedReader
from txnbuffer.model import Outcome
from txnbuffer.recovery import followed_topic

SECONDS = 120.0
QUIET = 1.0
"""Seconds in which a reader gets nothing, as there is nothing for it."""


class Native:
    """Transactions of one record, `native`, which stay open until they are told how to end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, what: str) -> None:
        """`open`, then `commit` or `abort`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert any(line == f"{what}\n" for line in self._process.stdout), "the driver ended"  # it logs there too


@contextmanager
def native(url: str, topic: str) -> Iterator[Native]:
    try:
        home = distribution()
    except NoPulsar as failure:
        pytest.fail(f"Pulsar's own transactions need its Java client: {failure}", pytrace=False)
    command = ["java", "-cp", f"{home}/lib/*", str(DRIVER), "hold", url, topic]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Native(process)
        finally:
            process.kill()


def read(broker: Broker, count: int) -> list[tuple[bytes | None, int]]:
    """The first so many committed records, and whatever comes at once behind them."""
    found: list[tuple[bytes | None, int]] = []
    with CommittedReader(broker, "orders") as reader:
        while (batch := reader.read(timeout=SECONDS if len(found) < count else QUIET)) is not None:
            found += [(record.value, record.seqno) for record in batch]
    return found


async def commit(app: App, value: bytes) -> None:
    txn = next(app.ids)
    await app.write("orders", [txn], value)
    assert await app.commit(txn, "orders") is Outcome.COMMIT


async def problem_at_start(broker: Broker) -> Exception | None:
    async with engine_on(broker, shared=True) as engine:
        return engine.topics.get("orders").problem


@on_a_loop_for(600.0)
async def mixed(url: str, admin: str, namespace: str, patch: pytest.MonkeyPatch) -> None:
    address, run = f"{url}/{namespace}", asyncio.to_thread
    first, second, third = (b"first", 1), (b"native", 2), (b"third", 3)
    with open_broker(address, admin_url=admin) as own, open_broker(address, admin_url=admin) as broker:
        async with engine_on(own, shared=True) as engine:
            app = await app_on(engine, broker, "orders")
            await commit(app, b"first")
            with native(url, f"persistent://{namespace}/orders") as other:
                await run(other.do, "open")
                await commit(app, b"third")
                assert await run(read, broker, 1) == [first]  # the broker shows nobody what stands behind an open one
                await run(other.do, "commit")
                assert await run(read, broker, 3) == [first, second, third]
                await run(other.do, "open")
                await run(other.do, "abort")
                assert await run(read, broker, 3) == [first, second, third]
        with patch.context() as impatient:
            impatient.setattr(followed_topic, "REPLAY_TIMEOUT", QUIET)
            problem = await problem_at_start(own)
        assert isinstance(problem, StorageError)
        assert "no transactions of its own end the log" in str(problem)
        with broker.writer("orders") as writer:
            writer.append(Batch.of([Message(None, b"behind")])).result(SECONDS)
        assert await problem_at_start(own) is None
        assert await run(read, broker, 4) == [first, second, third, (b"behind", 4)]


def test_transactions_of_the_broker_are_read_as_it_shows_them(
    odd_broker: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(odd_broker.url, odd_broker.admin, odd_broker.namespace(), monkeypatch)
