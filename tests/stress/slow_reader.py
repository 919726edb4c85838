"""Slow change streams in one process, for `slow_streams`.

    python tests/stress/slow_reader.py ADDRESS STREAMS PAUSE TOPIC…

Opens so many streams, each on the next topic and with a small buffer, and pauses so many seconds after each batch
until a line of input comes. Each stream keeps the state of its topic and ends when it has the key `end` in a complete
batch. Prints one JSON object per stream: topic, number of keys, digest of the state, mutations, and interruptions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

from txnbuffer import Client, Rollback, connect
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.streams.client import ClientConfig

END = b"end"
BUFFER_BYTES = 64 * 1024
"""Bytes that the service may send ahead of a reader; the default would hide that it is slow."""


def digest(state: dict[bytes, bytes]) -> str:
    """The digest of a topic's state: of keys and the digests of values."""
    text = hashlib.sha256()
    for key in sorted(state):
        text.update(key + b" " + state[key])
    return text.hexdigest()


def small(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


async def follow(client: Client, topic: str, pause: float, hurry: asyncio.Event) -> None:
    state: dict[bytes, bytes] = {}
    ended = False
    async with client.stream(topic) as stream:
        async for batch in stream:
            if isinstance(batch, Rollback):
                raise AssertionError(f"{topic} rolled back")
            for mutation in batch:
                state[mutation.key or b""] = small(mutation.value or b"")
                ended = ended or mutation.key == END
            if ended and batch.complete:
                break
            if not hurry.is_set():
                try:
                    async with asyncio.timeout(pause):
                        await hurry.wait()
                except TimeoutError:
                    pass
        found = stream.statistics()
    figures = {"topic": topic, "keys": len(state), "digest": digest(state)}
    print(json.dumps({**figures, "mutations": found.mutations, "interruptions": found.interruptions}), flush=True)


async def main(address: str, streams: int, pause: float, topics: list[str]) -> None:
    hurry = asyncio.Event()
    async with connect(address, max_unavailable=240.0) as client:
        client.streams = ShardStreams(client.streams.connectors, 240.0, ClientConfig(window_bytes=BUFFER_BYTES))
        following = [follow(client, topics[number % len(topics)], pause, hurry) for number in range(streams)]
        tasks = [asyncio.ensure_future(one) for one in following]
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        hurry.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    _, address, streams, pause, *topics = sys.argv
    asyncio.run(main(address, int(streams), float(pause), topics))
