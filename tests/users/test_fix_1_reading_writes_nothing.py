"""Fix 1: `connect(…, read_only=True)` reads a log that nobody, or somebody else, owns, and writes nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker_io.errors import ForeignDirectory, InvalidAddress, Locked, ReadOnly, TopicNotFound
from txnbuffer import Client, SyncClient, connect
from txnbuffer.errors import InvalidRequest
from txnbuffer.testing import ServiceProcess


def contents(directory: Path) -> dict[str, tuple[str, int]]:
    """The digest and the modification time of each file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def values(client: SyncClient, topic: str) -> list[bytes | None]:
    with client.reader(topic) as reader:
        found: list[bytes | None] = []
        while (batch := reader.read()) is not None:
            found += [record.value for record in batch]
        return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log that nobody has open."""
    with connect(f"file:{tmp_path / 'log'}") as client:
        with client.transaction() as txn:
            txn.send("orders", b"1")
            txn.send("stock", b"2")
        with client.transaction() as aborted:
            aborted.send("orders", b"never")
            aborted.abort()
        client.send("orders", b"3")
    return tmp_path / "log"


def test_opening_and_reading_thirty_times_writes_nothing(directory: Path) -> None:
    before = contents(directory)
    for _ in range(30):
        with connect(f"file:{directory}", read_only=True) as client:
            assert client.topics() == ["orders", "stock"]
            assert values(client, "orders") == [b"1", b"3"]
            assert values(client, "stock") == [b"2"]
            assert client.last_visible("stock") is not None
    assert contents(directory) == before


async def test_an_asyncio_client_writes_nothing_either(directory: Path) -> None:
    before = contents(directory)

    async with connect(f"file:{directory}", read_only=True) as client:
        assert await client.topics() == ["orders", "stock"]
        async with await client.reader(["orders", "stock"]) as reader:
            first = await reader.read(timeout=60.0)
            assert first is not None
    assert contents(directory) == before


def test_a_directory_without_write_permission_is_enough(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with connect(f"file:{directory}", read_only=True) as client:
            assert values(client, "orders") == [b"1", b"3"]
    finally:
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o700)


def test_a_log_that_somebody_else_owns_is_read_and_followed(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as owner:
        owner.send("orders", b"1")
        with pytest.raises(Locked, match="read_only=True"):
            connect(address).open_sync()
        with connect(address, read_only=True) as client, client.reader("orders") as reader:
            batch = reader.read(timeout=30)
            assert batch is not None
            with owner.transaction() as txn:
                txn.send("orders", b"2")
                txn.send("later", b"3")
            batch = reader.read(timeout=30)
            assert batch is not None
            assert [record.value for record in batch] == [b"2"]
            assert client.topics() == ["later", "orders"]


def test_locked_says_so_in_another_process(directory: Path) -> None:
    code = f"from txnbuffer import connect\nwith connect('file:{directory}') as client: pass"
    with connect(f"file:{directory}"):
        failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "read_only=True" in failed.stderr


def test_a_killed_owner_leaves_a_log_that_can_be_read(tmp_path: Path) -> None:
    code = (
        "import os\nfrom txnbuffer import connect\n"
        f"client = connect('file:{tmp_path / 'log'}').open_sync()\n"
        "with client.transaction() as txn: txn.send('orders', b'1')\n"
        "open_one = client.transaction().begin(); open_one.send('orders', b'open'); client.send('orders', b'2')\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    before = contents(tmp_path / "log")
    with connect(f"file:{tmp_path / 'log'}", read_only=True) as client:
        assert values(client, "orders")[:1] == [b"1"]
        assert b"open" not in values(client, "orders")
    assert contents(tmp_path / "log") == before


CHANGES: dict[str, Callable[[Any], Any]] = {
    "transaction": lambda client: client.transaction(),
    "named transaction": lambda client: client.transaction(name="n", number=1).begin(),
    "run": lambda client: client.run(lambda txn: None),
    "send": lambda client: client.send("orders", b"4"),
    "send to a new topic": lambda client: client.send("new", b"4"),
    "send_many": lambda client: client.send_many("orders", [b"4"]),
    "delete": lambda client: client.delete("orders", b"k"),
    "outcome": lambda client: client.outcome("0:1"),
    "committed_number": lambda client: client.committed_number("n"),
    "delete_name": lambda client: client.delete_name("n"),
    "process": lambda client: client.process("orders", "g", lambda txn, record: None, idle_timeout=1),
    "forget_group": lambda client: client.forget_group("g"),
    "stream": lambda client: client.stream("orders"),
    "cursors": lambda client: client.cursors.add("orders", "c"),
    "delete_topic": lambda client: client.delete_topic("orders"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_everything_else_says_that_the_client_is_read_only(directory: Path, change: str) -> None:
    before = contents(directory)
    with connect(f"file:{directory}", read_only=True) as client:
        assert "read-only" in repr(client)
        with pytest.raises(ReadOnly, match="connect without read_only=True"):
            CHANGES[change](client)

    async with connect(f"file:{directory}", read_only=True) as client:

        async def call(work: Callable[[Client], Any]) -> None:
            result = work(client)
            if isinstance(result, Awaitable):
                await result

        with pytest.raises(ReadOnly, match="connect without read_only=True"):
            await call(CHANGES[change])
    assert contents(directory) == before


def test_a_service_is_read_without_a_session(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as client, client.transaction() as txn:
        txn.send("orders", b"1")
    with connect(txnbuf_service.address, read_only=True) as client:
        assert client.topics() == ["orders"]
        assert values(client, "orders") == [b"1"]
        with pytest.raises(ReadOnly):
            client.send("orders", b"2")


def test_a_log_in_memory_can_be_read_by_name() -> None:
    with connect("memory:read-only-test") as owner:
        owner.send("orders", b"1")
        with connect("memory:read-only-test", read_only=True) as client:
            assert values(client, "orders") == [b"1"]


def test_wrong_uses(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(ForeignDirectory, match="contains no log"), connect(f"file:{tmp_path / 'no'}", read_only=True):
        pass
    assert not (tmp_path / "no").exists()
    with pytest.raises(InvalidRequest, match="read_only must be True or False"):
        connect("memory:", read_only="yes")  # type: ignore[arg-type]  # on purpose
    with (
        pytest.raises(InvalidRequest, match="omit service="),
        connect("pulsar://h:1/a/b", read_only=True, service="h:2"),
    ):
        pass
    with (
        pytest.raises(InvalidRequest, match="is not a cluster"),
        connect(f"file:{directory}", read_only=True, schemas={"orders": _Schema()}),
    ):
        pass
    with pytest.raises(InvalidAddress), connect("nothing", read_only=True):
        pass
    with connect(f"file:{directory}", read_only=True) as client:
        with pytest.raises(TopicNotFound):
            client.reader("nothing")
        client.close()
        with pytest.raises(InvalidRequest, match="closed"):
            client.reader("orders")


class _Schema:
    def encode(self, obj: Any, /) -> bytes:
        return b""

    def decode(self, data: bytes, /) -> Any:
        return data
