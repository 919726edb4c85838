"""Token stores: where an application saves the resume tokens of its change streams

A store has the newest token of each topic, as text. A stream calls its store in other threads, one call at a time. If
your data is in a database, do not use a store, but save `batch.token` in the transaction that writes the data.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from broker_io.environment import current
from txnbuffer.errors import TokensFailed, UnreadableToken

LOCK_PAUSE = 0.005
"""Seconds between attempts to lock the file of a token store."""


class TokenStore(Protocol):
    """The interface of a store for the resume tokens of change streams."""

    def load(self, topic: str) -> str | None:
        """Return the token of a topic; None if there is none."""

    def save(self, topic: str, token: str) -> None:
        """Replace the token of a topic. The token must be durable when this returns."""


class MemoryTokens:
    """A token store in memory; the tokens are lost when the process ends."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}

    def load(self, topic: str) -> str | None:
        return self.tokens.get(topic)

    def save(self, topic: str, token: str) -> None:
        self.tokens[topic] = token


class FileTokens:
    """A token store in a JSON file: an object that maps topics to tokens. Each save replaces and syncs the file.

    Several processes may share the file if they use different topics; each save locks the file PATH.lock (flock).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        environment = current()
        self._disk, self._sleep = environment.disk, environment.clock.sleep

    def load(self, topic: str) -> str | None:
        """Return the token of a topic. Raises TokensFailed, and UnreadableToken if the file has other content."""
        with _named(self._path):
            return self._read().get(topic)

    def save(self, topic: str, token: str) -> None:
        """Replace the token of a topic. Raises the errors of `load`."""
        with _named(self._path), self._locked():
            tokens = self._read() | {topic: token}
            new = self._path + ".new"
            with closing(self._disk.open(new, write=True, create=True)) as file:
                file.truncate(0)
                file.write(0, [json.dumps(tokens).encode()])
                file.sync()
            self._disk.rename(new, self._path)
            self._disk.sync_directory(os.path.dirname(self._path) or ".")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file."""
        while (lock := self._disk.lock(self._path + ".lock")) is None:
            self._sleep(LOCK_PAUSE)
        with closing(lock):
            yield

    def _read(self) -> dict[str, str]:
        try:
            tokens = json.loads(self._disk.read(self._path))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            tokens = None
        if not isinstance(tokens, dict) or not all(isinstance(token, str) for token in tokens.values()):
            raise UnreadableToken(
                f"{self._path} is not a file of resume tokens: use another file, or remove this one to start over"
            )
        return tokens


class SQLiteTokens:
    """A token store in the table `stream_tokens (topic, token)` of an SQLite database, which is created if missing.

    Creating the store, `load` and `save` raise TokensFailed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with _named(path), closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS stream_tokens (topic TEXT PRIMARY KEY, token TEXT NOT NULL)")

    def load(self, topic: str) -> str | None:
        with _named(self._path), closing(sqlite3.connect(self._path)) as database:
            row = database.execute("SELECT token FROM stream_tokens WHERE topic = ?", (topic,)).fetchone()
        return None if row is None else str(row[0])

    def save(self, topic: str, token: str) -> None:
        with _named(self._path), closing(sqlite3.connect(self._path)) as database, database:
            database.execute("INSERT OR REPLACE INTO stream_tokens VALUES (?, ?)", (topic, token))


class CallbackTokens:
    """A token store made of two functions: `load(topic)` returns text or None, `save(topic, token)` returns nothing."""

    def __init__(self, load: Callable[[str], str | None], save: Callable[[str, str], None]) -> None:
        self.load = load
        self.save = save


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of the operating system and of SQLite to TokensFailed with the path."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TokensFailed(
            f"cannot read or write resume tokens in {os.fspath(path)} ({why}): fix this, or use another file"
        ) from error
