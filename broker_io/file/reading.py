"""What a broker of an embedded log does for readers, whether it owns the log or follows it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from broker_io.file.lookup import first_position, last_position, position_at
from broker_io.file.reader import FileReader
from broker_io.file.source import Source
from broker_io.port import Ledger
from broker_io.position import EARLIEST, Position


class ReadingBroker:
    """The half of the broker port that changes nothing."""

    def __init__(self, source: Source) -> None:
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
        return FileReader(self._source, self._source.named(topic), start, inclusive=inclusive)

    def ledgers(self, topic: str) -> list[Ledger]:
        entry = self._source.grown(self._source.named(topic))
        newest = entry.ledgers[-1]
        return [
            Ledger(ledger.ledger, ledger.entries, ledger.bytes, closed=ledger is not newest) for ledger in entry.ledgers
        ]

    def first_position(self, topic: str) -> Position | None:
        return first_position(self._source, self._source.named(topic))

    def last_position(self, topic: str) -> Position | None:
        return last_position(self._source.grown(self._source.named(topic)))

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return position_at(self._source, self._source.grown(self._source.named(topic)), time_ms)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
