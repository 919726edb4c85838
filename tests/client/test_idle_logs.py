"""Clients of an embedded log that only read: its files stay as they are, and its engine starts at the first request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reading import read_values
from source_tree import ROOT

from broker_io import open_broker
from broker_io.errors import DiskFailed
from broker_io.filelog.log.commit import fail_units
from broker_io.filelog.log.log import FileLog
from txnbuffer import Client, SyncClient, connect
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import DecisionsLost


def written(directory: Path) -> str:
    with connect(f"file:{directory}") as client:
        for number in range(5):
            with client.transaction(name="writer", number=number + 1) as txn:
                txn.send("orders", f"order-{number}")
                txn.send("invoices", f"invoice-{number}")
        with client.transaction() as txn:
            txn.send("orders", "dropped")
            txn.abort()
        client.send("beside", "ordinary")
    return f"file:{directory}"


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def values(client: SyncClient, topic: str) -> list[Any]:
    with client.reader(topic) as reader:
        return [record.value for record in reader.records(timeout=0.01)]


def test_openings_that_only_read_leave_the_files_as_they_are(tmp_path: Path) -> None:
    address = written(tmp_path / "log")
    before = files(tmp_path / "log")
    for _ in range(10):
        with connect(address) as client:
            assert values(client, "orders") == [b"order-%d" % number for number in range(5)]
            assert values(client, "beside") == [b"ordinary"]
            assert client.topics() == ["beside", "invoices", "orders"]
            assert client.last_visible("invoices") is not None
    assert files(tmp_path / "log") == before


def commits(client: SyncClient) -> None:
    with client.transaction() as txn:
        txn.send("orders", "later")


def sends(client: SyncClient) -> None:
    client.send("orders", "later")


def processes(client: SyncClient) -> None:
    client.process("invoices", "group", lambda txn, record: txn.send("orders", "later"), batch=5, idle_timeout=0.01)


@pytest.mark.parametrize("write", [commits, sends, processes], ids=lambda write: write.__name__)
def test_first_request_of_a_client_that_has_read_is_as_any_other(
    write: Callable[[SyncClient], None], tmp_path: Path
) -> None:
    address = written(tmp_path / "log")
    with connect(address) as client:
        assert len(values(client, "orders")) == 5
        write(client)
        assert values(client, "orders")[5:] == [b"later"] * (5 if write is processes else 1)
        assert client.committed_number("writer") == 5
    with connect(address, read_only=True) as client:
        assert len(values(client, "orders")) > 5


def test_streams_and_deletions_of_a_client_that_has_read_work(tmp_path: Path) -> None:
    address = written(tmp_path / "log")
    with connect(address) as client:
        assert len(values(client, "orders")) == 5
        with client.stream("orders", to="now") as stream:
            assert sum(len(batch) for batch in stream) == 5
    with connect(address) as client:
        client.delete_topic("invoices")
    before = files(tmp_path / "log")
    with connect(address) as client:
        assert client.topics() == ["beside", "orders"]
    assert files(tmp_path / "log") == before


async def test_requests_at_once_share_the_first_start(tmp_path: Path) -> None:
    address = written(tmp_path / "log")

    async def commit(client: Client) -> None:
        async with client.transaction() as txn:
            await txn.send("orders", "later")

    async with connect(address) as client:
        cancelled = asyncio.ensure_future(commit(client))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*(commit(client) for _ in range(20)))
    with connect(address) as client:
        assert values(client, "orders")[5:] == [b"later"] * 20


def test_first_request_raises_what_prevents_its_start_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = written(tmp_path / "log")
    with connect(address) as client:
        with monkeypatch.context() as patched:
            patched.setattr(FileLog, "commit", failing)
            with pytest.raises(DiskFailed, match="no space"):
                client.send("orders", "refused")
        assert len(values(client, "orders")) == 5
        client.send("orders", "later")
        assert values(client, "orders")[5:] == [b"later"]


def failing(log: FileLog, taken: list[Any]) -> None:
    fail_units(taken, DiskFailed("no space"))


KILLED = """
import os, sys
from txnbuffer import connect

with connect(sys.argv[1]) as client, client.transaction() as txn:
    txn.send("orders", "open")
    client.send("orders", "after")
    os._exit(9)
"""


def test_opening_aborts_what_a_killed_program_left_open_and_the_next_ones_write_nothing(tmp_path: Path) -> None:
    address = written(tmp_path / "log")
    subprocess.run([sys.executable, "-c", KILLED, address], cwd=ROOT, check=False, timeout=120)
    with connect(address) as client:
        assert read_values(client, "orders", 6)[5:] == [b"after"]
    before = files(tmp_path / "log")
    with connect(address) as client:
        assert read_values(client, "orders", 6)[5:] == [b"after"]
    assert files(tmp_path / "log") == before


def test_opening_says_at_once_that_decisions_are_lost(tmp_path: Path) -> None:
    address = written(tmp_path / "log")
    with open_broker(address) as broker:
        broker.delete_topic(DECISIONS)
        broker.create_topic(DECISIONS)
    with pytest.raises(DecisionsLost), connect(address):
        raise AssertionError("not reached")
