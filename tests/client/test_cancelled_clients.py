"""Cancelling a task that opens or closes a client leaves nothing open: the log can be opened again at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_world import LONG

from txnbuffer import connect
from txnbuffer.client import connection
from txnbuffer.client.session.session import ClientSession, Link
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.service.engine import engine


class Held:
    """A function that waits in the midst until it may go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(LONG)
        return self.function(*arguments, **options)


@pytest.mark.parametrize(("module", "name"), [(connection, "open_broker"), (engine, "take_over")])
async def test_log_is_closed_if_opening_is_cancelled(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file:{tmp_path}/log"
    with monkeypatch.context() as patch:
        held = Held(getattr(module, name))
        patch.setattr(module, name, held)
        task = asyncio.ensure_future(connect(address).open())
        assert await asyncio.to_thread(held.begun.wait, LONG)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
    async with connect(address) as client:
        await client.send("log", b"mine")


async def test_log_is_closed_if_closing_is_cancelled(tmp_path: Path) -> None:
    address = f"file:{tmp_path}/log"
    for number in range(3):
        client = await connect(address).open()
        await client.send("log", b"%d" % number)
        closing = asyncio.ensure_future(client.close())
        for _ in range(number + 1):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert asyncio.all_tasks() == {asyncio.current_task()}
    async with connect(address) as client, await client.reader("log") as reader:
        batch = await reader.read(timeout=LONG)
        assert [record.value for record in batch or ()] == [b"0", b"1", b"2"]


async def test_session_whose_open_was_cancelled_does_not_connect() -> None:
    dialled = asyncio.Event()

    async def dial() -> Link:
        dialled.set()
        raise ServiceUnavailable("it is being started")

    opening = asyncio.ensure_future(ClientSession(dial, LONG).open())
    await dialled.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert asyncio.all_tasks() == {asyncio.current_task()}
