"""Backfills that read a log in few messages at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.position import Position, Positions
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.manager import MemoryBudget, ReadLog
from txnbuffer.service.streams.stream_topic import Feed, SeqnoAnchor
from txnbuffer.service.streams.streams import LEAST_MESSAGE_BYTES, Backfills


class EntryReader:
    """Reads an entry of several messages from its beginning on, as brokers do that know positions of entries only."""

    def __init__(self, entry: PlacedBatch) -> None:
        self._left = entry

    def read(self, *, limit: int, timeout: float) -> PlacedBatch | None:
        taken, self._left = self._left.take(slice(limit)), self._left.take(slice(limit, None))
        return taken if len(taken) else None

    def close(self) -> None:
        pass


async def test_a_read_that_begins_in_the_middle_of_an_entry_skips_what_comes_before_in_any_sizes() -> None:
    messages = Batch.of([Message(b"k%d" % number, b"v", {}) for number in range(6)])
    positions = Positions.of([Position(3, 0, number) for number in range(6)])
    entry = PlacedBatch(positions, np.zeros(6, np.int64), messages)
    buffer = TransactionBuffer()
    buffer.apply_batch(entry)
    followed: Any = SimpleNamespace(buffer=buffer, numbered=Sequencer(), index=None)
    feed = Feed("orders", followed, lambda: None, 0.0)
    manager: Any = SimpleNamespace(backfill_memory=MemoryBudget(1_000_000).backfill_memory)
    feed.manager = manager
    feed._reached["cursor"] = (SeqnoAnchor(5, Position(3, 0, 3), inclusive=False),)

    async def exclusively(names: object, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    broker = SimpleNamespace(reader=lambda *arguments, **options: EntryReader(entry))
    topics: Any = SimpleNamespace(broker=broker, exclusively=exclusively)
    backfills = Backfills(topics, 1, lambda feed: asyncio.sleep(0), lambda feed: None)
    rows = await backfills._read(feed, ReadLog(1, "cursor", 5, 6, None, LEAST_MESSAGE_BYTES))
    backfills.close()
    assert rows.seqnos.tolist() == [5, 6]
    assert rows.messages.keys.to_list() == [b"k4", b"k5"]


def test_a_read_that_is_repeated_begins_where_the_last_one_began() -> None:
    followed: Any = SimpleNamespace(buffer=None, numbered=Sequencer(), index=None)
    feed = Feed("orders", followed, lambda: None, 0.0)
    rows = [Mutation(seqno, Position(3, seqno, 0), b"k", b"v") for seqno in range(5, 9)]
    feed.reached("cursor", MutationBatch.of(rows))
    asked = [feed.read_start(ReadLog(1, "cursor", first, 20, None, 1000)) for first in (9, 8, 5)]
    began = SeqnoAnchor(5, Position(3, 5, 0), inclusive=True)
    assert asked == [SeqnoAnchor(9, Position(3, 8, 0), inclusive=False), began, began]
