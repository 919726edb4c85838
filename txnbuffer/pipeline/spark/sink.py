"""The sink `txnbuffer`: each micro-batch, or batch job, is one transaction over all its tasks and topics.

It is a number of a named producer: batch b of a streaming query is number b + 1 of `spark-QUERY`; a batch job has the
name and number of its options, or a generated name, which is deleted afterwards. The option `topic` is appended to the
name (`spark-QUERY@TOPIC`), as the same batch may be written to several topics. Each attempt of a task writes a branch
of the transaction. The driver commits the number with the branches of the attempts that Spark chose; records of other
attempts are never visible, and a committed number is not committed again.

Spark creates writers, runs tasks and commits in different processes, which exchange only messages.

Rows become records without copying their bytes. The columns of a data frame are

    topic        string, unless the option `topic` is given
    key          binary or string; null: the record has no key
    value        binary or string; null: the key is deleted
    properties   map of strings
    event_time   timestamp
"""

from __future__ import annotations

import contextlib
import inspect
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
from txnbuffer.client.connection import PendingConnection
from txnbuffer.client.path.send_columns import MAX_PROPERTIES
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, LogRestored, TransactionAborted
from txnbuffer.opening import connect
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
"""Allowed columns, and their types as Spark names them."""


def check_schema(schema: StructType, topic: str | None) -> None:
    """Raises InvalidRequest for a data frame whose rows can't be written as records."""
    for field in schema:
        known = COLUMNS.get(field.name)
        if known is None:
            raise InvalidRequest(f"unknown column {field.name}: select {', '.join(COLUMNS)} only")
        if not any(field.dataType.simpleString() == kind for kind in known):
            found = field.dataType.simpleString()
            raise InvalidRequest(f"column {field.name} must be {' or '.join(known)}, got {found}: cast it")
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest("column value is missing: add it, with null to delete a key")
    if ("topic" in names) == (topic is not None):
        raise InvalidRequest("give exactly one of the option topic and the column topic")


def batches_of(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, Batch]]:
    """The records of rows by topic, in order within a topic; rows with many different properties are split.

    Raises InvalidMessage.
    """
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    values = _blobs(columns["value"])
    keys = _blobs(columns["key"]) if "key" in columns else Blobs.none(len(values))
    if (keys.absent_mask() & values.absent_mask()).any():
        raise InvalidMessage("key and value of a row are null: a null value deletes a key, so give the key")
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
        raise InvalidMessage("column topic of a row is null: set it to the topic to write to")
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
    """Milliseconds since 1970; NO_TIME for null."""
    times: Int64s = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(NO_TIME).to_numpy() // 1000
    if len(times) and times.min() < 0:
        raise InvalidMessage("column event_time of a row is before 1970: use a later time, or null")
    return times


class _Named:
    """The entries of a column of properties: the row of each, the index of its name in `names`, and its text."""

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
        raise InvalidMessage(f"a row has {len(named.names)} different properties: use at most {MAX_PROPERTIES}")
    for name in named.names:
        if name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r} has the reserved prefix {RESERVED!r}: use another name")
    columns = {}
    for code, name in enumerate(named.names):
        which = np.flatnonzero(named.codes == code)
        columns[name] = _property(named.count, named.rows[which], named.texts.take(pa.array(which)))
    return columns


def _property(count: int, rows: Int64s, texts: Column) -> PropertyColumn:
    """The column of one property, with `texts` in these rows; null: the row does not have it."""
    encoded = texts.dictionary_encode()
    codes = np.full(count, -1, np.int32)
    codes[rows] = encoded.indices.fill_null(-1).to_numpy()
    labels = Labels(codes, tuple(encoded.dictionary.to_pylist()))
    many = len(labels.values) * 2 > len(rows)
    return (as_numbers(labels) if many else None) or labels


QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of the tasks of a micro-batch, set by Spark."""


class TaskResult(WriterCommitMessage):
    """What one attempt of a task wrote for number `number` of `name`; `branch` is None if it wrote nothing.

    `committed`: nothing was written because the number was already committed.
    """

    def __init__(self, name: str, number: int, branch: Branch | None, *, committed: bool = False) -> None:
        self.name = name
        self.number = number
        self.branch = branch
        self.committed = committed


class BatchWriter(DataSourceArrowWriter):
    """Writes a data frame as one transaction. Raises InvalidRequest for invalid columns or modes."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options
        self._forgotten = options.producer_number is None
        self._producer_number = options.producer_number or (f"spark-job-{uuid.uuid4().hex}", 1)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return write_branch(self._options, *self._producer_number, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        commit_messages(self._options, messages)
        self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        abort_messages(self._options, messages)
        self._forget()

    def _forget(self) -> None:
        """Delete a generated name, which also rejects late attempts of its tasks.

        Errors are ignored: the records are committed already.
        """
        if self._forgotten:
            name, number = self._producer_number
            with contextlib.suppress(Error), client_for(self._options) as client:
                client.delete_name(self._options.producer(name), last_number=number)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches of a streaming query. Raises InvalidRequest for invalid columns or modes."""

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise InvalidRequest(f"Spark has not set {QUERY_ID} and {BATCH_ID} in a task: use a supported release")
        return write_branch(self._options, f"spark-{query}", int(batch) + 1, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # named by Spark
        commit_messages(self._options, messages, each=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # named by Spark
        abort_messages(self._options, messages)


class Stopped(Error):
    """Spark stopped a task, whose query or job was stopped, has failed, or has a faster attempt."""


def _stopped() -> bool:
    """Whether Spark stopped this task before it read all its rows. It blocks until Spark has said which it is.

    The rows of a stopped task end like those of a complete one, because Spark closes the connection that sends them.
    Only after all rows, it sends an end marker for the function that runs the task, `pyspark.worker.main(infile, ...)`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            return not frame.f_locals["infile"].peek(1)
        frame = frame.f_back
    return False


def write_branch(options: WriteOptions, name: str, number: int, rows: Iterator[pa.RecordBatch]) -> TaskResult:
    """Write the rows of a task as a branch of number `number` of `name`, and wait until they are durable."""
    name = options.producer(name)
    filled = (batch for batch in rows if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return TaskResult(name, number, None)
    with client_for(options) as client:
        participant = Participant(client.client, name, number, options.timeout)
        try:
            client.call(participant.begin)
        except AlreadyCommitted as done:
            _check_again(done)
            for _ in filled:  # a task must read all its rows
                pass
            return TaskResult(name, number, None, committed=True)
        try:
            for batch in chain((first,), filled):
                for topic, records in batches_of(batch, options.topic):
                    client.call(participant.send_batch, topic, records)
            if _stopped():
                raise Stopped("Spark stopped the task before it had read all its rows: its transaction is aborted")
            return TaskResult(name, number, client.call(participant.finish))
        except TransactionAborted as error:
            raise _advised(options, error) from error
        except BaseException:
            with contextlib.suppress(Error):
                client.call(participant.abort)
            raise


def commit_messages(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], *, each: bool = False
) -> None:
    """Commit the branches of all tasks, unless their number is committed already; called by the driver.

    With `each`, numbers without records are committed as well, so that a missing one shows that a part of the log is
    lost, which raises LogRestored.
    """
    written = [message for message in messages if isinstance(message, TaskResult)]
    branches = [message.branch for message in written if message.branch is not None]
    if not (each and written) and not branches and not any(message.committed for message in written):
        return
    name, number = written[0].name, written[0].number
    with client_for(options) as client:
        if each:
            _check_follows(name, number, client.committed_number(name))
        try:
            if not any(message.committed for message in written):
                client.call(commit_branches, client.client, name, number, branches)
            elif client.committed_number(name) < number:
                raise InvalidRequest(f"producer {name!r} was deleted while its number {number} was written: try again")
        except AlreadyCommitted as done:
            _check_again(done)
        except TransactionAborted as error:
            raise _advised(options, error) from error


def abort_messages(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Abort the branches of the tasks of a failed job; called by the driver. Branches it can't abort time out."""
    written = [message for message in messages if isinstance(message, TaskResult)]
    branches = [message.branch for message in written if message.branch is not None]
    if branches:
        with contextlib.suppress(Error), client_for(options) as client:
            client.call(abort_branches, client.client, branches)


def client_for(options: WriteOptions) -> PendingConnection:
    """A client for the options."""
    return connect(
        options.broker,
        **asdict(options.access),
        service=options.service,
        broker_options=options.cluster,
        batching=options.batching,
    )


def _check(options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest("topics can't be overwritten: write with mode append")
    check_schema(schema, options.topic)


def _check_follows(name: str, number: int, last: int) -> None:
    if 0 < last < number - 1:
        raise LogRestored(
            f"the log has batches of {name!r} up to number {last}, but this is number {number}: those between were "
            "lost when the log was restored from an older copy, or a promotion forced; write them with a query with "
            f"another checkpoint, or continue without them after client.delete_name({name!r})"
        )


def _check_again(done: AlreadyCommitted) -> None:
    """Raises InvalidRequest unless a committed number is the last one: Spark repeats no earlier one."""
    if done.number < done.last:
        raise InvalidRequest(
            f"number {done.number} of {done.name!r} is below {done.last}, the last one committed, so it was not "
            f"written: use another name for an older or new checkpoint"
        ) from None


def _advised(options: WriteOptions, error: TransactionAborted) -> TransactionAborted:
    advice = (
        f"if the batch took longer than transaction_timeout = {options.timeout:g} s from its first task to its commit, "
        f"raise that (up to the service's transactions.max_timeout) or make batches smaller"
    )
    return TransactionAborted(error.txn, f"{error.reason}; {advice}")
