"""The order of operations: the numbers that they draw, and lanes that apply them in parallel

An operation changes a topic; a structure operation changes the manifest as well. It draws the next number of each
object that it changes, all of them at once, which is sure because one thread builds records. If they were drawn one by
one, two operations could each wait for the other for ever.

The number of a topic is the count of its operations, which the manifest keeps: entries begin again in each ledger and
have gaps after a compaction. After a cut the counts are those of the log that is left.

An operation may be applied once the one before it of each of its objects is applied. So different topics are applied in
parallel, each topic and the manifest in order, and no barrier is needed between appends and structure operations.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from broker_io.errors import StorageError


class Change(enum.IntEnum):
    """What an operation does. All but appends are structure operations; EPOCH changes no topic."""

    APPEND = 0
    MAKE = 1
    DELETE = 2
    ROLL = 3
    TRIM = 4
    POLICY = 5
    PREPARE = 6
    SWAP = 7
    EPOCH = 8


class NumberedOperation(NamedTuple):
    """An operation; `body` has every random or clocked input of it. A number is 0 for an object that it leaves alone.

    `number` is the topic's, `manifest` the manifest's.
    """

    change: Change
    topic: int
    number: int
    manifest: int
    body: object


@dataclass
class ObjectNumbers:
    """The last number that was drawn, or applied, of each topic and of the manifest."""

    topics: dict[int, int] = field(default_factory=dict)
    manifest: int = 0

    def draw(self, change: Change, topic: int, body: object) -> NumberedOperation:
        """An operation with the next number of each object that it changes; topic 0 if it changes none."""
        number = self.topics.get(topic, 0) + 1 if topic else 0
        manifest = self.manifest + 1 if change is not Change.APPEND else 0
        drawn = NumberedOperation(change, topic, number, manifest, body)
        self.note(drawn)
        return drawn

    def note(self, operation: NumberedOperation) -> None:
        """Count an operation. Raises StorageError if it is not the next one of each of its objects."""
        topic, number, manifest = operation.topic, operation.number, operation.manifest
        if number and number != self.topics.get(topic, 0) + 1:
            raise StorageError(f"topic {topic}: operation {number} follows {self.topics.get(topic, 0)}: copy the log")
        if manifest and manifest != self.manifest + 1:
            raise StorageError(f"the manifest: operation {manifest} follows {self.manifest}: copy the log again")
        if operation.change is Change.DELETE:
            self.topics.pop(topic, None)  # numbers of topics are never used again
        elif number:
            self.topics[topic] = number
        self.manifest = manifest or self.manifest

    def after(self, operations: Iterable[NumberedOperation]) -> Self:
        """The numbers after some more operations: those of the log that is left after a cut."""
        counted = type(self)(dict(self.topics), self.manifest)
        for operation in operations:
            counted.note(operation)
        return counted


class Lanes:
    """Applies operations on so many lanes: `take` what may be applied now, and say when it is `done`.

    `applied` is the lsn up to which all operations are.
    """

    def __init__(self, lanes: int, numbers: ObjectNumbers, applied: int) -> None:
        self.applied = applied
        self._lanes = lanes
        self._added = numbers
        self._running = 0
        self._waiting: defaultdict[int, deque[tuple[int, NumberedOperation]]] = defaultdict(deque)
        self._structure: deque[NumberedOperation] = deque()
        self._ready: deque[tuple[int, NumberedOperation]] = deque()
        self._left: dict[int, int] = {}

    def add(self, lsn: int, operations: Sequence[NumberedOperation]) -> None:
        """Add the operations of the next record. Raises StorageError if one of them is not the next one."""
        self._left[lsn] = len(operations)
        for operation in operations:
            self._added.note(operation)
            queue = self._waiting[operation.topic]
            queue.append((lsn, operation))
            if operation.manifest:
                self._structure.append(operation)
            if len(queue) == 1:
                self._offer(operation.topic)
        self._advance()

    def _offer(self, topic: int) -> None:
        """The first operation of a topic is ready if it is also the first one of the manifest, or leaves it alone."""
        lsn, operation = self._waiting[topic][0]
        if not operation.manifest or self._structure[0] is operation:
            self._ready.append((lsn, operation))

    def _offer_structure(self, done: int) -> None:
        """The first operation of the manifest may be ready now, if it is of another topic than the one just done."""
        if self._structure and self._structure[0].topic != done:
            first = self._waiting[self._structure[0].topic][0]
            if first[1] is self._structure[0]:
                self._ready.append(first)

    def take(self) -> tuple[int, NumberedOperation] | None:
        """An operation with its lsn, for a lane that is free; None if no lane is, or nothing may be applied yet."""
        if self._running == self._lanes or not self._ready:
            return None
        self._running += 1
        return self._ready.popleft()

    def done(self, lsn: int, operation: NumberedOperation) -> None:
        """An operation that was taken is applied."""
        self._running -= 1
        queue = self._waiting[operation.topic]
        queue.popleft()
        if operation.manifest:
            self._structure.popleft()
            self._offer_structure(operation.topic)
        if queue:
            self._offer(operation.topic)
        else:
            del self._waiting[operation.topic]
        self._left[lsn] -= 1
        self._advance()

    def _advance(self) -> None:
        while self._left.get(self.applied + 1) == 0:
            self.applied += 1
            del self._left[self.applied]
