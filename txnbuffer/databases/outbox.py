"""The outbox of a database: records that a transaction of the database publishes when it commits"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from broker_io.errors import MessageTooLarge
from txnbuffer.checks import check_name
from txnbuffer.client.path.send_columns import EventTime, Key, Properties, SendColumns, deletion, many_rows, one_row
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.topic_names import check_target
from txnbuffer.databases.connections import SqlConnection, adapted
from txnbuffer.databases.dialects import KNOWN, Dialect, NewRows, new_group
from txnbuffer.databases.groups import UNKNOWN
from txnbuffer.databases.notices import Notifier, notify
from txnbuffer.databases.worker import is_async_engine
from txnbuffer.errors import InvalidRequest

Lock: TypeAlias = Literal["key"]

MAX_BYTES = 256 * 1024
"""Largest record, unless an outbox is given another limit."""
Waker: TypeAlias = Callable[[], None]


class Outbox:
    """Records that the transactions of a database publish, each once, when they commit.

        outbox = Outbox(engine, "shop")
        with engine.begin() as connection:
            connection.execute(insert(orders).values(id=7, what="3 apples"))
            outbox.add(connection, "orders", b"3 apples", key="7")

    A publisher publishes them: that of a client with `databases={"shop": engine}`, or `txnbuf outbox run`. It needs no
    connection to the log. Threads may share it.
    """

    def __init__(
        self,
        database: Any,
        name: str,
        *,
        lock: Lock | None = None,
        max_bytes: int = MAX_BYTES,
        serializer: Serializer | None = None,
    ) -> None:
        """`database`: as for `connect(databases=…)`. `name`: of the outbox; a database can have several. `lock="key"`:
        transactions with the same topic and key run one after another, so that their records are in the order of the
        commits. `max_bytes`: largest record; store larger values elsewhere. `serializer`: converts values to bytes.

        Raises InvalidRequest.
        """
        self.name = check_name(name, "an outbox")
        self._database = database
        if lock not in (None, "key"):
            raise InvalidRequest(f"lock must be 'key' or None, got {lock!r}")
        if type(max_bytes) is not int or max_bytes < 1:
            raise InvalidRequest(f"max_bytes must be a number of bytes, got {max_bytes!r}")
        self._lock = lock
        self._max_bytes = max_bytes
        self._serializer = serializer
        self._checked: set[str] = set()
        self._groups: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self.wakers: list[Waker] = []
        """Called after each commit, where the connection tells of it; without any, another process is notified."""
        self._notifier: Notifier | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def add(
        self,
        connection: object,
        topic: str,
        value: Any,
        *,
        key: Key = None,
        ordering_key: str | None = None,
        event_time: EventTime = None,
        properties: Properties = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Add a record to the transaction of a connection; it is published after the commit, or never.

        - `connection`: a connection or session of SQLAlchemy, or a connection of psycopg or sqlite3; with asyncio:
          `await session.run_sync(lambda session: outbox.add(session, …))`.
        - The other arguments are those of `Transaction.send`.

        Raises InvalidMessage, MessageTooLarge, InvalidTopicName, InvalidRequest if the connection commits each
        statement by itself, OutboxMissing, UnsafeDatabase, and the errors of the database.
        """
        rows = one_row(value, key, ordering_key, event_time, properties, serializer or self._serializer)
        self._add(connection, topic, rows, partition)

    def add_many(
        self,
        connection: object,
        topic: str,
        values: Sequence[Any],
        *,
        keys: Sequence[Key] | None = None,
        event_times: Sequence[EventTime] | None = None,
        properties: Sequence[Properties] | None = None,
        serializer: Serializer | None = None,
        partition: int | None = None,
    ) -> None:
        """Add records, given as columns with one item for each record. Other arguments and errors as in `add`."""
        rows = many_rows(values, keys, event_times, properties, serializer or self._serializer)
        self._add(connection, topic, rows, partition)

    def delete(self, connection: object, topic: str, key: Key, *, properties: Properties = None) -> None:
        """Add a record that deletes a key. Errors as in `add`."""
        self._add(connection, topic, deletion(key, properties), None)

    def _add(self, connection: object, topic: str, rows: SendColumns, partition: int | None) -> None:
        self.add_rows(adapted(connection), check_target(topic), rows, partition)

    def add_rows(self, connection: SqlConnection, topic: str, rows: SendColumns, partition: int | None) -> int:
        """Internal: add records whose topic and columns have been checked; return their group for `Dialect.group`."""
        new = _new_rows(topic, rows, partition, self._max_bytes)
        dialect = KNOWN[connection.dialect]
        connection.check_transaction()
        group = self._group(connection, dialect)
        if self._lock:
            dialect.lock_keys(connection, {_hash(topic, key) for key in new.keys if key is not None})
        dialect.insert(connection, self.name, group, new)
        if connection.identity is None and dialect.name == "postgresql":  # nothing will tell of the commit
            notify(connection, self.name)
        return group

    def _group(self, connection: SqlConnection, dialect: Dialect) -> int:
        """The group of the connection's transaction, 0 if nothing tells when that ends; check the database before."""
        identity = connection.identity
        if identity is not None and (known := self._groups.get(identity)) is not None:
            return known
        if dialect.name not in self._checked or dialect.checks_each:
            dialect.check(connection)
            self._checked.add(dialect.name)
        if identity is None:
            return UNKNOWN
        self._groups[identity] = group = new_group()
        connection.on_commit(partial(self._committed, weakref.ref(identity)))
        return group

    def _committed(self, connection: weakref.ref[object]) -> None:
        if (identity := connection()) is not None:
            self._groups.pop(identity, None)
        for wake in self.wakers:
            wake()
        if not self.wakers:
            self.notify()

    def notify(self) -> None:
        """Internal: tell a publisher in another process to look at the table now."""
        if self._notifier is None and not is_async_engine(self._database):
            self._notifier = Notifier(self._database, self.name)
        if self._notifier is not None:
            self._notifier.notify()


def _new_rows(topic: str, rows: SendColumns, partition: int | None, limit: int) -> NewRows:
    """The columns as the table has them. Raises MessageTooLarge."""
    count = len(rows.values)
    properties = [json.dumps(row) if row else None for row in rows.properties or [None] * count]
    times: list[int | None] = [None] * count if rows.times is None else [time or None for time in rows.times]
    if rows.size > limit:
        for key, value, text in zip(rows.keys, rows.values, properties, strict=True):
            size = len(key or b"") + len(value or b"") + len(text or "")
            if size > limit:
                raise MessageTooLarge(
                    f"a record of {size} bytes exceeds the limit of {limit} bytes of the outbox: store the value "
                    "elsewhere, or give the outbox a higher max_bytes"
                )
    return NewRows(topic, partition, rows.keys, rows.values, properties, times)


def _hash(topic: str, key: bytes) -> int:
    return zlib.crc32(key, zlib.crc32(topic.encode()))
