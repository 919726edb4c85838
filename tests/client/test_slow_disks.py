"""The event loop of an application goes on while an embedded log waits for its disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from service_setup import eventually

from broker_io.system import SystemFile
from txnbuffer import connect

WAIT = 120.0


async def test_the_loop_goes_on_while_a_commit_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on, sync = threading.Event(), threading.Event(), SystemFile.sync
    goes_on.set()

    def slow(file: SystemFile) -> None:
        if not goes_on.is_set():
            waits.set()
            assert goes_on.wait(WAIT)
        sync(file)

    monkeypatch.setattr(SystemFile, "sync", slow)
    async with connect(f"file:{tmp_path / 'log'}") as client:
        await client.send("t", b"first")
        txn = await client.transaction().begin()
        await txn.send("t", b"second")
        goes_on.clear()
        commit = asyncio.create_task(txn.commit())
        await eventually(waits.is_set)
        for _ in range(100):  # each of which is an iteration of the loop
            await asyncio.sleep(0)
        async with client.transaction() as other:  # begins and sends without the disk
            await other.send("t", b"third")
            assert not commit.done()
            goes_on.set()
            await commit
