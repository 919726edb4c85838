"""A run of mutations of one snapshot, as it was queued; replaced ones stay in it until it is packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from txnbuffer.mutations.account import Account
from txnbuffer.mutations.batch import MutationBatch

TINY_ROWS = 64
TINY_BYTES = 16 * 1024

TOGETHER = 32
TOGETHER_BYTES = 64 * 1024
"""At most so many tiny chunks, with keys and values of so many bytes, become one."""


class Chunk:
    """`rows`, of which those that `alive` masks (None: all) stand in the snapshot: `live` of them.

    `first` is a seqno at or below all of them and above those of the chunk before. `handed` cursors have given
    rows of it to somebody who may still hold them; `leaving` counts them once the snapshot let them go.
    """

    __slots__ = ("alive", "bytes", "first", "handed", "leaving", "live", "rows")

    def __init__(self, rows: MutationBatch) -> None:
        self.rows = rows
        self.first = rows.first
        self.alive: NDArray[np.bool_] | None = None
        self.live = len(rows)
        self.bytes = rows.nbytes()
        self.handed = 0
        self.leaving: Account | None = None

    @property
    def last(self) -> int:
        """The last seqno of it, replaced ones included until it is packed."""
        return self.rows.last

    @property
    def tiny(self) -> bool:
        return len(self.rows) < TINY_ROWS and self.bytes < TINY_BYTES

    def keep(self, alive: NDArray[np.bool_]) -> int:
        """Of a new one, keep those that a mask says; how many that leaves out."""
        self.live = int(alive.sum())
        if self.live < len(self.rows):
            self.alive = alive
        return len(self.rows) - self.live

    def replace(self, seqnos: Sequence[int]) -> None:
        """Take mutations out that a newer one of their key replaces; they are in it, and alive."""
        if self.alive is None:
            self.alive = np.ones(len(self.rows), np.bool_)
        self.alive[np.searchsorted(self.rows.seqnos, np.array(seqnos, np.int64))] = False
        self.live -= len(seqnos)

    def pack(self) -> int:
        """Let go of replaced mutations; the bytes won. At least one is alive."""
        if self.alive is None:
            return 0
        before = self.bytes
        self.rows = self.rows.take(self.alive).owned()
        self.alive = None
        self.bytes = self.rows.nbytes()
        return before - self.bytes

    def living(self) -> MutationBatch:
        return self.rows if self.alive is None else self.rows.take(self.alive)

    def hand(self) -> None:
        """A cursor gives rows of it away."""
        self.handed += 1

    def give_back(self) -> None:
        """Whoever got them is done."""
        self.handed -= 1
        if self.leaving is not None and not self.handed:
            self.leaving.add(-self.bytes)
            self.leaving = None

    def leave(self, leaving: Account) -> None:
        """The snapshot lets go of it: what was handed out is on its way to be freed."""
        if self.handed:
            self.leaving = leaving
            leaving.add(self.bytes)


def join_tiny(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same mutations with runs of tiny chunks made one: little batches weigh more than what they hold."""
    joined: list[Chunk] = []
    run: list[Chunk] = []
    payload = 0
    for chunk in chunks:
        more = chunk.rows.payload() if chunk.tiny else TOGETHER_BYTES + 1
        if run and (len(run) == TOGETHER or payload + more > TOGETHER_BYTES):
            joined.append(_one(run))
            run, payload = [], 0
        if chunk.tiny:
            run.append(chunk)
            payload += more
        else:
            joined.append(chunk)
    return [*joined, _one(run)] if run else joined


def _one(run: list[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    one = Chunk(MutationBatch.concat([part.living() for part in run]).owned())
    one.first = run[0].first
    return one
