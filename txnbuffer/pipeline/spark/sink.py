"""The sink `txnbuffer`: each micro-batch, or batch job, is one transaction over all its tasks and topics.

It is a number of a named producer: batch b of a streaming query is number b + 1 of `spark-QUERY`, a batch job is the
number that its options name, else the only one of a name that is forgotten afterwards. With the option `topic` the name
has that behind it, `spark-QUERY@TOPIC`: what is committed to one topic is no reason to leave out another. Each attempt
of a task writes a share of that number. The driver commits the number with the shares of the attempts that Spark chose;
what other attempts wrote, before or after, is never visible, and a number that is committed is not committed again.

Spark makes writers, runs tasks and commits in different processes: nothing is kept between them but messages.

Rows of a data frame as records to send: Arrow columns become columns of a batch, their bytes not copied.

topic        string, unless the option `topic` names one for all
key          binary or string; null: the record has no key
value        binary or string; null: the key is deleted
properties   map of strings
event_time   timestamp
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from broker_io.batch import NO_TIME, Batch, Blobs, Labels, PropertyColumn, as_numbers
from broker_io.errors import Error, InvalidMessage
from broker_io.position import Int64s
from txnbuffer.client.branches import Participant, abort_branches, commit_branches
from txnbuffer.client.connection import PendingConnection, connect
from txnbuffer.client.outbox import MAX_PROPERTIES
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, LogRestored, TransactionAborted
from txnbuffer.pipeline.options import WriteOptions
from txnbuffer.protocol import RESERVED

Column: TypeAlias = "pa.Array"

COLUMNS = {
    "topic": ("string",),
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "properties": ("map<string,string>",),
    "event_time": ("timestamp",),
}
"""The columns that there may be, and their types as Spark names them."""


def check_schema(schema: StructType, topic: str | None) -> None:
    """Raises InvalidRequest for a data frame whose rows are no records."""
    for field in schema:
        known = COLUMNS.get(field.name)
        if known is None:
            raise InvalidRequest(
                f"column {field.name} is none of a record, which has {', '.join(COLUMNS)}: select these"
            )
        if not any(field.dataType.simpleString() == kind for kind in known):
            found = field.dataType.simpleString()
            raise InvalidRequest(f"column {field.name} is {found}, not {' or '.join(known)}: cast it")
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest("there is no column value: a record has one, null where its key is deleted")
    if ("topic" in names) == (topic is not None):
        raise InvalidRequest("say where to write by one of the option topic and the column topic")


def batches_of(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, Batch]]:
    """The records by topic, each topic's in their order; fewer at a time where many have properties of their own.

    Raises InvalidMessage.
    """
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    values = _blobs(columns["value"])
    keys = _blobs(columns["key"]) if "key" in columns else Blobs.none(len(values))
    if (keys.absent_mask() & values.absent_mask()).any():
        raise InvalidMessage("a row has neither key nor value: a value that is null deletes a key")
    named = _Named(columns["properties"]) if "properties" in columns else None
    if named is not None and len(named.names) > MAX_PROPERTIES and len(rows) > 1:
        half = len(rows) // 2
        yield from batches_of(rows[:half], topic)
        yield from batches_of(rows[half:], topic)
        return
    properties = {} if named is None else _properties(named)
    times = _times(columns["event_time"]) if "event_time" in columns else None
    records = Batch(keys, values, properties, times)
    if topic is not None:
        yield topic, records
        return
    topics = columns["topic"].dictionary_encode()
    if topics.null_count:
        raise InvalidMessage("column topic of a row is null: say where to write it")
    codes = topics.indices.to_numpy()
    names = topics.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], records
        return
    for code, name in enumerate(names):
        yield name, records.take(np.flatnonzero(codes == code))


def _blobs(column: Column) -> Blobs:
    if column.type not in (pa.binary(), pa.string()):
        column = column.cast(pa.binary())
    absent = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    _, offsets, data = column.buffers()
    found = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return Blobs(memoryview(data).cast("B") if data is not None else b"", found, absent)


def _times(column: Column) -> Int64s | None:
    """Milliseconds since 1970; a row without a time has none."""
    times: Int64s = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(NO_TIME).to_numpy() // 1000
    if len(times) and times.min() < 0:
        raise InvalidMessage("column event_time of a row is before 1970, which no record can have")
    return times


class _Named:
    """The entries of a column of properties: which row each is of, its name by number, and its text."""

    def __init__(self, column: Column) -> None:
        self.count = len(column)
        offsets = column.offsets.to_numpy()
        self.rows: Int64s = np.repeat(np.arange(self.count), np.diff(offsets))
        wanted = slice(int(offsets[0]), int(offsets[-1])) if self.count else slice(0, 0)
        names = column.keys[wanted].dictionary_encode()
        self.texts: Column = column.items[wanted]
        self.codes: Int64s = names.indices.to_numpy()
        self.names: list[str] = names.dictionary.to_pylist()


def _properties(named: _Named) -> dict[str, PropertyColumn]:
    if len(named.names) > MAX_PROPERTIES:
        raise InvalidMessage(f"a row has {len(named.names)} different properties: {MAX_PROPERTIES} may be")
    for name in named.names:
        if name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r} is under {RESERVED!r}, which is the log's own: use another name")
    columns = {}
    for code, name in enumerate(named.names):
        which = np.flatnonzero(named.codes == code)
        columns[name] = _property(named.count, named.rows[which], named.texts.take(pa.array(which)))
    return columns


def _property(count: int, rows: Int64s, texts: Column) -> PropertyColumn:
    """One property: the texts of these rows; a null means no property."""
    encoded = texts.dictionary_encode()
    codes = np.full(count, -1, np.int32)
    codes[rows] = encoded.indices.fill_null(-1).to_numpy()
    labels = Labels(codes, tuple(encoded.dictionary.to_pylist()))
    many = len(labels.values) * 2 > len(rows)
    return (as_numbers(labels) if many else None) or labels


QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties that Spark gives the tasks of a micro-batch."""


