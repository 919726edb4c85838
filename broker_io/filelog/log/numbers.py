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
from itertools import islice
from typing import NamedTuple, Self

from broker_io.errors import StorageError
from broker_io.position import maker


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


as_operation = maker(NumberedOperation)


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

    @property
    def ready(self) -> bool:
        """Whether a lane is free, and something may be applied."""
        return self._running < self._lanes and bool(self._ready)

    def take(self) -> list[tuple[int, NumberedOperation]]:
        """What a lane that is free may apply, with the lsn of each: an operation of a topic, or structure operations
        that follow each other, of which each is the next one of its topic. Empty if no lane is free, or nothing may be
        applied yet.
        """
        if not self.ready:
            return []
        self._running += 1
        taken = [self._ready.popleft()]
        if taken[0][1].manifest:
            for operation in islice(self._structure, 1, None):
                first = self._waiting[operation.topic][0]
                if first[1] is not operation:
                    break
                taken.append(first)
        return taken

    def done(self, taken: Sequence[tuple[int, NumberedOperation]]) -> None:
        """What was taken is applied."""
        self._running -= 1
        for lsn, operation in taken:
            self._waiting[operation.topic].popleft()
            if operation.manifest:
                self._structure.popleft()
            self._left[lsn] -= 1
        topics = {operation.topic for _, operation in taken}
        for topic in sorted(topics):
            if self._waiting[topic]:
                self._offer(topic)
            else:
                del self._waiting[topic]
        if taken[0][1].manifest:
            self._offer_structure(topics)
        self._advance()

    def _offer_structure(self, done: set[int]) -> None:
        """The first operation of the manifest may be ready now, if it is of another topic than those just done."""
        if self._structure and self._structure[0].topic not in done:
            first = self._waiting[self._structure[0].topic][0]
            if first[1] is self._structure[0]:
                self._ready.append(first)

    def give_back(self, taken: Sequence[tuple[int, NumberedOperation]]) -> None:
        """What was taken could not be applied, and nothing of it was; it is taken again."""
        self._running -= 1
        self._ready.appendleft(taken[0])

    def _advance(self) -> None:
        while self._left.get(self.applied + 1) == 0:
            self.applied += 1
            del self._left[self.applied]
