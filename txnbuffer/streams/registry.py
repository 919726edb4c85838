"""The connections of a server by name: a second one of a name supersedes the first."""

from __future__ import annotations

from txnbuffer.streams.errors import ConnectionSuperseded
from txnbuffer.streams.server import StreamServer


class Connections:
    """Which connection has which name now."""

    __slots__ = ("_named",)

    def __init__(self) -> None:
        self._named: dict[str, StreamServer] = {}

    def named(self, server: StreamServer) -> StreamServer | None:
        """A connection has said hello. The one that it supersedes is told goodbye, and is given back."""
        if not server.name or server.closed:
            return None
        older = self._named.get(server.name)
        if older is server:
            return None
        self._named[server.name] = server
        if older is None or older.closed:
            return None
        older.hang_up(ConnectionSuperseded(f"another connection named {server.name!r} was opened; this one ends"))
        return older

    def closed(self, server: StreamServer) -> None:
        """A connection is gone."""
        if self._named.get(server.name) is server:
            del self._named[server.name]
