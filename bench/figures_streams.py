"""Change streams: mutations queued in a mutation manager while all cursors read."""

from __future__ import annotations

import time

import numpy as np

from bench.harness import figure
from bench.workload import records
from broker_io.batch import Batch, Blobs
from broker_io.position import Positions
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.manager import MutationManager

BATCHES = 2_000
CURSORS = 4
KEYS = 10_000


def mutations(count: int, size: int) -> list[MutationBatch]:
    """`count` batches of `size` mutations: random keys of 8 bytes out of 10,000, values of 100 bytes."""
    random = np.random.default_rng(9)
    offsets = np.arange(0, (size + 1) * 8, 8, dtype=np.int32)
    batches = []
    for first in range(1, count * size, size):
        seqnos = np.arange(first, first + size, dtype=np.int64)
        keys = Blobs(random.integers(0, KEYS, size).astype(">u8").tobytes(), offsets, None)
        messages = Batch(keys, records(size, first).values)
        batches.append(MutationBatch(seqnos, Positions.consecutive(0, first, size), seqnos.copy(), messages))
    return batches


def queued_per_s(size: int, *, take_every: int = 1) -> float:
    """Mutations per second; each cursor takes all of them after every `take_every` batches of `size`."""
    batches = mutations(BATCHES, size)
    manager = MutationManager()
    cursors = [manager.register(f"cursor-{number}", 0) for number in range(CURSORS)]
    start = time.perf_counter()
    for number, batch in enumerate(batches, 1):
        manager.queue_many(batch)
        manager.take_effects()
        if number % take_every == 0:
            for cursor in cursors:
                cursor.take(manager.high)
            manager.persist()
    elapsed = time.perf_counter() - start
    total = BATCHES * size
    if BATCHES % take_every == 0 and any(cursor.after != total for cursor in cursors):
        raise RuntimeError("a cursor is not at the end")
    return total / elapsed


@figure("streams.queued_per_s", unit="mutations/s", goal=">= 500000")
def queued() -> float:
    return queued_per_s(256)


@figure("streams.queued_per_s.16", unit="mutations/s")
def queued_by_few() -> float:
    return queued_per_s(16)


@figure("streams.queued_per_s.behind", unit="mutations/s")
def queued_ahead_of_cursors() -> float:
    return queued_per_s(256, take_every=20)
