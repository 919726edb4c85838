"""Reads the records of a topic in tests, whose number is known."""

from __future__ import annotations

from txnbuffer import SyncClient

WAIT_SECONDS = 120.0


def read_values(client: SyncClient, topic: str, count: int) -> list[bytes | None]:
    """The values that a new reader gets: it waits for as many as are expected, and a little for more."""
    found: list[bytes | None] = []
    with client.reader(topic) as reader:
        while (batch := reader.read(timeout=WAIT_SECONDS if len(found) < count else 0.2)) is not None:
            found += [record.value for record in batch]
    return found
