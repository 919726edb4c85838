"""Reads the records of a topic in tests, whose number is known."""

from __future__ import annotations

from typing import Any

from txnbuffer import Record, SyncClient

WAIT_SECONDS = 120.0


def read_records(client: SyncClient, topic: str, count: int, **options: Any) -> list[Record]:
    """What a new reader gets: it waits for as many records as are expected, and a little for more."""
    found: list[Record] = []
    with client.reader(topic, **options) as reader:
        while (batch := reader.read(timeout=WAIT_SECONDS if len(found) < count else 0.2)) is not None:
            found += batch
    return found


def read_values(client: SyncClient, topic: str, count: int, **options: Any) -> list[Any]:
    return [record.value for record in read_records(client, topic, count, **options)]
