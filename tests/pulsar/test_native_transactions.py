"""Pulsar's own transactions on a topic of a service: readers and services treat them as documented."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_app import App, app_on
from pulsar_container import distribution
from service_setup import engine_on

from bench.pulsar_broker import DRIVER
from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.port import Broker
from broker_io.standalone import NoPulsar, Standalone
from txnbuffer import CommittedReader, follow
from txnbuffer.errors import ReplayStalled
from txnbuffer.model import Outcome

SECONDS = 120.0
QUIET = 1.0
"""Seconds for which a reader without new records is observed."""


class Native:
    """Transactions of one record, `native`, which stay open until the test ends them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, what: str) -> None:
        """Send a command to the driver: `open`, then `commit` or `abort`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert any(line == f"{what}\n" for line in self._process.stdout), (
            "the driver ended"
        )  # the driver also logs to stdout


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
    """The first `count` committed records, and those that follow at once."""
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
    async with engine_on(broker, cluster_mode=True) as engine:
        return engine.topics.get("orders").problem


async def test_native_transactions_are_read_as_the_broker_delivers_them(
    odd_broker: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, admin, run = odd_broker.namespace(), odd_broker.admin, asyncio.to_thread
    address = f"{odd_broker.url}/{namespace}"
    first, second, third = (b"first", 1), (b"native", 2), (b"third", 3)
    with open_broker(address, admin_url=admin) as own, open_broker(address, admin_url=admin) as broker:
        async with engine_on(own, cluster_mode=True) as engine:
            app = await app_on(engine, broker, "orders")
            await commit(app, b"first")
            with native(odd_broker.url, f"persistent://{namespace}/orders") as other:
                await run(other.do, "open")
                await commit(app, b"third")
                assert await run(read, broker, 1) == [first]  # the broker hides all messages after an open transaction
                await run(other.do, "commit")
                assert await run(read, broker, 3) == [first, second, third]
                await run(other.do, "open")
                await run(other.do, "abort")
                assert await run(read, broker, 3) == [first, second, third]
        with monkeypatch.context() as impatient:
            impatient.setattr(follow, "READ_SECONDS", QUIET)
            problem = await problem_at_start(own)
        assert isinstance(problem, ReplayStalled)
        assert "does not end with native Pulsar transactions" in str(problem)
        with broker.writer("orders") as writer:
            writer.append(Batch.of([Message(None, b"behind")])).result(SECONDS)
        assert await problem_at_start(own) is None
        assert await run(read, broker, 4) == [first, second, third, (b"behind", 4)]
