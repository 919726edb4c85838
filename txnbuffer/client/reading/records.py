"""Visible records as a reader returns them: columns, or single records"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from broker_io.batch import Batch, PlacedBatch, PropertyColumn, Which
from broker_io.port import SCHEMA_VERSION
from broker_io.position import Int64s, Positions
from txnbuffer.client.serializers import Deserializer, TopicValues, optional
from txnbuffer.errors import UndecodableValue
from txnbuffer.model import Position, TxnId
from txnbuffer.protocol import RESERVED, TXN

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


Decode: TypeAlias = Mapping[Literal["key", "value"], Literal["text", "json", "deserializer"]]
"""How a table has keys and values: as text, as what JSON or the deserializer makes of them; else as bytes."""


class Record(NamedTuple):
    """One visible record.

    `value` is bytes, or what the deserializer of the topic made of them; None if the record deletes its key. `seqno`
    numbers the visible records of the topic from 1; None as in RecordBatch. Times are milliseconds since 1970;
    `event_time` is 0 if the sender gave none. `txn` is None if the record was sent outside of a transaction.
    """

    topic: str
    position: Position
    seqno: int | None
    key: bytes | None
    value: Any
    properties: Mapping[str, str]
    event_time: int
    publish_time: int
    txn: TxnId | None


class UnreadRecords:
    """The records of a batch that a reader has not returned yet, one after the other."""

    def __init__(self, batch: RecordBatch) -> None:
        self.topic = batch.topic
        self._batch = batch
        self._records = iter(batch)
        self._taken = 0

    def __len__(self) -> int:
        return len(self._batch) - self._taken

    def next(self) -> Record:
        """Return the next record. Raises UndecodableValue, after which the record after it is the next one."""
        self._taken += 1
        try:
            return next(self._records)
        except UndecodableValue:
            self._records = iter(self._batch.take(slice(self._taken, None)))
            raise

    def take(self, limit: int) -> RecordBatch:
        """Return the next records, at most `limit`."""
        start, self._taken = self._taken, min(self._taken + limit, len(self._batch))
        taken = self._batch.take(slice(start, self._taken))
        self._records = iter(self._batch.take(slice(self._taken, None)))
        return taken


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RecordBatch:
    """n visible records of one topic in log order, as columns of length n; iterate it for single records.

    - `positions`: where the records are in the log of the topic.
    - `seqnos`: int64[n], the numbers of the topic's visible records, from 1. None if they are not known: if the reader
      is not read_committed, and while the topic is not registered, unless its log shows that nothing was trimmed.
    - `publish_times`: int64[n], milliseconds since 1970.
    - `messages`: keys, values as stored, properties and event times.
    - `txns`: transaction ids as text `most:least`; None if the batch has no transactional records.
    - `schema_versions`: those with which the values were written, if they are registered; None if none has any.
    - `deserializer`: decodes the values of single records; None: they are bytes.
    """

    topic: str
    positions: Positions
    seqnos: Int64s | None
    publish_times: Int64s
    messages: Batch
    txns: PropertyColumn | None
    deserializer: Deserializer | None = None
    schema_versions: PropertyColumn | None = None

    @classmethod
    def of(
        cls, topic: str, placed: PlacedBatch, seqnos: Int64s | None, deserializer: Deserializer | None = None
    ) -> RecordBatch:
        messages = placed.messages
        properties = {name: column for name, column in messages.properties.items() if not name.startswith(RESERVED)}
        return cls(
            topic,
            placed.positions,
            seqnos,
            placed.publish_times,
            Batch(messages.keys, messages.values, properties, messages.event_times),
            messages.properties.get(TXN),
            deserializer,
            messages.properties.get(SCHEMA_VERSION),
        )

    def take(self, which: Which) -> RecordBatch:
        """Return the records that a mask, an index array or a slice selects."""
        return RecordBatch(
            self.topic,
            self.positions.take(which),
            None if self.seqnos is None else self.seqnos[which],
            self.publish_times[which],
            self.messages.take(which),
            None if self.txns is None else self.txns.take(which),
            self.deserializer,
            None if self.schema_versions is None else self.schema_versions.take(which),
        )

    def prepare(self) -> None:
        """Internal: request what the deserializer needs. Raises as `SchemaRegistry.of`."""
        if isinstance(self.deserializer, TopicValues):
            self.deserializer.prepare({*self._versions()})

    def _versions(self) -> list[int | None]:
        texts = [None] * len(self) if self.schema_versions is None else self.schema_versions.to_list()
        return [None if text is None else int(text) for text in texts]

    def as_stored(self) -> RecordBatch:
        """Return the same records, whose values are bytes."""
        return replace(self, deserializer=None)

    def to_arrow(self) -> pa.RecordBatch:
        """Return the records as an Arrow record batch.

        Its columns are topic, position, seqno, key, value, properties, event_time, publish_time and txn; values are as
        stored. Positions, seqnos, keys, values and times are not copied. Raises MissingDependency without pyarrow.
        """
        optional("pyarrow", "arrow")
        from txnbuffer.client.reading.arrow import arrow_batch

        return arrow_batch(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as a data frame with the columns of `to_arrow`.

        The position is three columns: position.ledger, position.entry and position.batch. Properties are dictionaries.
        Numbers are not copied. Raises MissingDependency without pandas or pyarrow.
        """
        optional("pandas", "pandas")
        optional("pyarrow", "pandas")
        from txnbuffer.client.reading.arrow import pandas_frame

        return pandas_frame(self)

    def to_polars(self) -> pl.DataFrame:
        """Return the records as a polars data frame with the columns of `to_arrow`.

        Properties are lists of structs of key and value. Numbers are not copied. Raises MissingDependency without
        polars or pyarrow.
        """
        polars = optional("polars", "polars")
        optional("pyarrow", "polars")
        from txnbuffer.client.reading.arrow import polars_frame

        return polars_frame(polars, self)

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        if not len(self):
            return f"<RecordBatch of {self.topic!r}: 0 records>"
        seqnos = "" if self.seqnos is None else f", seqnos {self.seqnos[0]} to {self.seqnos[-1]}"
        count = f"{len(self)} record{'s' if len(self) > 1 else ''}"
        return f"<RecordBatch of {self.topic!r}: {count} from {self.positions.first} to {self.positions.last}{seqnos}>"

    def __iter__(self) -> Iterator[Record]:
        """Yield the records. Raises UndecodableValue if the deserializer refuses a value."""
        seqnos = [None] * len(self) if self.seqnos is None else self.seqnos.tolist()
        txns = [None] * len(self) if self.txns is None else self.txns.to_list()
        rows = zip(self.positions, seqnos, self.messages, self.publish_times.tolist(), txns, strict=True)
        decode = self.deserializer is not None
        versions = self._versions() if isinstance(self.deserializer, TopicValues) else [None] * len(self)
        for (position, seqno, message, publish_time, txn), version in zip(rows, versions, strict=True):
            key, value, properties, event_time = message
            yield Record(
                self.topic,
                position,
                seqno,
                key,
                self._decoded(position, value, version) if decode and value is not None else value,
                properties,
                event_time,
                publish_time,
                None if txn is None else TxnId.parse(txn),
            )

    def _decoded(self, position: Position, value: bytes, version: int | None) -> Any:
        """The value of the record at a position. Raises UndecodableValue."""
        if self.deserializer is None:
            return value
        try:
            if isinstance(self.deserializer, TopicValues):
                return self.deserializer.loads(value, version)
            return self.deserializer.loads(value)
        except Exception as error:  # deserializers raise exceptions of any class
            raise UndecodableValue(self.topic, position, str(error) or type(error).__name__) from error
