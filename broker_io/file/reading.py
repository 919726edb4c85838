"""What a broker of an embedded log does for readers, whether it owns the log or follows it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from broker_io.file.lookup import first_position, last_position, position_at
from broker_io.file.manifest import TopicEntry
from broker_io.file.options import disk_error
from broker_io.file.reader import FileReader
from broker_io.file.recovery import missing_segment
from broker_io.file.source import Source
from broker_io.port import MAX_MESSAGE_BYTES, Ledger
from broker_io.position import EARLIEST, Position

Answer = TypeVar("Answer")


class ReadingBroker:
    """The half of the broker port that changes nothing."""

    def __init__(self, source: Source, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_message_bytes = max_message_bytes
        self._source = source

    def topics(self) -> list[str]:
        return self._source.names()

    def incarnation(self, topic: str) -> str:
        return self._source.named(topic).incarnation

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> FileReader:
        """As the port says. Compaction takes place in the log itself, so both ways of reading are the same."""
        del compacted
        return self._ask(topic, lambda entry: FileReader(self._source, entry, start, inclusive=inclusive))

    def ledgers(self, topic: str) -> list[Ledger]:
        entry = self._ask(topic, self._source.grown)
        newest = entry.ledgers[-1]
        return [
            Ledger(ledger.ledger, ledger.entries, ledger.bytes, closed=ledger is not newest) for ledger in entry.ledgers
        ]

    def first_position(self, topic: str) -> Position | None:
        return first_position(self._source, self._source.named(topic))

    def last_position(self, topic: str) -> Position | None:
        return last_position(self._ask(topic, self._source.grown))

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return self._ask(topic, lambda entry: position_at(self._source, self._source.grown(entry), time_ms))

    def _ask(self, topic: str, question: Callable[[TopicEntry], Answer]) -> Answer:
        """The answer about a topic as it is; asked again if its files were trimmed or rewritten meanwhile."""
        while True:
            entry = self._source.named(topic)
            try:
                return question(entry)
            except FileNotFoundError as error:
                if self._source.named(topic) is entry:
                    raise missing_segment(str(error.filename)) from None
            except OSError as error:
                raise disk_error(error, self._source.directory, "the topic can't be read") from error

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
