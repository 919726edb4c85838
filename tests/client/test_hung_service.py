"""A service that hangs while its connections stay open: each kind of client gets one error, within bounds."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from client_world import run
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.rpc.channel import OPTIONS
from txnbuffer import OutcomeUnknown, SendUnknown, ServiceUnavailable, connect
from txnbuffer.client.admin_clients import AdminClients
from txnbuffer.client.session import session

SECONDS = 15
BOUND = 60.0
"""Seconds within which a call has failed that takes 15 s, `max_unavailable` and an attempt to connect."""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["handle-errors.md", "outages.md"])
def test_documents_name_the_seconds_until_a_hanging_service_is_noticed(page: str) -> None:
    options = dict(OPTIONS)
    assert int(options["grpc.keepalive_time_ms"]) + int(options["grpc.keepalive_timeout_ms"]) == 1000 * SECONDS
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert re.search(rf"hang.{{1,400}}\b{SECONDS} s", text)


def test_each_client_of_a_hanging_service_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_TIMEOUT", 7.0)
    with ServiceProcess(tmp_path / "log") as service:
        run(_all_fail(service, f"txnbuf://127.0.0.1:{service.port}"))


async def _all_fail(service: ServiceProcess, address: str) -> None:
    waited: dict[str, float] = {}

    async def failing(name: str, call: Callable[[], Awaitable[object]], *errors: type[Exception]) -> None:
        began = time.monotonic()
        with pytest.raises(errors):
            await call()
        waited[name] = time.monotonic() - began

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(address, max_unavailable=1.0)) for _ in range(5)]
        for client in clients:
            await client.send("orders", b"1", key="k")
        committing, sending, streaming, asking, closing = clients
        transaction, left = committing.transaction(), closing.transaction()
        for each in (transaction, left):
            await each.begin()
            await each.send("orders", b"2", key="k")
        stream = streaming.stream("orders")
        while not stream.caught_up:
            await stream.next(timeout=BOUND)
        await asking.cursors.add("orders", "cache")
        sync = connect(address, max_unavailable=1.0).__enter__()
        log = open_broker(address, max_unavailable=1.0)
        reader = log.reader("orders")
        while reader.read(timeout=0.0) is not None:
            pass
        service.process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            calls = [
                failing("commit", transaction.commit, OutcomeUnknown),
                failing("send", lambda: sending.send("orders", b"3", key="k"), SendUnknown),
                failing("stream", stream.next, ServiceUnavailable),
                failing("sync", lambda: asyncio.to_thread(sync.send, "orders", b"4", key="k"), SendUnknown),
                failing("log", lambda: asyncio.to_thread(log.topics), ServiceUnavailable),
                failing("reader", lambda: asyncio.to_thread(reader.read, timeout=BOUND), ServiceUnavailable),
            ]
            calls += [
                failing(f"cursor {number}", lambda: asking.cursors.remove("orders", "cache"), ServiceUnavailable)
                for number in range(5)
            ]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await closing.close()
            closed = time.monotonic() - began
            await asyncio.gather(*tasks)
        finally:
            service.process.send_signal(signal.SIGCONT)
        sync.close()
        log.close()
    assert closed < 13.5, "an open transaction and the session share one timeout"
    assert max(waited.values()) < BOUND, waited


class Hanging:
    """Connections for admin requests; requests on the first one fail after a while."""

    def __init__(self) -> None:
        self.opened = self.closed = self.asked = 0

    async def connect(self) -> Hanging:
        self.opened += 1
        await asyncio.sleep(0)
        return self

    async def ask(self, method: str, arguments: dict[str, object]) -> int:
        self.asked += 1
        if self.opened == 1:
            await asyncio.sleep(0.05)
            raise ServiceUnavailable("no answer")
        return 7

    async def close(self) -> None:
        self.closed += 1


async def test_admin_requests_do_not_wait_for_one_another() -> None:
    links = Hanging()
    admin = AdminClients([links.connect], 60.0)
    requests = [asyncio.ensure_future(admin.ask("t", "List", {}, 60.0)) for _ in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert (links.opened, links.asked) == (1, 5)
    assert await asyncio.gather(*requests) == [7] * 5
    assert (links.opened, links.closed) == (2, 1), "closed once no request uses it"
    await admin.close()
    assert links.closed == 2


async def test_a_cancelled_admin_request_stops_connecting() -> None:
    cancelled: list[str] = []

    async def never() -> Hanging:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("connecting")
            raise
        raise AssertionError("unreachable")

    admin = AdminClients([never], 60.0)
    request = asyncio.ensure_future(admin.ask("t", "List", {}))
    await asyncio.sleep(0.01)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert cancelled == ["connecting"]
