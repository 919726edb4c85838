"""Embedded logs restored from an older copy that grow past the end of the lost log."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from restored_logs import grow, relay
from service_process import ServiceProcess, kept_port
from streamed import Follower, write

from broker_io.memory import MemoryBroker
from txnbuffer import connect
from txnbuffer.errors import LogRestored, RelayBranched, UnknownTransaction
from txnbuffer.model import Outcome


def put_back(copy: Path, log: Path) -> None:
    shutil.rmtree(log)
    shutil.copytree(copy, log)


@pytest.mark.parametrize("running", [False, True], ids=["closed", "running"])
async def test_a_stream_is_rolled_back_to_where_a_copy_was_taken(tmp_path: Path, running: bool) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    await grow(log, range(4), "old")
    async with connect(f"file:{log}") as client:
        await write(client, "t", {"k1": "old-4"})
        if running:
            shutil.copytree(log, copy)
            await write(client, "t", {"k1": "lost-5"})
    if not running:
        shutil.copytree(log, copy)
    await grow(log, range(6, 10), "lost")
    async with connect(f"file:{log}") as client:
        follower = Follower(client.stream("t"))
        await follower.until(9)
    token = follower.stream.token
    put_back(copy, log)
    await grow(log, range(5, 20), "new")
    async with connect(f"file:{log}") as client:
        follower.stream = client.stream("t", from_=token)
        await follower.until(20)
        fresh = Follower(client.stream("t", to="now"))
        await fresh.to_end()
    assert follower.rollbacks == [5]
    assert follower.table == fresh.table


async def test_a_stream_continues_through_owners_whatever_they_write(tmp_path: Path) -> None:
    async with connect(f"file:{tmp_path}") as client:
        await write(client, "t", {"a": "0"})
        follower = Follower(client.stream("t"))
        await follower.until(1)
    token = follower.stream.token
    for number in range(1, 40):
        await grow(tmp_path, range(number, number + number % 2), "more")
    async with connect(f"file:{tmp_path}") as client:
        follower.stream = client.stream("t", from_=token)
        await follower.until(21)
        assert follower.stream.token is not None
        assert len(follower.stream.token.versions) <= 25
    assert follower.rollbacks == []
    assert follower.seqnos[-1] == 21


async def test_a_relay_of_an_older_copy_is_refused(tmp_path: Path) -> None:
    log, copy, far = tmp_path / "log", tmp_path / "copy", MemoryBroker()
    await grow(log, range(5), "old")
    shutil.copytree(log, copy)
    relay(log, far).run(follow=False)
    await grow(log, range(5, 9), "lost")
    assert relay(log, far).run(follow=False).seqno == 9
    put_back(copy, log)
    await grow(log, range(5, 20), "new")
    with pytest.raises(RelayBranched, match="branched after"):
        relay(log, far).run(follow=False)


async def test_the_outcome_of_a_transaction_that_is_gone_is_unknown(tmp_path: Path) -> None:
    log, copy, gone = tmp_path / "log", tmp_path / "copy", []
    await grow(log, range(5), "old")
    shutil.copytree(log, copy)
    for number in range(3):
        async with connect(f"file:{log}") as client:
            gone += [await write(client, "t", {"a": f"lost-{number}"}) for _ in range(5)]
    put_back(copy, log)
    kept = []
    for _ in range(3):
        async with connect(f"file:{log}") as client:
            kept += [await write(client, "t", {"a": "new"}) for _ in range(5)]
            for txn in gone:
                with pytest.raises(UnknownTransaction, match="older copy of the log was restored"):
                    await client.outcome(txn)
            for txn in kept:
                assert await client.outcome(txn) is Outcome.COMMIT
    async with connect(f"file:{log}") as client:
        await asyncio.sleep(2.5)  # the low-water mark passes them all
        for txn in gone:
            with pytest.raises(UnknownTransaction, match="older copy of the log was restored"):
                await client.outcome(txn)


async def test_a_client_is_refused(tmp_path: Path) -> None:
    log, copy, port = tmp_path / "log", tmp_path / "copy", kept_port()
    await grow(log, range(5), "old")
    shutil.copytree(log, copy)
    service = ServiceProcess(log, port=port).wait_serving()
    try:
        async with connect(f"txnbuf://127.0.0.1:{port}") as client:
            await write(client, "t", {"a": "lost"})
            service.kill()
            service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
            await write(client, "t", {"a": "through a restart"})
            service.kill()
            put_back(copy, log)
            for _ in range(3):
                await grow(log, range(5, 8), "new")
            service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
            with pytest.raises(LogRestored, match="it never had epoch"):
                await write(client, "t", {"a": "new"})
        async with connect(f"txnbuf://127.0.0.1:{port}") as client:
            await write(client, "t", {"a": "new"})
    finally:
        service.kill()
