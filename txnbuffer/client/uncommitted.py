"""One topic read as it stands in its log, for a reader that doesn't wait for transactions to end."""

from __future__ import annotations

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from txnbuffer.client.follower import Beginning, unpacked
from txnbuffer.client.records import RecordBatch
from txnbuffer.columns import present
from txnbuffer.model import EARLIEST, Position
from txnbuffer.protocol import MARKER
from txnbuffer.recordset import TOGETHER, rows_within


class UncommittedFollower:
    """Hands out every record as it stands in the log, whatever became of its transaction."""

    def __init__(self, broker: Broker, topic: str, beginning: Beginning) -> None:
        self.topic = topic
        self._beginning = beginning
        self._stopped: Error | None = None
        # A start within a record set is one within its message.
        start = beginning.position
        self._reader = broker.reader(topic, start if start == EARLIEST else start._replace(batch=NO_INDEX))
        self._messages: PlacedBatch | None = None
        self._held: PlacedBatch | None = None
        self._at = self._read_to = beginning.before

    @property
    def next_position(self) -> Position:
        return self._at

    @property
    def decided_position(self) -> Position:
        return self._read_to

    @property
    def epochs(self) -> tuple[int, ...]:
        return ()

    def poll(self, limit: int) -> RecordBatch | None:
        if self._held is None:
            if self._stopped is not None:
                raise self._stopped
            return None
        batch, rest = self._held.take(slice(limit)), self._held.take(slice(limit, None))
        self._held = rest if len(rest) else None
        over = self._held is None and self._messages is None and self._stopped is None
        self._at = self._read_to if over else batch.positions.last
        return RecordBatch.of(self.topic, batch, None)

    def advance(self, timeout: float) -> bool:
        if self._stopped is not None or self._held is not None:
            return False
        if self._messages is None:
            placed = self._reader.read(timeout=timeout)
            if placed is None:
                return False
            self._read_to = placed.positions.last
            self._messages = placed.take(~present(placed.messages.properties.get(MARKER), len(placed)))
        self._unpack(self._messages)
        return True

    def _unpack(self, messages: PlacedBatch) -> None:
        """Hold the records of some messages, and keep the others."""
        count = rows_within(messages, TOGETHER)
        self._messages = messages.take(slice(count, None)) if count < len(messages) else None
        records, self._stopped = unpacked(messages.take(slice(count)))
        records = records.take(slice(self._beginning.first_of(records), None))
        if len(records):
            self._held, self._beginning = records, Beginning(EARLIEST)
        elif self._stopped is None and self._messages is None:
            self._at = self._read_to

    def close(self) -> None:
        self._reader.close()
