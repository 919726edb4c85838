"""A client that connects while its service starts."""

from __future__ import annotations

import asyncio

import pytest
from service_process import kept_port
from service_setup import starting_service

from broker_io import waits
from txnbuffer import Client, ServiceUnavailable, connect
from txnbuffer.client import connection
from txnbuffer.client.connection import open_session
from txnbuffer.client.session.session import Link


async def use(connecting: asyncio.Future[Client]) -> None:
    client = await asyncio.wait_for(connecting, 60.0)
    await client.send("t", b"x")
    await client.close()


async def test_connect_waits_for_a_starting_service(monkeypatch: pytest.MonkeyPatch) -> None:
    turned_away, opening = asyncio.Event(), open_session

    async def watched(*arguments: object) -> Link:
        try:
            return await opening(*arguments)  # type: ignore[arg-type]  # as they came
        except ServiceUnavailable:
            turned_away.set()
            raise

    monkeypatch.setattr(connection, "open_session", watched)
    async with starting_service() as (address, serve):
        with pytest.raises(ServiceUnavailable, match="nothing is served yet"):
            await connect(address, max_unavailable=0.0).open()
        turned_away.clear()
        connecting = asyncio.ensure_future(connect(address, max_unavailable=60.0).open())
        await asyncio.wait_for(turned_away.wait(), 60.0)
        await serve()
        await use(connecting)


async def test_error_of_a_starting_service_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LONG_SECONDS", 0.0)
    async with starting_service() as (address, _):
        with waits.waiting("the log to be opened") as wait:
            wait.failed(ServiceUnavailable("no broker answers at b:6650"))
            with pytest.raises(ServiceUnavailable, match=r"log to be opened for \d s: no broker answers at b:6650"):
                await connect(address, max_unavailable=0.0).open()


async def test_connect_succeeds_if_the_service_starts_in_time() -> None:
    port = kept_port()
    connecting = asyncio.ensure_future(connect(f"txnbuf://127.0.0.1:{port}", max_unavailable=60.0).open())
    await asyncio.sleep(1.0)
    assert not connecting.done()
    async with starting_service(port) as (_, serve):
        await serve()
        await use(connecting)
