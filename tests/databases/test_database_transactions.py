"""One commit for a database and the records: both or neither, each record once, and whole."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from databases.conftest import rows_of
from databases.postgres_server import PostgresServer
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from txnbuffer import Database, MessageTooLarge, Outbox, SyncClient, connect
from txnbuffer.databases.tables import create_statements, drop_statements
from txnbuffer.errors import ForeignOutbox, InvalidRequest, OutboxMissing, OutboxStopped, UnsafeDatabase

SECONDS = 30.0


def values(client: SyncClient, topic: str = "orders") -> list[str]:
    with client.reader(topic, until="now") as reader:
        return [(record.value or b"(deleted)").decode() for record in reader.records()]


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def published(client: SyncClient, count: int) -> None:
    """Wait until rows are published."""
    eventually(lambda: client.outbox_status("shop").rows_published >= count)


def insert(connection: Any, number: int, what: str = "apples") -> None:
    connection.execute(sa.text("INSERT INTO orders VALUES (:id, :what)"), {"id": number, "what": what})


def test_the_database_and_the_records_commit_together(engine: sa.Engine) -> None:
    with connect("memory:", databases={"shop": engine}) as client:
        with client.transaction(database="shop", wait=True) as txn:
            insert(txn.connection, 1)
            txn.send("orders", "one", key="a", properties={"p": "q"}, event_time=5)
            txn.send_many("orders", ["two", "three"], keys=["b", None])
            txn.delete("orders", "a")
        with client.reader("orders", until="now") as reader:
            found = [(one.key, one.value, dict(one.properties), one.event_time) for one in reader.records()]
        assert [one[:2] for one in found] == [(b"a", b"one"), (b"b", b"two"), (None, b"three"), (b"a", None)]
        assert found[0][2:] == ({"p": "q"}, 5)
        with pytest.raises(ZeroDivisionError), client.transaction(database="shop", wait=True) as txn:
            insert(txn.connection, 2)
            txn.send("orders", "never")
            raise ZeroDivisionError
        with client.transaction(database="shop", wait=True) as txn:
            txn.send("orders", "last")
        assert values(client)[-1] == "last"
        assert "never" not in values(client)
        eventually(lambda: rows_of(engine, "SELECT count(*) FROM txnbuffer_outbox") == [(0,)])
    assert rows_of(engine, "SELECT id FROM orders") == [(1,)]


def test_the_application_commits_its_own_connection(engine: sa.Engine) -> None:
    with connect("memory:", databases={"shop": engine}) as client:
        with engine.begin() as connection, client.transaction(database="shop", connection=connection) as txn:
            insert(txn.connection, 1)
            txn.send("orders", "connection")
        with Session(engine) as session, session.begin():
            with client.transaction(database="shop", connection=session) as txn:
                txn.send("orders", "session")
            with session.begin_nested() as point:
                with client.transaction(database="shop", connection=session) as txn:
                    txn.send("orders", "never")
                point.rollback()
            with session.begin_nested(), client.transaction(database="shop", connection=session) as txn:
                txn.send("orders", "after the savepoint")
        with Session(engine) as session:
            with client.transaction(database="shop", connection=session) as txn:
                txn.send("orders", "never")
            session.rollback()
        with engine.begin() as connection:
            Outbox(engine, "shop").add(connection, "orders", "outbox")
        published(client, 4)
        assert values(client) == ["connection", "session", "after the savepoint", "outbox"]


def test_connections_of_psycopg_and_sqlite3_as_they_are(
    engine: sa.Engine, postgres: PostgresServer, tmp_path: Path
) -> None:
    def new() -> Any:
        if engine.dialect.name == "sqlite":
            return sqlite3.connect(str(engine.url.database), timeout=SECONDS)
        return psycopg.connect(postgres.dsn(str(engine.url.database)))

    with connect("memory:", databases={"shop": new}) as client:
        with client.transaction(database="shop", wait=True) as txn:
            txn.connection.execute("INSERT INTO orders VALUES (1, 'apples')")
            txn.send("orders", "own")
        raw = new()
        with client.transaction(database="shop", connection=raw) as txn:
            txn.send_many("orders", ["a", "b"])
        raw.rollback()
        with client.transaction(database="shop", connection=raw) as txn:
            txn.send_many("orders", ["c", "d"])
        raw.commit()
        raw.close()
        published(client, 3)
        assert values(client) == ["own", "c", "d"]


def test_many_writers_that_commit_in_another_order(postgres: PostgresServer) -> None:
    engine = sa.create_engine(postgres.database(), pool_size=10)
    with engine.begin() as connection:
        for statement in create_statements("postgresql"):
            connection.exec_driver_sql(statement)
    outbox = Outbox(engine, "shop")
    expected: list[str] = []

    def write(writer: int) -> None:
        for number in range(30):
            with engine.connect() as connection, connection.begin() as transaction:
                parts = [f"{writer}:{number}:{part}" for part in range(1 + number % 3)]
                for part in parts:
                    outbox.add(connection, "orders", part)
                    time.sleep(0.001 * (writer % 3))
                if number % 7 == 3:
                    transaction.rollback()
                else:
                    expected.extend(parts)

    with connect("memory:", databases={"shop": engine}) as client:
        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        published(client, len(expected))
        found = values(client)
    assert Counter(found) == Counter(expected)
    engine.dispose()


def test_a_lower_id_that_commits_late_is_published(postgres: PostgresServer) -> None:
    engine = sa.create_engine(postgres.database())
    with engine.begin() as connection:
        for statement in create_statements("postgresql"):
            connection.exec_driver_sql(statement)
    outbox = Outbox(engine, "shop")
    with connect("memory:", databases={"shop": engine}) as client, engine.connect() as late:
        late.begin()
        outbox.add(late, "orders", "late")
        with engine.begin() as early:
            outbox.add(early, "orders", "early")
        eventually(lambda: client.outbox_status("shop").held_back)
        assert client.outbox_status("shop").rows_published == 0
        late.commit()
        published(client, 2)
        assert values(client) == ["late", "early"]
    engine.dispose()


def test_asyncio(engine: sa.Engine) -> None:
    url = engine.url.set(drivername={"sqlite": "sqlite+aiosqlite"}.get(engine.dialect.name, engine.url.drivername))

    async def run() -> list[bytes]:
        own = create_async_engine(url)
        async with connect("memory:", databases={"shop": own}) as client:
            async with client.transaction(database="shop", wait=True) as txn:
                await txn.connection.execute(sa.text("INSERT INTO orders VALUES (1, 'apples')"))
                await txn.send("orders", "own")
            with pytest.raises(ZeroDivisionError):
                async with client.transaction(database="shop", wait=True) as txn:
                    await txn.send("orders", "never")
                    raise ZeroDivisionError
            async with (
                AsyncSession(own) as session,
                session.begin(),
                client.transaction(database="shop", connection=session) as txn,
            ):
                await txn.send_many("orders", ["session", "again"])
            while client.outbox_status("shop").rows_published < 3:
                await asyncio.sleep(0.01)
            async with await client.reader("orders", until="now") as reader:
                found = [record.value async for record in reader.records()]
        await own.dispose()
        return found

    assert asyncio.run(run()) == [b"own", b"session", b"again"]


def test_a_second_client_publishes_when_the_first_is_gone(engine: sa.Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine, "shop")
    for round_ in range(3):
        with engine.begin() as connection:
            outbox.add(connection, "orders", f"before {round_}")
        with connect(f"file:{tmp_path / 'log'}", databases={"shop": engine}) as client:
            with client.transaction(database="shop", wait=True) as txn:
                txn.send("orders", f"in {round_}")
            assert values(client)[-1] == f"in {round_}"
    with connect(f"file:{tmp_path / 'log'}", read_only=True) as client:
        assert values(client) == [f"{when} {round_}" for round_ in range(3) for when in ("before", "in")]


def test_a_log_and_a_table_that_do_not_belong_together(engine: sa.Engine) -> None:
    for address in ("memory:", "memory:"):
        with connect(address, databases={"shop": engine}) as client:
            if client.outbox_status("shop").published == 0:
                eventually(lambda: client.outbox_status("shop").state in ("publishing", "stopped"))
            if client.outbox_status("shop").state == "publishing":
                with client.transaction(database="shop", wait=True) as txn:
                    txn.send("orders", "one")
                eventually(lambda: rows_of(engine, "SELECT published FROM txnbuffer_outboxes") != [(0,)])
                continue
            with pytest.raises(OutboxStopped, match="the log has them up to 0 only") as caught:
                client.transaction(database="shop")
            assert isinstance(caught.value.__cause__, ForeignOutbox)


@pytest.mark.parametrize("name", ["other", "shop"])
def test_wrong_arguments(engine: sa.Engine, name: str) -> None:
    with connect("memory:", databases={"shop": Database(engine, max_bytes=100)}) as client:
        if name == "other":
            with pytest.raises(InvalidRequest, match="there is no database 'other': connect was given 'shop'"):
                client.transaction(database=name)
            return
        any_client: Any = client
        with pytest.raises(InvalidRequest, match="no name, number or timeout"):
            any_client.transaction(database=name, name="n", number=1)
        with pytest.raises(InvalidRequest, match="need database="):
            any_client.transaction(wait=True)
        with engine.connect() as connection, pytest.raises(InvalidRequest, match="wait=True needs a block"):
            client.transaction(database=name, connection=connection, wait=True)
        with pytest.raises(InvalidRequest, match="cannot be used as a connection"):
            client.transaction(database=name, connection=5).__enter__()
        with client.transaction(database=name) as txn, pytest.raises(MessageTooLarge, match="limit of 100 bytes"):
            txn.send("orders", "x" * 101)
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with (
            autocommit.connect() as connection,
            client.transaction(database=name, connection=connection) as txn,
            pytest.raises(InvalidRequest, match="autocommit"),
        ):
            txn.send("orders", "x")
        with pytest.raises(InvalidRequest, match="was used before"), txn:
            pass


def test_databases_that_are_refused(engine: sa.Engine, tmp_path: Path) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE txnbuffer_version SET version = 2")
        with pytest.raises(UnsafeDatabase, match=r"version \[2\], and this release knows 1"):
            Outbox(engine, "shop").add(connection, "orders", "x")
    with engine.begin() as connection:
        for statement in drop_statements(engine.dialect.name):
            connection.exec_driver_sql(statement)
        with pytest.raises(OutboxMissing, match="txnbuf outbox create"):
            Outbox(engine, "shop").add(connection, "orders", "x")
    with connect("memory:", databases={"shop": engine}) as client:
        eventually(lambda: client.outbox_status("shop").state == "stopped")
        with pytest.raises(OutboxStopped, match="txnbuf outbox create"):
            client.transaction(database="shop")


def test_sqlite_that_may_lose_a_commit_is_refused(tmp_path: Path) -> None:
    for path, pragma in ((":memory:", ""), (str(tmp_path / "shop.db"), "PRAGMA synchronous = NORMAL")):
        connection = sqlite3.connect(path)
        for statement in create_statements("sqlite"):
            connection.execute(statement)
        connection.commit()
        connection.execute(pragma)
        with pytest.raises(UnsafeDatabase, match=r"in memory|may be lost with synchronous"):
            Outbox(None, "shop").add(connection, "orders", "x")
        connection.close()
