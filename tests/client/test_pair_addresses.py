"""A client with the addresses of both services of a pair: it finds the live one, and moves to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest
from client_world import inside
from service_process import kept_port
from service_setup import eventually

from broker_io import open_broker
from broker_io.addresses import split_address
from broker_io.batch import Batch, Message
from broker_io.environment import current
from broker_io.errors import InvalidAddress, NotLive, VersionMismatch
from broker_io.memory import MemoryBroker
from broker_io.rpc.channel import SOONER, Endpoint, LogIdentity, service_targets
from broker_io.rpc.credentials import NO_CREDENTIALS
from txnbuffer import Outcome, ServiceUnavailable, connect
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.client import connection
from txnbuffer.client.connection import LiveService, ServiceConnectors
from txnbuffer.config import PairConfig
from txnbuffer.model import TxnId
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

FAR = 0.05


class FakeLink(NamedTuple):
    target: str
    closed: list[str]

    async def close(self) -> None:
        self.closed.append(self.target)


class Addresses:
    """Services by name: each accepts, refuses with an error, or does not answer while its event is not set."""

    def __init__(self, *names: str) -> None:
        self.live = LiveService([Endpoint(name) for name in names])
        self.answers: dict[str, Exception | asyncio.Event | None] = {}
        self.tried: list[str] = []
        self.closed: list[str] = []

    async def _open(self, address: Endpoint) -> FakeLink:
        self.tried.append(address.target)
        answer = self.answers.get(address.target)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            await answer.wait()
        return FakeLink(address.target, self.closed)

    async def connect(self) -> str:
        return (await self.live.connect(self._open)).target


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "NEXT_ADDRESS", FAR)


@pytest.mark.usefixtures("fast")
class TestFindingTheLiveService:
    async def test_the_one_that_accepted_last_is_tried_first(self) -> None:
        pair = Addresses("a", "b")
        pair.answers["a"] = NotLive("standing by")
        assert [await pair.connect(), await pair.connect()] == ["b", "b"]
        assert pair.tried == ["a", "b", "b"]

    async def test_one_that_does_not_answer_is_passed_by_and_closed_if_it_answers_at_last(self) -> None:
        pair = Addresses("a", "b")
        pair.answers["a"] = silent = asyncio.Event()
        assert await pair.connect() == "b"
        silent.set()
        assert await pair.connect() == "b"
        assert pair.tried == ["a", "b", "b"]

    async def test_both_accept_at_once_and_one_of_them_is_closed(self) -> None:
        pair = Addresses("a", "b")
        pair.answers["a"] = both = asyncio.Event()
        pair.answers["b"] = both
        asyncio.get_running_loop().call_later(3 * FAR, both.set)
        used = await pair.connect()
        assert {used, *pair.closed} == {"a", "b"}
        assert pair.closed != [used]

    async def test_a_standby_is_tried_again_while_the_other_one_is_silent(self) -> None:
        pair = Addresses("a", "b")
        pair.answers |= {"a": asyncio.Event(), "b": NotLive("standing by")}
        connecting = asyncio.ensure_future(pair.connect())
        await eventually(lambda: pair.tried.count("b") > 1)
        assert not connecting.done()
        del pair.answers["b"]
        assert await connecting == "b"
        assert pair.tried.count("a") == 1

    async def test_the_errors_of_all_are_told_once_each_has_refused(self) -> None:
        pair = Addresses("a", "b")
        pair.answers |= {"a": ServiceUnavailable("a is down"), "b": NotLive("b stands by")}
        with pytest.raises(ServiceUnavailable, match="a is down; b stands by"):
            await pair.connect()
        assert pair.tried == ["a", "b"]

    async def test_an_error_of_the_caller_counts_only_if_no_other_service_may_accept(self) -> None:
        pair = Addresses("a", "b")
        pair.answers |= {"a": ServiceUnavailable("a is down"), "b": VersionMismatch("b is newer")}
        with pytest.raises(ServiceUnavailable, match="a is down; b is newer"):
            await pair.connect()
        pair.answers["a"] = VersionMismatch("a is newer")
        with pytest.raises(VersionMismatch, match="a is newer"):
            await pair.connect()

    async def test_a_defect_is_no_refusal(self) -> None:
        pair = Addresses("a", "b")
        pair.answers["a"] = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await pair.connect()


@pytest.mark.parametrize("address", ["txnbuf://a:1,", "txnbuf://,a:1", "txnbuf://a:1,b", "txnbuf://a:1;b:2", "a:1,b:2"])
def test_an_address_with_an_invalid_part_is_refused(address: str) -> None:
    with pytest.raises(InvalidAddress, match="HOST:PORT,HOST:PORT for a pair"):
        service_targets(address)


def test_equal_addresses_are_one() -> None:
    assert service_targets("txnbuf://a:1,b:2,a:1") == ("a:1", "b:2")


def test_an_ipv6_address_loses_its_brackets():
    assert split_address("[::1]:7711") == ("::1", "7711")
    assert split_address("a.example:7711") == ("a.example", "7711")
    for text in ("::1:7711", "[::1:7711", "[a]:7711", "7711", ""):
        assert split_address(text)[0] == ""


class Services:
    """Two services at fixed addresses, and the log that one of them serves."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.ports = (kept_port(), kept_port())
        self.address = "txnbuf://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.servers: list[GrpcServer] = []
        self.engine: Engine | None = None
        self._broker = broker
        self._live = 0
        self.refusal: Exception | None = None

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def serve(self, number: int) -> None:
        self.engine = await Engine.start(self._broker)
        self.engine.check_answer = self._check
        self._live = number
        await self.servers[number].serve(self.engine, ServiceAdmin(self.engine))

    async def end(self) -> None:
        if self.engine is not None:
            await self.servers[self._live].unserve()
            await self.engine.stop()
            self.engine = None

    async def move(self) -> None:
        await self.end()
        await self.serve(1 - self._live)


