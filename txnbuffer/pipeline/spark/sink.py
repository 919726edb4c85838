"""The sink `txnbuffer`: each micro-batch, or batch job, is one transaction over all its tasks and topics.

It is a number of a named producer: batch b of a streaming query is number b + 1 of `spark-QUERY`, a batch job is the
number that its options name, else the only one of a name that is forgotten afterwards. With the option `topic` the name
has that behind it, `spark-QUERY@TOPIC`: what is committed to one topic is no reason to leave out another. Each attempt
of a task writes a share of that number. The driver commits the number with the shares of the attempts that Spark chose;
what other attempts wrote, before or after, is never visible, and a number that is committed is not committed again.

Spark makes writers, runs tasks and commits in different processes: nothing is kept between them but messages.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from broker_io.errors import Error
from txnbuffer.client.connecting import Opening, connect
from txnbuffer.client.shares import Share, abort_shares, commit_shares
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, LogRestored, TransactionAborted
from txnbuffer.pipeline.spark.records import batches_of, check_schema
from txnbuffer.pipeline.write_options import WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties that Spark gives the tasks of a micro-batch."""


class Written(WriterCommitMessage):
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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write_share(self._options, *self._naming, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        commit_messages(self._options, messages)
        self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        abort_messages(self._options, messages)
        self._forget()

    def _forget(self) -> None:
        """No other job has this name: it is over, also for attempts of its tasks that are late.

        What stands is committed, so a service that does not answer harms nobody.
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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
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


def write_share(options: WriteOptions, name: str, number: int, rows: Iterator[pa.RecordBatch]) -> Written:
    """What a task does: send its rows, and wait until they are durable."""
    name = options.producer(name)
    filled = (batch for batch in rows if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return Written(name, number, None)
    with opening(options) as client:
        share = Share(client.client, name, number, options.timeout)
        try:
            client.call(share.begin)
        except AlreadyCommitted as done:
            _check_again(done)
            for _ in filled:  # a task reads all that it is given
                pass
            return Written(name, number, None, committed=True)
        try:
            for batch in chain((first,), filled):
                for topic, records in batches_of(batch, options.topic):
                    client.call(share.send_batch, topic, records)
            return Written(name, number, client.call(share.finish))
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
    written = [message for message in messages if isinstance(message, Written)]
    shares = [message.share for message in written if message.share is not None]
    if not (each and written) and not shares and not any(message.committed for message in written):
        return
    name, number = written[0].name, written[0].number
    with opening(options) as client:
        if each:
            _check_follows(name, number, client.committed_number(name))
        try:
            if not any(message.committed for message in written):
                client.call(commit_shares, client.client, name, number, shares)
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
    shares = [message.share for message in messages if isinstance(message, Written) and message.share is not None]
    if shares:
        with contextlib.suppress(Error), opening(options) as client:
            client.call(abort_shares, client.client, shares)


def opening(options: WriteOptions) -> Opening:
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
