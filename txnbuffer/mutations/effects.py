"""What the manager wants done: reads of the log, and word to those who wait for mutations."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from txnbuffer.mutations.index import Anchor


class ReadLog(NamedTuple):
    """Read the visible mutations from `first` on, up to `last`, and answer with `backfilled(ticket, ...)`.

    The answer holds those from `first` on without a gap, at least one, with keys and values of about
    `max_bytes` together; the rest is asked for when there is room. `anchor` is where reading can begin if
    nothing nearer is known, None for the beginning of the log. Whoever reads may let requests wait.
    """

    ticket: int
    cursor: str
    first: int
    last: int
    anchor: Anchor | None
    max_bytes: int


class StopReading(NamedTuple):
    """Nobody wants the answer of this ticket any more."""

    ticket: int


class Wake(NamedTuple):
    """A cursor that had nothing to give has something now, or has failed."""

    cursor: str


Effect: TypeAlias = ReadLog | StopReading | Wake
