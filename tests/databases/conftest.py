"""Databases for tests: a file of SQLite, and a database of a real PostgreSQL server, one for each process of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases.postgres_server import PostgresServer, postgres_server

from txnbuffer.databases.tables import create_statements


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of PostgreSQL."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    """An engine of a database with the tables of txnbuffer and a table `orders`."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in create_statements(engine.dialect.name):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("CREATE TABLE orders (id integer PRIMARY KEY, what text)")
    yield engine
    engine.dispose()


def rows_of(engine: sa.Engine, statement: str) -> list[Any]:
    """The rows that a statement returns."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(statement))]
