"""A message source with a callback for the next message returns messages in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import _pulsar
import pulsar
import pytest

from broker_io.errors import Error
from broker_io.position import EARLIEST
from broker_io.pulsar.reader import MessageSource


def message(entry: int) -> Any:
    place = SimpleNamespace(ledger_id=lambda: 1, entry_id=lambda: entry, batch_index=lambda: -1)
    return SimpleNamespace(entry=entry, message_id=lambda: place)


class Library:
    """A reader of the library with a queue, and a callback for the next message."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.told: Any = None
        self.closed = False

    def read_next_async(self, told: Any) -> None:
        assert self.told is None, "it was asked twice"
        if self.queue:
            told(pulsar.Result.Ok, self.queue.pop(0))
        else:
            self.told = told

    def read_next(self, milliseconds: int) -> Any:
        if self.closed:
            raise pulsar.AlreadyClosed
        if not self.queue:
            raise _pulsar.Timeout
        return self.queue.pop(0)

    def comes(self, entry: int) -> None:
        told, self.told = self.told, None
        if told is None:
            self.queue.append(message(entry))
        else:
            told(pulsar.Result.Ok, message(entry))


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def source(library: Library) -> MessageSource:
    cluster: Any = SimpleNamespace(opened=lambda *_: SimpleNamespace(_reader=library))
    return MessageSource(cluster, "t", EARLIEST, compacted=False, ahead=10)


def rest(source: MessageSource) -> list[int]:
    return [found.entry for found in iter(lambda: source.next(0), None)]


def test_callback_is_called_once_and_at_once_for_available_messages(library: Library, source: MessageSource) -> None:
    told: list[int] = []
    source.notify_when_readable(lambda: told.append(1))
    assert rest(source) == []
    source.notify_when_readable(lambda: told.append(2))
    library.comes(0)
    library.comes(1)
    assert told == [2]
    source.notify_when_readable(lambda: told.append(3))
    assert told == [2, 3]
    assert rest(source) == [0, 1]
    library.comes(2)
    source.notify_when_readable(lambda: told.append(4))
    assert told == [2, 3, 4]
    assert rest(source) == [2]


def test_message_queued_during_the_request_is_returned_first(library: Library, source: MessageSource) -> None:
    source.notify_when_readable(lambda: None)
    library.queue.append(message(0))  # queued just before the asynchronous read
    library.comes(1)
    first = source.next(0)
    assert first is not None
    told: list[int] = []
    source.notify_when_readable(lambda: told.append(1))
    assert told == [1]
    assert [first.entry, *rest(source)] == [0, 1]


def test_message_whose_callback_is_late_is_returned_before_those_of_the_queue(
    library: Library, source: MessageSource
) -> None:
    """The library calls back in a thread of its own; meanwhile it queues what comes next."""
    source.notify_when_readable(lambda: None)
    told, library.told = library.told, None  # the library has a message for it
    library.comes(1)
    library.comes(2)
    assert rest(source) == []
    told(pulsar.Result.Ok, message(0))
    assert rest(source) == [0, 1, 2]


def test_callback_is_called_at_the_end(library: Library, source: MessageSource) -> None:
    told: list[int] = []
    source.notify_when_readable(lambda: told.append(1))
    library.closed = True
    library.told(pulsar.Result.AlreadyClosed, None)
    assert told == [1]
    with pytest.raises(Error):
        source.next(0)
