"""Reading a compacted topic to its end.

An end is taken before the messages are read. The message there may never come, because compaction dropped it; but also
a reader that has lost its source, or one of a broker that has just restarted, gets nothing. One rule says when all is
read:

1. All is read once the reader has a message at or after the end: the log may grow without limit meanwhile.
2. The silence of one reader proves nothing: it takes seconds to notice that it has lost its source. To open another one
   after the last message is faster.
3. If that one is silent too, the raw log shows what a slow broker kept back, if compaction leaves it as it is and it
   was not trimmed there. Messages of it that do not come are a retryable error. It does not show what was compacted
   and trimmed before its beginning, so if no message was read yet, more readers are opened first.
4. Else two silent readers count as the end. Where what was read can't be everything, as the caller knows, they do not:
   more readers are opened, until the wait is over.
5. Such an end is `unproven`. A caller that then writes a message reads up to it. No compaction was later than that
   message, so silence before it is no end, and messages up to the unproven end show that it was none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed
from broker_io.port import READ_SECONDS, Broker, PolicyBroker, Reader, Resource, existing
from broker_io.position import EARLIEST, Position

END_TIMEOUT = 0.25
"""Seconds without a message after which a reader counts as silent."""
REOPEN_AFTER = 2.0
"""Seconds without a message that exists after which another reader is opened."""


class CompactedReader(Resource):
    """Reads the messages after `start` (exclusive), which it yields in order and once; opens a reader at once.

    `at`: the last message that was read. `unproven`: the last message before an end that only silence showed, or None.
    `compacted`: False reads the raw log.
    """

    def __init__(self, broker: Broker, topic: str, start: Position = EARLIEST, *, compacted: bool = True) -> None:
        self.topic = topic
        self.at = start
        self.unproven: Position | None = None
        self._broker = broker
        self._compacted = compacted
        self._reader: Reader = self._opened()

    def read(self, timeout: float) -> PlacedBatch | None:
        """The next messages; None if none came in `timeout` seconds. Raises as `Reader.read`."""
        placed = self._reader.read(timeout=timeout)
        if placed is None:
            return None
        new = placed.take(slice(placed.positions.search(self.at, right=True), None))
        self.at = max(self.at, placed.positions.last)
        return new

    def read_to_end(self, end: Position | None, whole: Callable[[], bool] | None = None) -> Iterator[PlacedBatch]:
        """The messages up to `end`, which was taken before, and perhaps more; None: the topic is empty.

        `whole`: whether what was yielded can be everything. Raises ServiceUnavailable if messages do not come.
        """
        self.unproven = None
        silent = 0.0
        while end is not None and self.at < end:
            timeout = END_TIMEOUT if silent < 2 * END_TIMEOUT else REOPEN_AFTER
            placed = self.read(timeout)
            if placed is not None:
                silent = 0.0
                yield placed
                continue
            if silent:
                kept, begun, waited = self._is_kept(end), self.at > EARLIEST, silent >= READ_SECONDS
                if kept and (begun or waited) and (left := self._raw_log()) is not None:
                    with left:
                        for placed in left.read_to(end):
                            self.at = left.at
                            yield placed
                    return
                if waited or ((begun or not kept) and (whole is None or whole())):
                    self.unproven = self.at
                    return
            silent += timeout
            self._reopen()

    def read_to(self, position: Position) -> Iterator[PlacedBatch]:
        """The messages up to one that exists, and perhaps more. Raises ServiceUnavailable if it does not come."""
        while self.at < position:
            yield existing(self.read(READ_SECONDS), self.topic, self.at)

    def _is_kept(self, end: Position) -> bool:
        """Whether the message at the end is in the raw log, however the topic was compacted."""
        if not isinstance(self._broker, PolicyBroker):
            return False
        ledgers = self._broker.ledgers(self.topic)
        return any(ledger.ledger == end.ledger and ledger.entries > end.entry for ledger in ledgers)

    def _raw_log(self) -> CompactedReader | None:
        """A reader of the raw log after `at`; None if it was trimmed there."""
        try:
            return CompactedReader(self._broker, self.topic, self.at, compacted=False)
        except PositionTrimmed:
            return None

    def _opened(self) -> Reader:
        return self._broker.reader(self.topic, self.at, inclusive=False, compacted=self._compacted)

    def _reopen(self) -> None:
        self._reader.close()
        self._reader = self._opened()

    def close(self) -> None:
        self._reader.close()
