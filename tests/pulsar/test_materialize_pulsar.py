"""A topic of a real cluster as a SQLite table, while service and materializer are killed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from pulsar_cluster import Cluster
from service_process import ServiceProcess
from streamed import write

from txnbuffer import Client, connect

MAX_WAIT = 200.0


def table(path: Path) -> tuple[int, dict[str, str]]:
    """Seqno and rows of a table; 0 and none while it is incomplete."""
    with contextlib.closing(sqlite3.connect(path, timeout=MAX_WAIT, isolation_level=None)) as database:
        database.execute("BEGIN")
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 't'").fetchone():
            return 0, {}
        (seqno,) = database.execute("SELECT seqno * complete FROM txnbuffer_topics").fetchone()
        return seqno, dict(database.execute("SELECT key, value FROM t").fetchall())


async def until(path: Path, seqno: int) -> dict[str, str]:
    deadline = time.monotonic() + MAX_WAIT
    while not path.exists() or (found := table(path))[0] < seqno:
        assert time.monotonic() < deadline, path.exists() and found
        await asyncio.sleep(0.05)
    assert found[0] == seqno
    return found[1]


async def write_all(client: Client, number: int, truth: dict[str, str]) -> None:
    """Write about 20 visible mutations, and one invisible one."""
    rows: dict[str, str | None] = {str((number * 7 + at) % 60): f"{number}" for at in range(20)}
    await write(client, "t", rows | {str(number): None})
    truth |= {key: value for key, value in rows.items() if value is not None}
    truth.pop(str(number), None)
    async with client.transaction() as txn:
        await txn.send("t", b"never", key="never")
        await txn.abort()


async def test_table_survives_kills_of_both_sides_on_a_real_broker(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    address, path = f"{cluster.url}/{namespace}", tmp_path / "t.db"
    command = [sys.executable, "-m", "txnbuffer", "materialize", address, "t", f"sqlite:{path}"]
    command += ["--set", f"pulsar.admin_url={cluster.admin}", "--max-unavailable", str(MAX_WAIT)]
    with contextlib.ExitStack() as stack:

        async def serve() -> ServiceProcess:
            process = ServiceProcess(address, "--admin-url", cluster.admin)
            stack.callback(process.__exit__)
            return await asyncio.to_thread(process.wait_serving)

        def materialize() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait, MAX_WAIT)
            stack.callback(process.kill)
            return process

        service = await serve()
        async with connect(address, max_unavailable=MAX_WAIT, broker_options={"admin_url": cluster.admin}) as client:
            truth: dict[str, str] = {}
            await write_all(client, 0, truth)
            materializer = materialize()
            assert await until(path, 20) == truth
            materializer.kill()
            await write_all(client, 1, truth)
            materializer = materialize()
            assert await until(path, 41) == truth
            service.kill()
            await serve()
            await write_all(client, 2, truth)
            assert await until(path, 62) == truth
        materializer.terminate()
        assert await asyncio.to_thread(materializer.wait, MAX_WAIT) == 0
