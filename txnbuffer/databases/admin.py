"""What operators do with an outbox: look at it, and let it continue after it was refused"""

from __future__ import annotations

from dataclasses import dataclass

from txnbuffer.client.database_transaction import HoldBack
from txnbuffer.databases.connections import SqlConnection
from txnbuffer.databases.dialects import KNOWN
from txnbuffer.databases.publisher import (
    REGISTRY,
    LogClient,
    producer_of,
    registered_identity,
    registration,
    table_state,
)
from txnbuffer.databases.tables import OUTBOX, OUTBOXES, create_statements
from txnbuffer.databases.worker import Worker


@dataclass(frozen=True)
class OutboxRows:
    """An outbox in its database.

    `waiting`: rows that are not deleted; housekeeping may be behind. `seconds`: since the oldest of them was inserted.
    `published`: the number that housekeeping knows as published.
    """

    outbox: str
    waiting: int
    seconds: float | None
    published: int
    held_back: HoldBack | None


def create_tables(connection: SqlConnection) -> None:
    """Create the tables that are not there."""
    for statement in create_statements(connection.dialect):
        connection.execute(statement)


def outboxes(connection: SqlConnection) -> list[OutboxRows]:
    """All outboxes of a database that have rows, or had a publisher. Raises OutboxMissing, UnsafeDatabase."""
    dialect = KNOWN[connection.dialect]
    dialect.check(connection)
    counted = connection.execute(f"SELECT outbox, count(*), min(created) FROM {OUTBOX} GROUP BY outbox")  # noqa: S608
    waiting = {name: (count, oldest) for name, count, oldest in counted}
    published = dict(connection.execute(f"SELECT outbox, published FROM {OUTBOXES}"))  # noqa: S608
    now = dialect.now(connection)
    held_back = dialect.held_back(connection)
    found = []
    for name in sorted({*waiting, *published}):
        count, oldest = waiting.get(name, (0, None))
        seconds = None if oldest is None else max(now - oldest, 0) / 1000
        found.append(OutboxRows(name, count, seconds, published.get(name, 0), held_back if count else None))
    return found


@dataclass(frozen=True)
class Adoption:
    """What it takes to publish a table to a log that refused it.

    `number`: the number that the log has. `skipped`: rows of the table up to that number, which count as published.
    """

    outbox: str
    number: int
    skipped: int
    identity: str
    registered: str | None


async def examine(log: LogClient, worker: Worker, name: str) -> Adoption:
    """What `adopt` would do. This fences the publisher of the outbox."""
    number = await log.committed_number(producer_of(name))
    registered = await registered_identity(log, name)

    def look(connection: SqlConnection) -> Adoption:
        dialect = KNOWN[connection.dialect]
        dialect.check(connection)
        state = table_state(dialect, connection, name)
        statement = f"SELECT count(*) FROM {OUTBOX} WHERE outbox = ? AND id <= ?"  # noqa: S608 - a constant
        [(skipped,)] = connection.execute(statement, name, number)
        return Adoption(name, number, skipped, state.identity, registered)

    return await worker.run(look)


async def adopt(log: LogClient, worker: Worker, wanted: Adoption, *, republish: bool) -> None:
    """Let the table be published under its name from now on.

    New rows get ids above the number of the log. Rows up to it count as published, or with `republish` get new ids, so
    that they are published, some of them again.
    """

    def prepare(connection: SqlConnection) -> None:
        dialect = KNOWN[connection.dialect]
        dialect.raise_id(connection, wanted.number)
        if republish:
            dialect.renumber(connection, wanted.outbox, wanted.number)
        statement = f"UPDATE {OUTBOXES} SET home = ?, published = ? WHERE outbox = ?"  # noqa: S608 - a constant
        connection.execute(statement, dialect.home(connection), wanted.number, wanted.outbox)

    await worker.run(prepare)
    if wanted.registered != wanted.identity:
        await log.send(REGISTRY, registration(wanted.identity), key=producer_of(wanted.outbox))
