"""What was asked of the service and is not answered: kept until it is, over as many connections as it takes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from txnbuffer.client.outbox import Waiter

Field: TypeAlias = Literal[
    "registers", "leases", "open_names", "delete_names", "joins", "members", "begins", "commits", "aborts", "queries"
]
"""The part of a client's frame that a request is a row of."""


class Request(NamedTuple):
    """`subject`: the transaction or topic that it is about."""

    field: Field
    row: Any
    waiter: Waiter
    subject: Any


class Requests:
    def __init__(self) -> None:
        self.unanswered: dict[int, Request] = {}
        self._number = 0
        self._queued: dict[Field, list[Any]] = {}
        self._sent: set[int] = set()  # those of `unanswered` that went over an older connection

    def number(self) -> int:
        """The number of the next request."""
        self._number += 1
        return self._number

    def ask(self, field: Field, row: Any, waiter: Waiter = None, subject: Any = None) -> None:
        """Put a request, a row that begins with its number, into the next frame."""
        self.unanswered[row[0]] = Request(field, row, waiter, subject)
        self._queue(field, row)

    def answered(self, number: int) -> Request | None:
        return self.unanswered.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Take a request back; False: it is on its way already."""
        request = self.unanswered.get(number)
        if request is None:
            return False
        rows = self._queued.get(request.field, [])
        if number in self._sent or request.row not in rows:
            return False
        rows.remove(request.row)
        del self.unanswered[number]
        return True

    def again(self) -> None:
        """Put all that is unanswered into the next frame, in the order in which it was asked."""
        queued = {row[0] for rows in self._queued.values() for row in rows}
        self._sent = (self._sent & set(self.unanswered)) | (set(self.unanswered) - queued)
        self._queued.clear()
        for request in self.unanswered.values():
            self._queue(request.field, request.row)

    def stop_waiting(self, *, visible: bool) -> list[Request]:
        """Nobody waits any more, as if none had been given; those who did. `visible`: for visibility neither."""
        told = []
        for number, request in self.unanswered.items():
            patient = request.field == "commits" and request.row.wait_visible and not visible
            if request.waiter is not None and not patient:
                told.append(request)
                self.unanswered[number] = request._replace(waiter=None)
        return told

    def drop_all(self) -> None:
        self.unanswered.clear()
        self._queued.clear()

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for an answer."""
        return any(request.waiter is not None for request in self.unanswered.values())

    def take(self) -> dict[str, Any]:
        """The parts of the next frame."""
        queued, self._queued = self._queued, {}
        return {field: tuple(rows) for field, rows in queued.items() if rows}

    def _queue(self, field: Field, row: Any) -> None:
        rows = self._queued.get(field)
        if rows is None:
            self._queued[field] = [row]
        else:
            rows.append(row)
