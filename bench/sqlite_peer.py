"""The peer of the log: SQLite, the durable store in Python's standard library."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from broker_io.batch import Batch


@contextmanager
def durable(path: str) -> Iterator[sqlite3.Connection]:
    """A new database whose commits are durable."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE log (position INTEGER PRIMARY KEY, key BLOB, value BLOB)")
        yield connection
    finally:
        connection.close()


@contextmanager
def committing(path: str, key: bytes, value: bytes) -> Iterator[Callable[[float, int], float]]:
    """A function that inserts one row in each transaction, for some seconds and at least so many; rows per second."""

    def commit(seconds: float, least: int) -> float:
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds or done < least:
            with connection:
                connection.execute("INSERT INTO log (key, value) VALUES (?, ?)", (key, value))
            done += 1
        return done / elapsed

    with durable(path) as connection:
        yield commit


def append_seconds(path: str, batches: Sequence[Batch]) -> float:
    """Seconds to insert batches of records, each in a durable transaction."""
    rows = [[(key, value) for key, value, _, _ in batch] for batch in batches]
    with durable(path) as connection:
        start = time.perf_counter()
        for batch in rows:
            with connection:
                connection.executemany("INSERT INTO log (key, value) VALUES (?, ?)", batch)
        return time.perf_counter() - start


def read_seconds(path: str, size: int) -> float:
    """Seconds to read all records in log order, `size` at a time."""
    start = time.perf_counter()
    connection = sqlite3.connect(path)
    try:
        cursor = connection.execute("SELECT position, key, value FROM log ORDER BY position")
        while cursor.fetchmany(size):
            pass
        return time.perf_counter() - start
    finally:
        connection.close()
