"""A change stream with a durable cursor, for `retention_kills`; its rows and its token are in one SQLite file.

    python tests/stress/cursor_reader.py ADDRESS OPTIONS TOPIC DATABASE CURSOR PAUSE

Writes each batch with its token in one transaction, pauses so many seconds, and ends with code 0 once it has the key
`end`. CURSOR "" means none. An error of the stream ends it with code 3 and is printed as `class: text`.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from typing import Any

from txnbuffer import Client, Rollback, connect
from txnbuffer.errors import Error

END = b"end"


def opened(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE IF NOT EXISTS found (seqno INTEGER PRIMARY KEY, key BLOB, value BLOB)")
    database.execute("CREATE TABLE IF NOT EXISTS token (only INTEGER PRIMARY KEY, text TEXT)")
    return database


async def follow(client: Client, topic: str, database: sqlite3.Connection, cursor: str, pause: float) -> None:
    row = database.execute("SELECT text FROM token").fetchone()
    start = "beginning" if row is None else row[0]
    async with client.stream(topic, from_=start, cursor=cursor or None) as stream:
        async for batch in stream:
            if isinstance(batch, Rollback):
                raise AssertionError(f"{topic} rolled back to {batch.seqno}")
            with database:
                database.executemany("INSERT INTO found VALUES (?, ?, ?)", [(m.seqno, m.key, m.value) for m in batch])
                database.execute("INSERT OR REPLACE INTO token VALUES (1, ?)", (str(batch.token),))
            if any(mutation.key == END for mutation in batch):
                await stream.done()
                return
            await asyncio.sleep(pause)


async def main(address: str, options: dict[str, Any], topic: str, path: str, cursor: str, pause: float) -> int:
    try:
        async with connect(address, max_unavailable=240.0, broker_options=options) as client:
            await follow(client, topic, opened(path), cursor, pause)
    except Error as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    _, address, options, topic, path, cursor, pause = sys.argv
    sys.exit(asyncio.run(main(address, json.loads(options), topic, path, cursor, float(pause))))