class TaskResult(WriterCommitMessage):
    """What one attempt of a task wrote for number `number` of `name`; `share` is None if that is nothing.

    `committed`: nothing was written, because the number is committed.
    """

    def __init__(self, name: str, number: int, share: Branch | None, *, committed: bool = False) -> None:
        self.name = name
        self.number = number
        self.share = share
        self.committed = committed


class BatchWriter(DataSourceArrowWriter):
    """Writes a data frame. Raises InvalidRequest for one that can't be written."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options
        self._forgotten = options.naming is None
        self._naming = options.naming or (f"spark-job-{uuid.uuid4().hex}", 1)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return write_share(self._options, *self._naming, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        commit_messages(self._options, messages)
        self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        abort_messages(self._options, messages)
        self._forget()

    def _forget(self) -> None:
        """No other job has this name: it is over, also for attempts of its tasks that are late.

        What is stored is committed, so a service that does not answer harms nobody.
        """
        if self._forgotten:
            name, number = self._naming
            with contextlib.suppress(Error), opening(self._options) as client:
                client.delete_name(self._options.producer(name), over=number)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches of a streaming query. Raises InvalidRequest for what can't be written."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise InvalidRequest("the task knows no streaming query that it is of: this Spark does not say which")
        return write_share(self._options, f"spark-{query}", int(batch) + 1, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # named by Spark
        commit_messages(self._options, messages, each=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # named by Spark
        abort_messages(self._options, messages)


def write_share(options: WriteOptions, name: str, number: int, rows: Iterator[pa.RecordBatch]) -> TaskResult:
    """What a task does: send its rows, and wait until they are durable."""
    name = options.producer(name)
    filled = (batch for batch in rows if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return TaskResult(name, number, None)
    with opening(options) as client:
        share = Participant(client.client, name, number, options.timeout)
        try:
            client.call(share.begin)
        except AlreadyCommitted as done:
            _check_again(done)
            for _ in filled:  # a task reads all that it is given
                pass
            return TaskResult(name, number, None, committed=True)
        try:
            for batch in chain((first,), filled):
                for topic, records in batches_of(batch, options.topic):
                    client.call(share.send_batch, topic, records)
            return TaskResult(name, number, client.call(share.finish))
        except TransactionAborted as error:
            raise _advised(options, error) from error
        except BaseException:
            with contextlib.suppress(Error):
                client.call(share.abort)
            raise


def commit_messages(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], *, each: bool = False
) -> None:
    """What the driver does when all tasks are done: commit what they wrote, unless that was done before.

    `each`: of a name that has any number, each is committed, also where nothing was written; so one that is missing
    tells that the log lacks it. Raises LogRestored then.
    """
    written = [message for message in messages if isinstance(message, TaskResult)]
    shares = [message.share for message in written if message.share is not None]
    if not (each and written) and not shares and not any(message.committed for message in written):
        return
    name, number = written[0].name, written[0].number
    with opening(options) as client:
        if each:
            _check_follows(name, number, client.committed_number(name))
        try:
            if not any(message.committed for message in written):
                client.call(commit_branches, client.client, name, number, shares)
            elif client.committed_number(name) < number:
                raise InvalidRequest(
                    f"the producer {name!r} was deleted while its number {number} was written: try again"
                )
        except AlreadyCommitted as done:
            _check_again(done)
        except TransactionAborted as error:
            raise _advised(options, error) from error


def abort_messages(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """What the driver does when tasks failed. Shares that it can't abort end when their time is up."""
    shares = [message.share for message in messages if isinstance(message, TaskResult) and message.share is not None]
    if shares:
        with contextlib.suppress(Error), opening(options) as client:
            client.call(abort_branches, client.client, shares)


def opening(options: WriteOptions) -> PendingConnection:
    """A client of what the options name."""
    return connect(
        options.broker,
        tls_ca=options.tls_ca,
        service=options.service,
        broker_options=options.cluster,
        batching=options.batching,
    )


def _check(options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest("what stands in a topic can't be overwritten: write with mode append")
    check_schema(schema, options.topic)


def _check_follows(name: str, number: int, last: int) -> None:
    if 0 < last < number - 1:
        raise LogRestored(
            f"the log has batches of {name!r} up to number {last}, and this one is number {number}: an older copy of "
            f"it was put back, and the batches between are gone; write them by a query with another checkpoint, or go "
            f"on without them after client.delete_name({name!r})"
        )


def _check_again(done: AlreadyCommitted) -> None:
    """See that a committed number is the last one, the only one that is ever written again. Raises InvalidRequest."""
    if done.number < done.last:
        raise InvalidRequest(
            f"number {done.number} of {done.name!r} is below {done.last}, the last one committed, so nobody can tell "
            f"whether it was ever written, and nothing of it was written now: numbers of a name grow, and an older or "
            f"new checkpoint needs a name of its own"
        ) from None


def _advised(options: WriteOptions, error: TransactionAborted) -> TransactionAborted:
    advice = (
        f"a batch has transaction_timeout = {options.timeout:g} s from its first task to its commit, give it more "
        f"(the service's transactions.max_timeout at most) or less to do, if that is why"
    )
    return TransactionAborted(error.txn, f"{error.reason}; {advice}")
