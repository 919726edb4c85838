"""Columns of positions as runs: messages of one ledger whose entries follow one another."""

from __future__ import annotations

import numpy as np

from broker_io.position import NO_INDEX, Positions


def encode_runs(positions: Positions) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ledger, first entry, batch index and length of each run, in order."""
    count = len(positions)
    ledgers, entries, indexes = positions.ledgers, positions.entries, positions.indexes
    if count < 2:
        return ledgers.tolist(), entries.tolist(), indexes.tolist(), [1] * count
    breaks = (ledgers[1:] != ledgers[:-1]) | (entries[1:] != entries[:-1] + 1) | (indexes[1:] != indexes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, count))
    return ledgers[starts].tolist(), entries[starts].tolist(), indexes[starts].tolist(), lengths.tolist()


def decode_runs(ledgers: list[int], entries: list[int], indexes: list[int], lengths: list[int]) -> Positions:
    """The positions of runs. Raises ValueError if they are none."""
    if not len(ledgers) == len(entries) == len(indexes) == len(lengths):
        raise ValueError("columns of runs of positions have different lengths")
    if lengths and min(lengths) < 1:
        raise ValueError("a run of positions has no length")
    if len(lengths) == 1 and indexes[0] == NO_INDEX:
        return Positions.run(ledgers[0], entries[0], lengths[0])
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(starts, sizes)
    return Positions(
        np.repeat(np.array(ledgers, np.int64), sizes),
        np.repeat(np.array(entries, np.int64), sizes) + within,
        np.repeat(np.array(indexes, np.int64), sizes),
    )
