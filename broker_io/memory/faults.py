"""Faults on demand: failed, lost, duplicated, fenced and held appends, requested one by one.

Each fault hits the next matching append (or read) of this broker handle, once, in the order of the requests. As on
Pulsar, a failed append ends its writer: later appends fail with the same error, unless the error is retryable.
Of several appends in one operation all or nothing is written, whatever fault hits one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from broker_io.batch import Batch
from broker_io.environment import Condition
from broker_io.errors import DiskFailed, Error, Fenced
from broker_io.port import settle
from broker_io.position import Positions

REQUESTED = "a test requested this fault: reopen the topic"
"""The text of the default error."""


@dataclass(slots=True)
class AppendFault:
    """The fault of one append: its first `written` messages (None: all) are written `copies` times, then `error`."""

    topic: str | None
    error: Exception | None = None
    written: int | None = None
    copies: int = 1
    fences: bool = False


@dataclass(slots=True)
class ReadFault:
    topic: str | None
    error: Exception


class Holder(Protocol):
    """The writer of a held append."""

    @property
    def topic(self) -> str: ...

    def put(self, batch: Batch) -> Positions | Error: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class Held:
    """Appends in one operation whose acknowledgement is held back. `outcomes` is None until they are in the log.

    `alone`: the future is that of the only append.
    """

    appends: Sequence[tuple[Holder, Batch]]
    faults: Faults
    alone: bool
    future: Future[Any] = field(default_factory=Future)
    outcomes: list[Positions | Error] | None = None

    @property
    def topic(self) -> str:
        return self.appends[0][0].topic

    @property
    def writers(self) -> list[Holder]:
        return [writer for writer, _ in self.appends]

    def put(self) -> list[Positions | Error]:
        """Append to the log; the caller holds the lock."""
        self.outcomes = [writer.put(batch) for writer, batch in self.appends]
        return self.outcomes

    def write(self) -> None:
        """Write them to the log without an acknowledgement. Appends of one writer must be written in their order."""
        with self.faults.lock:
            if self.outcomes is None and not self.future.done():
                waiting = [held for held in self.faults.held if held.outcomes is None]
                if any({*held.writers} & {*self.writers} for held in waiting[: waiting.index(self)]):
                    raise ValueError("an earlier append of this writer is not written yet: write that first")
                self.put()

    def acknowledge(self) -> None:
        """Acknowledge them, and write them first if they are not in the log."""
        if self.outcomes is None:
            self.write()
        if self.outcomes is not None and not self.future.done():  # otherwise fencing has failed it
            self.end(self.outcomes)

    def fail(self, error: Exception) -> None:
        """Fail them, whether or not they are in the log: the writer can't know."""
        with self.faults.lock:
            for writer in self.writers:
                writer.fail(error)
        self.end(error)

    def end(self, outcome: list[Positions | Error] | Exception) -> None:
        with self.faults.lock:
            self.faults.held.remove(self)
        self.settle(outcome)

    def settle(self, outcome: list[Positions | Error] | Exception) -> None:
        """Resolve the future."""
        settle(self.future, outcome[0] if self.alone and not isinstance(outcome, Exception) else outcome)


@dataclass(slots=True)
class Faults:
    """The faults of one broker handle; `lock` is the lock under which its writers append."""

    lock: Condition
    held: list[Held] = field(default_factory=list)
    appends: list[AppendFault] = field(default_factory=list)
    reads: list[ReadFault] = field(default_factory=list)
    holds: dict[str | None, bool] = field(default_factory=dict)

    def fail_append(self, error: Exception | None = None, *, written: int = 0, topic: str | None = None) -> None:
        """Write the first `written` messages of the next append, then fail it."""
        self.appends.append(AppendFault(topic, error or DiskFailed(REQUESTED), written))

    def lose_acknowledgement(self, error: Exception | None = None, *, topic: str | None = None) -> None:
        """Write the whole next append, then fail it."""
        self.appends.append(AppendFault(topic, error or DiskFailed(REQUESTED)))

    def duplicate_append(self, *, topic: str | None = None) -> None:
        """Write the next append twice; its acknowledgement names the second copy."""
        self.appends.append(AppendFault(topic, copies=2))

    def fence_append(self, *, written: int = 0, topic: str | None = None) -> None:
        """Fence the writer during its next append, after its first `written` messages."""
        error = Fenced("another exclusive writer opened the topic: a test requested this fault")
        self.appends.append(AppendFault(topic, error, written, fences=True))

    def fail_read(self, error: Exception, *, topic: str | None = None) -> None:
        self.reads.append(ReadFault(topic, error))

    def hold(self, *, topic: str | None = None, written: bool = True) -> None:
        """Hold back acknowledgements from now on, and the messages too if not `written`."""
        self.holds[topic] = written

    def release(self) -> None:
        """Write and acknowledge all held appends, and hold no more.

        Appends made meanwhile are held too until those before them are acknowledged: appends keep their order.
        """
        while (held := self._let_go()) is not None:
            held.acknowledge()

    def _let_go(self) -> Held | None:
        with self.lock:
            waiting = (held for held in self.held if not held.future.done())
            if (first := next(waiting, None)) is None:
                self.holds.clear()
            return first

    def holding(self, topic: str) -> bool | None:
        """Whether a held append of this topic is written at once; None if appends are not held."""
        return self.holds.get(topic, self.holds.get(None))

    def take_append(self, topic: str) -> AppendFault | None:
        return _take(self.appends, topic)

    def take_read(self, topic: str) -> ReadFault | None:
        return _take(self.reads, topic)


Fault = TypeVar("Fault", AppendFault, ReadFault)


def _take(faults: list[Fault], topic: str) -> Fault | None:
    for index, fault in enumerate(faults):
        if fault.topic in (None, topic):
            return faults.pop(index)
    return None
