"""The peer of the log: SQLite, the durable store in Python's standard library."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from broker_io.batch import Batch


def append_seconds(path: str, batches: Sequence[Batch]) -> float:
    """Seconds to insert batches of records, each in a durable transaction."""
    rows = [[(key, value) for key, value, _, _ in batch] for batch in batches]
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE log (position INTEGER PRIMARY KEY, key BLOB, value BLOB)")
        start = time.perf_counter()
        for batch in rows:
            with connection:
                connection.executemany("INSERT INTO log (key, value) VALUES (?, ?)", batch)
        return time.perf_counter() - start
    finally:
        connection.close()


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