@asynccontextmanager
async def services() -> AsyncIterator[Services]:
    with MemoryBroker() as broker:
        two = Services(broker)
        async with AsyncExitStack() as resources:
            for port in two.ports:
                server = GrpcServer(Limits(), max_clients=10)
                await server.start(f"127.0.0.1:{port}")
                resources.push_async_callback(server.stop)
                two.servers.append(server)
            await two.serve(0)
            resources.push_async_callback(two.end)
            yield two


on_services = inside(services)


@on_services
async def test_open_transactions_streams_and_requests_move_to_the_other_service(two: Services) -> None:
    async with connect(two.address) as client:
        seen: list[bytes | None] = []

        async def follow() -> None:
            async for batch in client.stream("a"):
                seen.extend(mutation.value for mutation in batch)

        await client.send("a", b"0")
        following = asyncio.ensure_future(follow())
        async with client.transaction() as txn:
            await txn.send("a", b"1")
            await client.cursors.add("a", "archive", 0)
            for value in (b"2", b"3", b"4"):
                await two.move()
                await txn.send("a", value)
                await client.cursors.advance("a", "archive", 0)
        await two.move()
        assert await client.outcome(txn.id) is Outcome.COMMIT
        await eventually(lambda: len(seen) == 5)
        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        following.cancel()


@on_services
async def test_a_connection_for_requests_of_operators_is_one_to_the_live_service(two: Services) -> None:
    """The standby accepts connections too."""
    await two.move()
    addresses = Endpoint.each(service_targets(two.address), NO_CREDENTIALS)
    link = await ServiceConnectors.to_addresses(addresses, 20.0, LogIdentity()).admin()
    assert (await link.ask("Status", {}))["shards"] == 1
    await link.close()


def test_a_service_that_hangs_is_left_before_its_lease_ends() -> None:
    seconds = PairConfig().lease_seconds
    assert SOONER["grpc.keepalive_time_ms"] + SOONER["grpc.keepalive_timeout_ms"] < 1000 * seconds


@on_services
async def test_the_broker_of_a_pair_reads_on_at_the_other_service(two: Services) -> None:
    remote = await asyncio.to_thread(open_broker, two.address)
    await asyncio.to_thread(remote.create_topic, "plain")
    writer = await asyncio.to_thread(remote.writer, "plain")
    await asyncio.to_thread(writer.append(Batch.of([Message(b"k", b"1")])).result)
    reader = await asyncio.to_thread(remote.reader, "plain")
    await asyncio.to_thread(reader.read, timeout=60.0)
    await two.move()
    again = await asyncio.to_thread(remote.writer, "plain")
    await asyncio.to_thread(again.append(Batch.of([Message(b"k", b"2")])).result)
    found = await asyncio.to_thread(reader.read, timeout=60.0)
    assert found is not None
    assert [*found.messages.values] == [b"2"]
    await two.move()
    assert await asyncio.to_thread(remote.topics)
    await asyncio.to_thread(remote.close)


@on_services
async def test_an_answer_is_withheld_once_the_service_may_not_be_live(two: Services) -> None:
    """A paused live that has lost its lease must not tell what may be outdated."""
    async with connect(two.address, max_unavailable=0.2) as client:
        await client.send("a", b"1")
        remote = await asyncio.to_thread(open_broker, two.address, max_unavailable=0.2)
        reader = await asyncio.to_thread(remote.reader, "a")
        two.refusal = NotLive("the lease has ended")
        began = current().clock.monotonic()
        with pytest.raises(ServiceUnavailable, match="the lease has ended"):
            await client.outcome(TxnId(0, 1))
        with pytest.raises(ServiceUnavailable, match="the lease has ended"):
            await client.cursors.add("a", "archive", 0)
        with pytest.raises(NotLive, match="the lease has ended"):
            await asyncio.to_thread(call, ServiceAddress(f"127.0.0.1:{two.ports[0]}"), "Status")
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(remote.topics)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(reader.read, timeout=5.0)
        assert current().clock.monotonic() < began + 60
        await asyncio.to_thread(remote.close)
