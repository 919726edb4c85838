"""One topic of the service: what waits to be appended, what is on its way, and its buffer."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import Error, TopicNotFound
from broker_io.port import Writer
from broker_io.position import Position, Positions
from broker_io.waits import Wait
from txnbuffer.errors import UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.recovery.tailing import Tail
from txnbuffer.service.following import Follower
from txnbuffer.service.limits import CELL_BYTES, MAX_PROPERTIES

FLIGHT_BYTES = 8 * 1024 * 1024
"""What one append holds at most, about."""


class Part(Protocol):
    """Something to be appended, and what is done when that has happened; `size` is about its bytes.

    `reserved`: it is no record, and may use what a nearly full disk keeps free.
    """

    batch: Batch
    size: int
    reserved: bool

    def landed(self) -> None: ...

    def failed(self, error: Error) -> None: ...


class Flight(NamedTuple):
    """One append under way: its parts, and all their records."""

    parts: Sequence[Part]
    batch: Batch
    reserved: bool = False


class Topic:
    """`tail` is None while the topic has no transactions. `held`: nothing is appended for now.

    `problem`: why nothing can be appended any more; `trouble`: why nothing is written at the moment. `patient`: what
    a nearly full disk refuses (`refused`) is tried again, in order, instead of failing. `low`: it refuses records, so
    what is reserved is appended by itself. `shared`: others write it
    too; then `follower` reads it, and the writer is for markers.
    """

    def __init__(self, name: str, *, patient: bool = False, shared: bool = False) -> None:
        self.name = name
        self.patient = patient
        self.shared = shared
        self.refused: list[Part] = []
        self.low = False
        self.wait: Wait | None = None
        """That for space, while there is none."""
        self.writer: Writer | None = None
        self.tail: Tail | None = None
        self.held = True
        self.lock = asyncio.Lock()
        self.problem: Error | None = None
        self.trouble: Error | None = None
        self.follower: Follower | None = None
        self.waiting: deque[Part] = deque()
        self.flights: deque[Flight] = deque()
        self.checks: dict[int, None] = {}
        """Transactions to be counted once the buffer has all that they sent."""
        self.doubted: set[TxnId] = set()
        """Transactions that are to be asked about once the buffer has all that stands in the log."""
        self.asked_up_to: Position | None = None
        """What began behind it has been ongoing for less than a look at the time."""

    @property
    def missing(self) -> bool:
        """Whether it was stopped by what can pass: then it is registered again."""
        return can_pass(self.problem, shared=self.shared)

    @property
    def stopped(self) -> bool:
        """Whether it goes no further by itself; what the cluster did not answer for is tried again."""
        return self.problem is not None and not (self.missing and self.problem.retryable)

    @property
    def why_not(self) -> Error | None:
        """What keeps this topic from going on, for good or for now."""
        return self.problem or self.trouble or (None if self.follower is None else self.follower.problem)

    def refusal(self) -> Error:
        """Why no transaction can be written here."""
        return self.problem or UnregisteredTopic(
            f"topic {self.name!r} is not registered: register it before the first record of a transaction"
        )

    def take(self) -> Flight:
        """What can be appended now, in one batch; something must be waiting."""
        parts: list[Part] = []
        size, rows, names = 0, 0, set[str]()
        while self.waiting:
            part = self.waiting[0]
            size, rows = size + part.size, rows + len(part.batch)
            names.update(part.batch.properties)
            if parts and (size + CELL_BYTES * len(names) * rows > FLIGHT_BYTES or len(names) > MAX_PROPERTIES):
                break
            if parts and self.low and part.reserved != parts[0].reserved:
                break
            parts.append(self.waiting.popleft())
        return Flight(parts, Batch.concat([part.batch for part in parts]), self.low and parts[0].reserved)


def can_pass(problem: Error | None, *, shared: bool) -> bool:
    """Whether a topic goes on some time: it was deleted, or (`shared`) its cluster did not answer for it."""
    return isinstance(problem, TopicNotFound) or (shared and problem is not None and problem.retryable)


def placed_runs(positions: Positions, batch: Batch) -> list[PlacedBatch]:
    """What was appended as it stands in the log, a piece for each ledger; all of it was published at one time."""
    ledgers = positions.ledgers
    times = np.full(len(positions), positions.published, np.int64)
    if ledgers[0] == ledgers[-1]:
        return [PlacedBatch(positions, times, batch)]
    whole = PlacedBatch(positions, times, batch)
    cuts = [0, *(np.flatnonzero(np.diff(ledgers)) + 1).tolist(), len(ledgers)]
    return [whole.take(slice(start, stop)) for start, stop in itertools.pairwise(cuts)]
