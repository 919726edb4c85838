r"""Cache: a dictionary in memory that equals a topic, kept up to date by a change stream.

The stream begins with the newest record of each key, then delivers each change in order. It reconnects by itself, and
says what to undo if the history of the topic branched, for example after a restore.

    printf '%s\n' apples=120 pears=80 | txnbuf produce file:data prices --key-separator =
    python examples/cache.py prices                 # until Ctrl-C

Only one process can open `file:data`, so nothing else changes the prices while this program runs. To change them
meanwhile, let a service own the directory, and give both programs its address:

    txnbuf serve file:data --listen 127.0.0.1:7711
    TXNBUFFER_ADDRESS=txnbuf://127.0.0.1:7711 python examples/cache.py prices
    echo apples=130 | txnbuf produce txnbuf://127.0.0.1:7711 prices --key-separator =

A cache that has to survive restarts keeps its tokens: see `store=` of `client.stream`, and `txnbuf materialize`, which
keeps a topic as a table of SQLite.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from txnbuffer import Client, Rollback, TopicNotFound, connect

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "file:data")


class Cache:
    """The newest value of each key of a topic; empty while there is no such topic.

    `ready` is set once the cache has everything that was committed.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.ready = asyncio.Event()
        self.values: dict[bytes, bytes] = {}

    async def follow(self, client: Client) -> None:
        """Apply the changes of the topic until the client is closed. The cache is not ready after an error."""
        try:
            while True:
                try:
                    return await self._apply(client)
                except TopicNotFound:  # nobody has written to it yet
                    self.ready.set()
                    await asyncio.sleep(0.5)
        finally:
            self.ready.clear()

    async def _apply(self, client: Client) -> None:
        self.values.clear()  # of an earlier call, since which keys may have been deleted
        async with client.stream(self.topic) as stream:
            async for change in stream:
                if isinstance(change, Rollback):  # this cache remembers no older values, so it starts over
                    self.ready.clear()
                    self.values.clear()
                    await stream.rolled_back(0)
                    continue
                for mutation in change:
                    if mutation.key is None:
                        continue
                    if mutation.value is None:
                        self.values.pop(mutation.key, None)
                    else:
                        self.values[mutation.key] = mutation.value
                if change.caught_up:
                    self.ready.set()

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        value = self.values.get(key.encode())
        return None if value is None else value.decode()


async def main(topic: str) -> None:
    async with connect(ADDRESS) as client:
        cache = Cache(topic)
        following = asyncio.create_task(cache.follow(client))
        shown: dict[bytes, bytes] | None = None
        while not following.done():
            if cache.ready.is_set() and cache.values != shown:
                shown = dict(cache.values)
                print({key.decode(): value.decode() for key, value in sorted(shown.items())}, flush=True)
            await asyncio.sleep(0.1)
        await following


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "prices"))
