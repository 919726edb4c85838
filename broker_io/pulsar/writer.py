"""Writing to a topic of a cluster.

The client library resends by itself while a broker is away, in order; so appends have no time-out, and wait while
too many are under way. The first that fails ends the writer: what was sent behind it may stand in the log without it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import pulsar

from broker_io.batch import Batch
from broker_io.checking import check_batch
from broker_io.errors import AppendUnknown, Closed, Error, TopicNotFound
from broker_io.position import Position, Positions
from broker_io.pulsar.acks import settle
from broker_io.pulsar.cluster import Cluster, Handle
from broker_io.pulsar.failures import of_append
from broker_io.pulsar.flushing import flusher
from broker_io.pulsar.mapping import encode_messages

PENDING_MESSAGES = 4000
BATCH_MESSAGES = 1000
BATCH_DELAY_MS = 1

_OK = pulsar.Result.Ok


class PulsarWriter(Handle):
    """Any thread may append. Done for good once it is fenced, an append failed, or its topic is gone."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        incarnation: str,
        *,
        mode: pulsar.ProducerAccessMode,
        batching: bool,
        max_message_bytes: int,
    ) -> None:
        self.topic = topic
        self.exclusive = mode != pulsar.ProducerAccessMode.Shared
        self._cluster = cluster
        self._incarnation = incarnation
        self._limit = max_message_bytes
        self._batching = batching
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._dead: Error | None = None
        self._failed: Error | None = None
        self._ledger = -1
        self._sent = 0
        self.acknowledged = 0
        self._producer: Any = cluster.client.create_producer(
            cluster.url(topic),
            send_timeout_millis=0,
            block_if_queue_full=True,
            max_pending_messages=PENDING_MESSAGES,
            batching_enabled=batching,
            batching_max_messages=BATCH_MESSAGES,
            batching_max_publish_delay_ms=BATCH_DELAY_MS,
            # Compaction never drops deletes that are neither compressed nor batched.
            compression_type=pulsar.CompressionType.NONE if batching else pulsar.CompressionType.LZ4,
            access_mode=mode,
        )._producer  # of the library's own kind: its wrapper costs half as much again per message
        cluster.acks.start()

    def append(self, batch: Batch) -> Future[Positions]:
        check_batch(batch, self._limit)
        messages = encode_messages(batch, self._limit, batching=self._batching)
        future: Future[Positions] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
            elif not messages:
                future.set_result(Positions.of([]))
            else:
                self._send(messages, future)
        return future

    def _send(self, messages: list[Any], future: Future[Positions]) -> None:
        append = _Append(self, future, len(messages))
        alone = self._sent == self.acknowledged
        self._sent += len(messages)
        send = self._producer.send_async
        for message in messages:
            send(message, append)
        if self._batching and alone:
            flusher.flush(self._producer)  # nothing else is under way that a batch could wait for

    def close(self) -> None:
        patience = self._cluster.patiently.seconds
        taken = self._lock.acquire(timeout=patience)  # a sender may wait for room
        alive = self._dead is None
        self._dead = self._dead or Closed(f"this writer of topic {self.topic!r} is closed: open another one")
        if taken:
            self._lock.release()
        if alive:  # closing alone would drop what is under way
            flusher.within(self._producer.flush, patience)
        self._close_producer()

    def end(self, error: Error) -> None:
        self._fail(error)
        self._close_producer()

    def _close_producer(self) -> None:
        """Wait until nothing of this writer is under way any more, and its futures are resolved."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            flusher.within(self._producer.close, self._cluster.patiently.seconds)
        self._cluster.acks.wait(self._cluster.patiently.seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, error: Error) -> None:
        """Called from any thread, and takes no lock: the client library's must never wait."""
        self._failed = self._failed or error
        self._dead = self._dead or error

    def failed(self, append: _Append, result: Any) -> None:
        """An append got no acknowledgement; in the client library's thread."""
        closed = self._dead if result == pulsar.Result.AlreadyClosed and isinstance(self._dead, Closed) else None
        if closed is not None:
            self._fail(
                AppendUnknown(
                    f"the writer of topic {self.topic!r} was closed before an append was acknowledged: it may "
                    "stand in the log or not; read it to know"
                )
            )
        else:
            self._fail(of_append(str(result).rpartition(".")[2], self.topic))
        self._cluster.acks.put(append.give_up)

    def settled(self, append: _Append) -> None:
        """All messages of an append are acknowledged; in the client library's thread."""
        self.acknowledged += append.count
        self._cluster.acks.put(append.finish)

    def outcome(self, ids: list[Any]) -> Positions | Exception:
        """The positions of an append, or why it doesn't count; in the thread that resolves futures."""
        if self._failed is not None:
            return self._failed
        places = [Position(found.ledger_id(), found.entry_id(), found.batch_index()) for found in ids]
        if places[0].ledger < 0:
            self._fail(
                AppendUnknown(
                    f"the cluster dropped a message of topic {self.topic!r} as a duplicate: open another writer"
                )
            )
        elif places[0].ledger != self._ledger or places[-1].ledger != self._ledger:
            self._check_topic(places[-1].ledger)
        return self._failed or Positions.of(places)

    def _check_topic(self, ledger: int) -> None:
        """The library goes on by itself where a topic was deleted and made anew: a new ledger may be another topic."""
        if self._ledger >= 0:
            try:
                same = self._cluster.incarnation(self.topic) == self._incarnation
            except TopicNotFound:
                same = False
            except Error as error:
                self._fail(
                    AppendUnknown(
                        f"whether topic {self.topic!r} is still the same can't be told ({error}): open another writer"
                    )
                )
                return
            if not same:
                self._fail(TopicNotFound(f"topic {self.topic!r} was deleted: open a writer of the new one"))
                return
        self._ledger = ledger

    def given_up(self) -> Error:
        """Why an append failed; nothing behind it gets through any more."""
        flusher.within(self._producer.close, 0.0)
        return self._failed or AppendUnknown(f"an append to topic {self.topic!r} failed: read the log to know")


class _Append:
    """Called by the client library once for each message, in order."""

    __slots__ = ("_future", "_ids", "_over", "_writer", "count")

    def __init__(self, writer: PulsarWriter, future: Future[Positions], count: int) -> None:
        self.count = count
        self._writer = writer
        self._future = future
        self._ids: list[Any] = []
        self._over = False

    def __call__(self, result: Any, message_id: Any) -> None:
        if result == _OK:
            self._ids.append(message_id)
            if len(self._ids) == self.count:
                self._writer.settled(self)
        elif not self._over:
            self._over = True
            self._writer.failed(self, result)

    def finish(self) -> None:
        settle(self._future, self._writer.outcome(self._ids))

    def give_up(self) -> None:
        settle(self._future, self._writer.given_up())
