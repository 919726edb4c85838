"""Where a reader of change streams keeps its resume tokens: in memory, a file, SQLite, or functions of its own.

A store keeps the newest token of each topic, as text. Calls come from threads, one at a time for a stream.
Whoever keeps its data in a database stores `batch.token` there, with the data, and needs none of these.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from txnbuffer.errors import TokensFailed, UnreadableToken


class TokenStore(Protocol):
    def load(self, topic: str) -> str | None:
        """The token of a topic, None if there is none."""

    def save(self, topic: str, token: str) -> None:
        """Keep a token instead of the one before; it is kept when this returns."""


class MemoryTokens:
    """Tokens for as long as the process lives."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}

    def load(self, topic: str) -> str | None:
        return self.tokens.get(topic)

    def save(self, topic: str, token: str) -> None:
        self.tokens[topic] = token


class FileTokens:
    """A file with one JSON object: a member for each topic, its token as text. It is replaced whole, and synced.

    Processes may share it, for a topic each: who saves holds a lock (flock) of the file PATH.lock meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def load(self, topic: str) -> str | None:
        """Raises TokensFailed, and UnreadableToken if the file holds something else."""
        with _named(self._path):
            return self._read().get(topic)

    def save(self, topic: str, token: str) -> None:
        """Raises as `load`."""
        with _named(self._path), self._alone():
            tokens = self._read() | {topic: token}
            beside = self._path.with_name(self._path.name + ".new")
            with beside.open("w") as file:
                json.dump(tokens, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else saves meanwhile."""
        with self._path.with_name(self._path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, str]:
        try:
            tokens = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            tokens = None
        if not isinstance(tokens, dict) or not all(isinstance(token, str) for token in tokens.values()):
            raise UnreadableToken(f"{self._path} holds no resume tokens: name another file, or remove it to start over")
        return tokens


class SQLiteTokens:
    """Table `stream_tokens (topic, token)` of a database, made if missing. All of it raises TokensFailed."""

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
    """Functions of your own: `load(topic)` gives a text or None, `save(topic, token)` keeps one."""

    def __init__(self, load: Callable[[str], str | None], save: Callable[[str, str], None]) -> None:
        self.load = load
        self.save = save


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file of what the operating system or SQLite runs into."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TokensFailed(
            f"resume tokens can't be read or kept in {os.fspath(path)} ({why}): mend that, or name another file"
        ) from error
