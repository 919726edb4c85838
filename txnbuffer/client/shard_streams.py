"""Change streams where several services share the topics: each has a connection of its own, made when it is needed."""

from __future__ import annotations

from collections.abc import Sequence

from snapshots.shards import shard_of
from txnbuffer.client.stream_link import StreamDial
from txnbuffer.client.streaming import Streaming


class ShardStreams:
    """`dials` reach the service of each shard; `patience` as of Streaming."""

    def __init__(self, dials: Sequence[StreamDial], patience: float) -> None:
        self._dials = dials
        self._patience = patience
        self._open: dict[int, Streaming] = {}

    def of(self, topic: str) -> Streaming:
        """The streams of the service that has a topic."""
        number = shard_of(topic, len(self._dials))
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = Streaming(self._dials[number], self._patience)
        return found

    async def close(self) -> None:
        """End all streams."""
        for streaming in self._open.values():
            await streaming.close()
