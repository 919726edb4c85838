"""A client without a connection says what it waits for, on the logger `txnbuffer.waits`."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from service_setup import eventually

from broker_io import waits
from txnbuffer import ServiceUnavailable
from txnbuffer.client.session.session import ClientSession, Link, LinkUser
from txnbuffer.client.streams.streams import ChangeStream, StreamLink, StreamSession
from txnbuffer.errors import InvalidRequest
from txnbuffer.rpc.frames import ServerFrame, Welcome

REASON = "no service answers at 127.0.0.1:9"


@pytest.fixture
def waits_are_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waits, "LONG_SECONDS", 0.1)
    caplog.set_level(logging.WARNING, logger="txnbuffer.waits")


async def until(number: int, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(120.0):
        while len(caplog.messages) < number:
            await asyncio.sleep(0.01)


async def test_an_error_that_ends_a_session_stays() -> None:
    answers = [ServiceUnavailable(REASON), InvalidRequest("open a new client")]

    async def connect() -> Link:
        raise answers.pop(0)

    session = ClientSession(connect, 0.2)
    session.begin()
    await eventually(lambda: not answers)
    for _ in range(2):  # also after `max_unavailable`
        await asyncio.sleep(0.4)
        with pytest.raises(InvalidRequest, match="open a new client"):
            session.check()
    await session.close()


async def refuse() -> Link:
    raise ServiceUnavailable(REASON)


async def refuse_streams() -> StreamLink:
    raise ServiceUnavailable(REASON)


@pytest.mark.usefixtures("waits_are_long")
@pytest.mark.parametrize("in_background", [False, True])
async def test_client_without_a_service(caplog: pytest.LogCaptureFixture, in_background: bool) -> None:
    session = ClientSession(refuse, 60.0)
    if in_background:
        session.begin()
        await until(1, caplog)
        await session.close()
    else:
        opening = asyncio.ensure_future(session.open())
        await until(1, caplog)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    assert caplog.messages[0].startswith("waiting for the service for ")
    assert caplog.messages[0].endswith(REASON)


@pytest.mark.usefixtures("waits_are_long")
async def test_stream_without_a_service(caplog: pytest.LogCaptureFixture) -> None:
    session = StreamSession(refuse_streams, 60.0)
    stream = ChangeStream(session, "t", "beginning", None, None)
    asking = asyncio.ensure_future(stream.next())
    await until(1, caplog)
    asking.cancel()
    await session.close()
    assert caplog.messages[0].startswith("waiting for the service of change streams for ")
    assert caplog.messages[0].endswith(REASON)


class BrokenLink:
    """A connection that is lost once it has welcomed the session."""

    def start(self, user: LinkUser) -> None:
        later = asyncio.get_running_loop().call_later
        later(0.3, user.receive, ServerFrame(welcome=Welcome("session", 0, 1, 1_000_000)))
        later(0.6, user.ended, None)  # longer than a wait that is logged

    def wake(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@pytest.mark.usefixtures("waits_are_long")
async def test_each_outage_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    attempts = itertools.count()

    async def connect() -> Link:
        if next(attempts) in (0, 8):
            return BrokenLink()
        raise ServiceUnavailable(REASON)

    session = ClientSession(connect, 60.0)
    await session.open()
    await until(2, caplog)
    assert next(attempts) > 8
    await session.close()
    assert len(caplog.messages) == 2
