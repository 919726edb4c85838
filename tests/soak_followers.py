"""Consumers of soak tests besides `soak_reader`, each a process that runs until SIGTERM.

python tests/soak_followers.py reader|stream|group ADDRESS FILE BROKER_OPTIONS

`reader` is an asyncio reader without retries: it writes visible records, `topic value` per line, and continues after
each retryable error, which it writes to FILE.failed. `stream` writes the mutations of the first topic, `key value` per
line, and `rollback` for a rollback. `group` copies the committed records of the first topic to another one, exactly
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

from soak_check import TOPICS

from broker_io import is_cluster
from txnbuffer import AsyncReader, Client, Record, Rollback, Transaction, connect
from txnbuffer.errors import Error, ServiceUnavailable

COPIES = "soak-copies"
MAX_WAIT = 240.0
SHORT_WAIT = 1.0


async def reader(client: Client, seen: TextIO) -> None:
    """Read until SIGTERM; what failed with a retryable error is repeated."""
    made: AsyncReader | None = None
    while made is None:
        with contextlib.suppress(ServiceUnavailable):
            made = await client.reader(TOPICS)
    async with made as opened:
        while True:
            try:
                batch = await opened.read(timeout=0.5)
            except Error as error:
                if not error.retryable:
                    raise
                with Path(f"{seen.name}.failed").open("a") as failed:
                    failed.write(f"{' '.join(str(error).split())}\n")
                continue
            for record in batch or ():
                seen.write(f"{record.topic} {(record.value or b'').decode()}\n")
            seen.flush()


async def stream(client: Client, seen: TextIO) -> None:
    async with client.stream(TOPICS[0]) as changes:
        async for item in changes:
            if isinstance(item, Rollback):
                await changes.rolled_back(0)
                seen.write("rollback\n")
                continue
            for mutation in item:
                seen.write(f"{(mutation.key or b'').decode()} {(mutation.value or b'').decode()}\n")
            seen.flush()


async def group(client: Client, seen: TextIO) -> None:
    async def copy(txn: Transaction, record: Record) -> None:
        await txn.send(COPIES, record.value or b"", key=record.key)

    await client.process(TOPICS[0], "soak-copiers", copy)


KINDS: dict[str, Callable[[Client, TextIO], Coroutine[Any, Any, None]]] = {
    "reader": reader,
    "stream": stream,
    "group": group,
}


async def connected(address: str, options: dict[str, Any]) -> Client:
    """Connect, with retries while the cluster is unavailable or the topics are missing."""
    while True:
        try:
            client = await connect(address, max_unavailable=MAX_WAIT, broker_options=options)
        except ServiceUnavailable:
            await asyncio.sleep(0.2)
            continue
        try:
            while not set(TOPICS) <= {*await asyncio.to_thread(client.open_broker().topics)}:
                await asyncio.sleep(0.1)
        except ServiceUnavailable:
            await client.close()
            continue
        return client


async def main(kind: str, address: str, file: str, options: str) -> None:
    short = kind == "reader" and is_cluster(address)
    broker_options = json.loads(options) | ({"max_unavailable": SHORT_WAIT} if short else {})
    client = await connected(address, broker_options)
    with Path(file).open("a") as seen:
        work = asyncio.create_task(KINDS[kind](client, seen))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
