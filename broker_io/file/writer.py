"""Writers to a topic of the embedded log, and the fence that decides which of them may write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from broker_io.batch import Batch
from broker_io.errors import Error, Fenced
from broker_io.file.commit import FileTopic
from broker_io.position import Positions


class Fence:
    """The fence of a topic: an exclusive writer fences all writers that were opened before it."""

    def __init__(self) -> None:
        self._number = 0
        self._held = False

    @property
    def held(self) -> bool:
        """Whether an exclusive writer is open."""
        return self._held

    def enter(self, name: str, *, exclusive: bool) -> int:
        """The ticket of a new writer. Raises Fenced for a shared writer while an exclusive one is open."""
        if exclusive:
            self._number += 1
            self._held = True
        elif self._held:
            raise Fenced(f"topic {name!r} is held by an exclusive writer: close it, or open an exclusive writer")
        return self._number

    def check(self, name: str, ticket: int) -> None:
        """Raises Fenced if an exclusive writer was opened after the ticket was issued."""
        if ticket != self._number:
            raise Fenced(f"another exclusive writer has opened topic {name!r}: this writer can't append any more")

    def leave(self, ticket: int, *, exclusive: bool) -> None:
        if exclusive and ticket == self._number:
            self._held = False


class FileWriter:
    """A writer to a topic; any thread may append."""

    def __init__(
        self,
        topic: FileTopic,
        ticket: int,
        append: Callable[[FileWriter, Batch, bool], Future[Positions]],
        leave: Callable[[FileWriter], None],
        *,
        exclusive: bool,
    ) -> None:
        self.topic = topic
        self.ticket = ticket
        self.exclusive = exclusive
        self.closed = False
        self._append = append
        self._leave = leave

    def append(self, batch: Batch) -> Future[Positions]:
        return self._append(self, batch, False)

    def append_reserved(self, batch: Batch) -> Future[Positions]:
        """As `ReservingWriter` says."""
        return self._append(self, batch, True)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def done(result: Positions) -> Future[Positions]:
    """A future that has its result."""
    future: Future[Positions] = Future()
    future.set_result(result)
    return future


def failed(error: Error) -> Future[Positions]:
    """A future that has failed."""
    future: Future[Positions] = Future()
    future.set_exception(error)
    return future
