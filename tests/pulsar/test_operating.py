"""Behaviour while a component is down, and the view of other programs: a test per row in `docs/outages.md`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.standalone import Standalone, ask
from txnbuffer import Client, CommittedReader, Outcome, ServiceUnavailable, Transaction, connect
from txnbuffer.model import Marker, MarkerItem
from txnbuffer.protocol import MARKER, SEQ, encode_marker

PAGE = Path(__file__).parents[2] / "docs" / "outages.md"
SECONDS = 300.0
TESTED: list[str] = []


def row(name: str) -> Callable[[Any], Any]:
    """Mark a test with the row of the page that it proves, by its first cell."""
    TESTED.append(name)
    return lambda test: test


class Place:
    """A namespace with services, clients and plain Pulsar programs."""

    def __init__(self, url: str, admin: str, namespace: str) -> None:
        self.address, self.namespace = f"{url}/{namespace}", namespace
        self.options = {"admin_url": admin, "max_unavailable": SECONDS}
        self.topic = f"persistent://{namespace}/orders"
        self.others = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
        self.services: list[ServiceProcess] = []
        self._producer: Any = None
        with open_broker(self.address, **self.options) as broker:
            broker.create_topic("orders")

    def launch(self, *flags: str) -> ServiceProcess:
        self.services.append(ServiceProcess(self.address, "--admin-url", self.options["admin_url"], *flags))
        return self.services[-1]

    async def serve(self, *flags: str) -> ServiceProcess:
        return await asyncio.to_thread(self.launch(*flags).wait_serving)

    async def stand_by(self) -> ServiceProcess:
        standby = self.launch("--standby")
        await asyncio.to_thread(standby.wait_event, "standing by")
        return standby

    async def connect(self, **more: Any) -> Client:
        return await connect(self.address, broker_options=self.options, **{"max_unavailable": SECONDS, **more})

    def send_plainly(self, value: bytes, properties: dict[str, str] | None = None) -> Future[Any]:
        """Send as a plain producer; the future is done once the broker has acknowledged the message."""
        if self._producer is None:
            self._producer = self.others.create_producer(self.topic, send_timeout_millis=0)
        sent: Future[Any] = Future()
        self._producer.send_async(value, lambda result, _: sent.set_result(result), properties=properties)
        return sent

    def consume_plainly(self, last: bytes) -> list[Any]:
        """What a consumer of the client library gets, up to the message with this value."""
        consumer = self.others.subscribe(self.topic, "plain", initial_position=pulsar.InitialPosition.Earliest)
        messages = [consumer.receive(int(SECONDS * 1000))]
        while messages[-1].data() != last:
            messages.append(consumer.receive(int(SECONDS * 1000)))
        return messages

    async def read(self, *wanted: bytes) -> None:
        """Assert that a new reader sees exactly these records now."""
        assert await asyncio.to_thread(self._read, len(wanted)) == [*wanted]

    def _read(self, count: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        with open_broker(self.address, **self.options) as broker, CommittedReader(broker, "orders") as reader:
            while len(found) < count:
                batch = reader.read(timeout=SECONDS)
                assert batch is not None, found
                found += [record.value for record in batch]
            assert reader.read() is None
        return found

    def wait_for(self, value: bytes) -> None:
        """Wait until a record with this value is in the log, decided or not."""
        with (
            open_broker(self.address, **self.options) as broker,
            CommittedReader(broker, "orders", isolation="read_uncommitted") as reader,
        ):
            while (batch := reader.read(timeout=SECONDS)) is None or value not in [one.value for one in batch]:
                assert batch is not None, value

    def close(self) -> None:
        for service in self.services:
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
                service.process.kill()
            service.finish()
        self.others.close()


@pytest.fixture
def place(cluster: Cluster, namespace: str) -> Iterator[Place]:
    made = Place(cluster.url, cluster.admin, namespace)
    yield made
    made.close()


@pytest.fixture
def apart(mortal: Standalone) -> Iterator[Place]:
    """A place on a private broker."""
    made = Place(mortal.url, mortal.admin, mortal.namespace())
    yield made
    made.close()


async def one_record(place: Place, client: Client, value: bytes) -> Transaction:
    """An open transaction with a record in the log."""
    txn = await client.transaction(timeout=SECONDS).begin()
    await txn.send("orders", value)
    await asyncio.to_thread(place.wait_for, value)
    return txn


async def finish(txn: Transaction, value: bytes) -> None:
    """Send one more record and commit."""
    await txn.send("orders", value)
    await txn.commit(wait_visible=True)


async def sent(future: Future[Any]) -> None:
    assert await asyncio.wait_for(asyncio.wrap_future(future), SECONDS) == pulsar.Result.Ok


def begun(*waiting: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(one) for one in waiting]


@row("the standby")
async def test_everything_works_without_the_standby(place: Place) -> None:
    await place.serve()
    standby = await place.stand_by()
    client = await place.connect()
    txn = await one_record(place, client, b"1")
    standby.kill()
    await txn.commit(wait_visible=True)
    await place.read(b"1")
    await client.close()


@row("the service, with a standby")
async def test_standby_answers_pending_requests_of_the_service(place: Place) -> None:
    active = await place.serve()
    standby = await place.stand_by()
    client = await place.connect()
    txn = await one_record(place, client, b"1")
    active.kill()
    await finish(txn, b"2")
    await asyncio.to_thread(standby.wait_event, "serving")
    assert await client.outcome(txn.id) is Outcome.COMMIT
    await place.read(b"1", b"2")
    await client.close()


@row("the service, without a standby")
async def test_plain_writes_and_reads_of_decided_records_work_without_a_service(place: Place) -> None:
    service = await place.serve()
    client = await place.connect()
    await (await one_record(place, client, b"decided")).commit(wait_visible=True)
    await sent(place.send_plainly(b"plain"))
    txn = await one_record(place, client, b"open")
    service.kill()
    await sent(place.send_plainly(b"behind"))
    await client.send("orders", b"ordinary")
    await place.read(b"decided", b"plain")
    impatient = await place.connect(max_unavailable=1.0)
    with pytest.raises(ServiceUnavailable):
        await impatient.transaction().begin()
    await impatient.close()
    (committed,) = begun(finish(txn, b"more"))
    await place.serve()
    await committed
    await place.read(b"decided", b"plain", b"open", b"behind", b"ordinary", b"more")
    await client.close()


@row("the service hangs")
async def test_hanging_service_is_fenced_with_the_flag(place: Place) -> None:
    hanging = await place.serve()
    client = await place.connect()
    txn = await one_record(place, client, b"1")
    hanging.process.send_signal(signal.SIGSTOP)
    await sent(place.send_plainly(b"plain"))
    (committed,) = begun(txn.commit(wait_visible=True))
    await place.serve("--fence", "--set", "transactions.session_timeout=45")
    await committed
    await place.read(b"1", b"plain")
    hanging.process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(hanging.finish, SECONDS) == 3
    await client.close()


@row("the broker that serves a topic: the topic, its bundle or its namespace was unloaded")
async def test_calls_for_a_topic_without_an_owner_wait_for_the_next_one(place: Place) -> None:
    service = await place.serve()
    client = await place.connect()
    reader = await client.reader("orders", start="end")
    txn = await one_record(place, client, b"1")
    with open_broker(place.address, **place.options) as broker:
        await asyncio.to_thread(broker.roll, "orders")  # this unloads it
    await txn.send("orders", b"2")
    await asyncio.to_thread(ask, place.options["admin_url"], f"namespaces/{place.namespace}/unload", "PUT")
    await txn.send("orders", b"3")
    await txn.commit(wait_visible=True)
    await place.read(b"1", b"2", b"3")
    found: list[bytes | None] = []
    while len(found) < 3:
        batch = await reader.read(timeout=SECONDS)
        assert batch is not None
        found += [record.value for record in batch]
    assert found == [b"1", b"2", b"3"]
    assert service.process.poll() is None
    await client.close()


@row("the broker")
async def test_everything_waits_without_a_broker(mortal: Standalone, apart: Place) -> None:
    service = await apart.serve()
    client = await apart.connect()
    await (await one_record(apart, client, b"decided")).commit(wait_visible=True)
    await sent(apart.send_plainly(b"plain"))
    txn = await one_record(apart, client, b"open")
    reader = await client.reader("orders", start="end")
    mortal.kill()
    behind = apart.send_plainly(b"behind")
    waiting = begun(client.send("orders", b"ordinary"), txn.commit(wait_visible=True), reader.read(timeout=SECONDS))
    await asyncio.wait(waiting, timeout=2.0)
    assert not any(one.done() for one in (*waiting, behind))
    await asyncio.to_thread(mortal.start)
    await sent(behind)
    await asyncio.gather(*waiting)
    assert service.process.poll() is None
    found = await asyncio.to_thread(apart._read, 5)
    assert found[:3] == [b"decided", b"plain", b"open"]
    assert {*found[3:]} == {b"behind", b"ordinary"}
    await client.close()


@row("the broker and the service")
async def test_service_ends_without_a_broker_and_a_standby_waits_for_it(mortal: Standalone, apart: Place) -> None:
    service = await apart.serve()
    client = await apart.connect()
    txn = await one_record(apart, client, b"1")
    mortal.kill()
    service.kill()
    (committed,) = begun(txn.commit(wait_visible=True))
    early = apart.launch("--set", "pulsar.max_unavailable=1")
    standby = apart.launch("--standby", "--set", "pulsar.max_unavailable=1")
    assert await asyncio.to_thread(early.finish, SECONDS) == 3
    assert "no admin interface answers" in (await asyncio.to_thread(standby.wait_event, "problem"))["error"]
    await asyncio.to_thread(mortal.start)
    await asyncio.to_thread(standby.wait_serving)
    await committed
    await apart.read(b"1")
    await client.close()


def test_every_row_of_the_page_has_a_test() -> None:
    table = PAGE.read_text()
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    assert rows == TESTED


async def test_plain_consumers_get_markers_and_undecided_and_aborted_records(place: Place) -> None:
    await place.serve()
    client = await place.connect()
    aborted = await one_record(place, client, b"aborted")
    await aborted.abort()
    undecided = await one_record(place, client, b"undecided")
    messages = await asyncio.to_thread(place.consume_plainly, b"undecided")
    values = [message.data() for message in messages if MARKER not in message.properties()]
    assert values == [b"aborted", b"undecided"]
    assert all(SEQ in message.properties() or MARKER in message.properties() for message in messages)
    await undecided.abort()
    await client.close()


async def test_any_producer_of_a_topic_can_forge_a_marker(place: Place) -> None:
    service = await place.serve()
    client = await place.connect()
    txn = await one_record(place, client, b"taken away")
    forged = encode_marker(Marker(0, 1, 0, True, (MarkerItem(txn.id, Outcome.ABORT, 0),)))
    await sent(place.send_plainly(forged.value or b"", dict(forged.properties)))
    await sent(place.send_plainly(b"plain"))
    await place.read(b"plain")
    assert await asyncio.to_thread(service.finish, SECONDS) == 3
    await place.serve()
    await txn.abort()
    await client.close()
