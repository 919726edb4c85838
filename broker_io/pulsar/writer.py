"""Writers to a cluster's topics, and the number of messages they put into one entry.

The client library resends by itself while a broker is away, in order. So appends have no timeout, and block while too
many are pending. The first failure ends the writer: later messages may be in the log without the failed one.

The library sends a batch when it is full, and by a timer. It reads the configuration of a producer for each message,
so the limits can be set for each append: its last message makes the batch full. The append is sent at once then, as one
entry that holds all of it and nothing else, and only the last message is acknowledged: its place in the entry proves
that all the others are there. Each acknowledgement takes Python's global lock several times.

With many appends pending, or a large one, the library batches messages as they come. It then counts payloads only, and
fails the whole batch if keys and properties make it too large for an entry; so the larger those are, the fewer messages
may share an entry.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import _pulsar
import pulsar

from broker_io import waits
from broker_io.batch import Batch
from broker_io.errors import AppendUnknown, Closed, Error, TopicNotFound
from broker_io.port import check_batch, settle
from broker_io.position import Position, Positions
from broker_io.pulsar import threads
from broker_io.pulsar.answers import append_error, entry_too_large, message_too_large
from broker_io.pulsar.cluster import Cluster, Handle
from broker_io.pulsar.messages import encode_messages
from broker_io.pulsar.threads import flusher

PENDING_MESSAGES = 4000
BATCH_MESSAGES = 1000
BATCH_BYTES = 128 * 1024
BATCH_DELAY_MS = 1
ENTRIES = 4
"""Pending appends up to which each is an entry of its own; with more, appends share entries."""

ALONE = (2, 0, BATCH_DELAY_MS)
"""Limits with which each message fills a batch. The library accepts no number below 2."""
MESSAGE_ROOM, PROPERTY_ROOM = 64, 16
"""Overhead in bytes of a message and of a property in an entry, at most."""
OURS = ("txnbuffer", "1")
"""Property of producers by which the broker plug-in knows those of this library."""
ENTRY_BYTES = 8 * 1024 * 1024
NEVER_MS = 60_000
"""A batch is full long before; if the process is suspended for so long in the middle of one, the batch is split."""


class Batching:
    """Batch limits of a producer, which has to be created with `configuration`. Callers hold the writer's lock.

    `limit` is the maximum size of a message, `entry_bytes` that of messages that share an entry. `schema` is declared
    to the cluster; None: bytes.
    """

    def __init__(
        self, mode: pulsar.ProducerAccessMode, limit: int, *, enabled: bool, schema: pulsar.schema.Schema | None = None
    ) -> None:
        self.enabled = enabled
        self._room = limit // 2  # payloads, and keys in base64, need some as well
        self.entry_bytes = min(BATCH_BYTES, self._room)
        self._unseen = RecentMaximum()
        self.configuration = made = _pulsar.ProducerConfiguration()
        made.schema((schema or pulsar.schema.BytesSchema()).schema_info())
        made.access_mode(mode)
        made.property(*OURS)
        made.send_timeout_millis(0)
        made.block_if_queue_full(True)
        made.max_pending_messages(PENDING_MESSAGES)
        made.batching_enabled(enabled)
        # Compaction never drops deletes that are neither compressed nor batched.
        made.compression_type(pulsar.CompressionType.NONE if enabled else pulsar.CompressionType.LZ4)
        self._limits = (0, 0, 0)
        self._limit((BATCH_MESSAGES, self.entry_bytes, BATCH_DELAY_MS))

    def as_they_come(self, unseen: int, begun: int, done: int) -> None:
        """Let the next messages share entries; each is acknowledged.

        `unseen` is the largest part of a message that the library does not count. `begun` and `done` are the numbers
        of earlier appends of this kind and of those acknowledged; the pending ones count too.
        """
        fitting = min(BATCH_MESSAGES, self._room // max(self._unseen.peak(unseen, begun, done), 1))
        self._limit((fitting, self.entry_bytes, BATCH_DELAY_MS) if fitting > 1 else ALONE)

    def one_entry(self, messages: int) -> None:
        """Make the next `messages` messages one entry; no message may wait for the library's timer."""
        # The number can't limit a batch to one message, but a limit of 0 bytes can.
        self._limit((BATCH_MESSAGES, 0, NEVER_MS) if messages == 1 else (messages, ENTRY_BYTES, NEVER_MS))

    def _limit(self, limits: tuple[int, int, int]) -> None:
        if limits != self._limits:
            self._limits = limits
            messages, size, delay = limits
            self.configuration.batching_max_messages(messages)
            self.configuration.batching_max_allowed_size_in_bytes(size)
            self.configuration.batching_max_publish_delay_ms(delay)


class RecentMaximum:
    """The maximum of a sequence of numbers over those that are pending, and some earlier ones."""

    def __init__(self) -> None:
        self._older = self._newer = self._split = 0

    def peak(self, number: int, begun: int, done: int) -> int:
        """The maximum with `number` as the next one, after `begun` numbers of which `done` are done."""
        if done >= self._split:
            self._older, self._newer, self._split = self._newer, 0, begun
        self._newer = max(self._newer, number)
        return max(self._older, self._newer)


def measure(batch: Batch, about: int) -> tuple[int, int]:
    """Bytes of a batch that is not empty, and the largest part of a message that the library does not count.

    `about` is the result of `check_batch`, which counts shared labels once.
    """
    room = MESSAGE_ROOM + PROPERTY_ROOM * len(batch.properties)
    payloads = batch.values.lengths()
    if len(batch) == 1:
        return about, about - int(payloads[0]) + room
    sizes = batch.sizes()
    return int(sizes.sum()), int((sizes - payloads).max()) + room


def places_in_entry(last: Position, messages: int) -> Positions | None:
    """The positions of an append that is one entry, from that of its last message; None if it was split."""
    if last.batch != messages - 1:
        return None
    return Positions.entry(last.ledger, last.entry, messages)


_OK = pulsar.Result.Ok


class PulsarWriter(Handle):
    """Any thread may append. The writer ends when it is fenced, an append fails, or its topic is gone."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        incarnation: str,
        *,
        mode: pulsar.ProducerAccessMode,
        batching: bool,
        max_message_bytes: int,
        schema: pulsar.schema.Schema | None = None,
    ) -> None:
        self.topic = topic
        self.exclusive = mode != pulsar.ProducerAccessMode.Shared
        self._cluster = cluster
        self._incarnation = incarnation
        self._limit = max_message_bytes
        self._batching = Batching(mode, max_message_bytes, enabled=batching, schema=schema)
        self._threads = cluster.environment.threads
        self._lock, self._closing = self._threads.lock(), self._threads.lock()
        self._closed = False
        self._dead: Error | None = None
        self._failed: Error | None = None
        self._ledger = -1
        self._sent, self._loose = _Count(), _Count()
        # Without its Python wrapper, which copies the configuration and adds half of the cost per message.
        self._producer: Any = cluster.client._client.create_producer(cluster.url(topic), self._batching.configuration)
        cluster.acks.start()
        self._wait = waits.begin(f"the cluster to acknowledge appends to topic {topic!r}")
        self._wait.pause()

    def append(self, batch: Batch) -> Future[Positions]:
        about = check_batch(batch, self._limit)
        messages = encode_messages(batch, self._limit, batching=self._batching.enabled)
        future: Future[Positions] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
            elif not messages:
                future.set_result(Positions.of([]))
            else:
                self._send(messages, *measure(batch, about), future)
        return future

    def _send(self, messages: list[Any], size: int, unseen: int, future: Future[Positions]) -> None:
        append = _Append(self, future, len(messages), size, whole=self._fits_one_entry(len(messages), size))
        self._sent.begun += 1
        if self._wait.paused:
            self._wait.resume()
        send = self._producer.send_async
        if append.whole:
            self._batching.one_entry(len(messages))
            for message in messages[:-1]:
                send(message, None)
            send(messages[-1], append)
        else:
            if self._batching.enabled:
                self._batching.as_they_come(unseen, self._loose.begun, self._loose.done)
            self._loose.begun += 1
            for message in messages:
                send(message, append)
        if self._dead is not None:  # the failure that ended it may have missed this append
            self._give_up()

    def _fits_one_entry(self, messages: int, size: int) -> bool:
        """Whether an append can be an entry of its own, which requires that no message waits for the timer."""
        if not self._batching.enabled or messages > BATCH_MESSAGES or size > self._batching.entry_bytes:
            return False
        return self._sent.under_way < ENTRIES and not self._loose.under_way

    def close(self) -> None:
        close_timeout = self._cluster.close_timeout
        taken = self._lock.acquire(timeout=close_timeout)  # a sender may wait for room
        alive = self._dead is None
        self._dead = self._dead or Closed(f"this writer of topic {self.topic!r} is closed: open another one")
        if taken:
            self._lock.release()
        if alive and close_timeout:  # closing alone would drop pending appends
            flusher.run(self._producer.flush, close_timeout)
        self._close_producer()

    def detach(self, why: Error) -> None:
        self._dead, self._closed = why, True
        waits.end(self._wait)
        self._lock, self._closing = self._threads.lock(), self._threads.lock()  # another thread may have held them
        threads.keep(self._producer)

    def end(self, error: Error) -> None:
        self._fail(error)
        self._close_producer()

    def _close_producer(self) -> None:
        """Wait until no append of this writer is pending and its futures are resolved."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            waits.end(self._wait)
            flusher.run(self._producer.close, self._cluster.retry.seconds)
        self._cluster.acks.wait(self._cluster.retry.seconds)

    def _fail(self, error: Error) -> None:
        """Called from any thread. It takes no lock, because the client library's thread must never wait."""
        waits.end(self._wait)
        self._failed = self._failed or error
        self._dead = self._dead or error

    def failed(self, append: _Append, result: Any) -> None:
        """Handle a failed append, in the client library's thread."""
        if result == pulsar.Result.MessageTooBig:
            if append.count == 1:  # of several messages some may be in other entries
                append.refused = message_too_large(self.topic)
                if append.size > self._batching.entry_bytes:  # otherwise it may have shared an entry with others
                    self._cluster.max_message_bytes = min(self._cluster.max_message_bytes, append.size - 1)
            self._fail(entry_too_large(self.topic))
        elif result == pulsar.Result.AlreadyClosed and isinstance(self._dead, Closed):
            self._fail(
                AppendUnknown(
                    f"the writer of topic {self.topic!r} was closed before an append was acknowledged: the append may "
                    "or may not be in the log; read the log to find out"
                )
            )
        else:
            self._fail(append_error(str(result).rpartition(".")[2], self.topic))
        self._cluster.acks.put(append.give_up)

    def settled(self, append: _Append) -> None:
        """Handle the acknowledgement of a whole append, in the client library's thread."""
        self._sent.done += 1
        if self._sent.under_way:
            self._wait.resume()
        else:
            self._wait.pause()
        if not append.whole:
            self._loose.done += 1
        self._cluster.acks.put(append.finish)

    def outcome(self, ids: list[Any], entry: int = 0) -> Positions | Exception:
        """The positions of an append, or its error; in the thread that resolves futures.

        If `entry` is not 0, the append is one entry of so many messages, and `ids` has only the last.
        """
        if self._failed is not None:
            return self._failed
        places = [Position(found.ledger_id(), found.entry_id(), found.batch_index()) for found in ids]
        first, last = places[0].ledger, places[-1].ledger
        whole: Positions | None = None
        if entry and first >= 0:
            whole = places_in_entry(places[0], entry)
            if whole is None:
                self._fail(
                    AppendUnknown(
                        f"an append to topic {self.topic!r} was split, and only its end is known to be in the log: "
                        "open another writer"
                    )
                )
        if first < 0:
            self._fail(
                AppendUnknown(
                    f"the cluster dropped a message of topic {self.topic!r} as a duplicate: open another writer"
                )
            )
        elif first != self._ledger or last != self._ledger:
            self._check_topic(last)
        return self._failed or (Positions.of(places) if whole is None else whole)

    def _check_topic(self, ledger: int) -> None:
        """Check the incarnation at a new ledger: the library continues silently with a re-created topic."""
        if self._ledger >= 0:
            try:
                same = self._cluster.incarnation(self.topic) == self._incarnation
            except TopicNotFound:
                same = False
            except Error as error:
                self._fail(
                    AppendUnknown(
                        f"topic {self.topic!r} may have been re-created, which can't be checked ({error}): open "
                        "another writer"
                    )
                )
                return
            if not same:
                self._fail(TopicNotFound(f"topic {self.topic!r} was deleted: open a writer of the new one"))
                return
        self._ledger = ledger

    def _give_up(self) -> None:
        """Make the library fail all pending appends, except those that it accepts afterwards."""
        flusher.run(self._producer.close, 0.0)

    def given_up(self) -> Error:
        """The error of a failed append; no later append of this writer succeeds."""
        self._give_up()
        return self._failed or AppendUnknown(
            f"an append to topic {self.topic!r} failed: it may or may not be in the log; open another writer"
        )


class _Count:
    """Counts of begun appends, kept by the sender, and of acknowledged ones, kept by the library's thread."""

    def __init__(self) -> None:
        self.begun = self.done = 0

    @property
    def under_way(self) -> int:
        return self.begun - self.done


class _Append:
    """The callback of an append: called for each message in order, or for the last one only if `whole`."""

    __slots__ = ("_expected", "_future", "_ids", "_over", "_writer", "count", "refused", "size", "whole")

    def __init__(self, writer: PulsarWriter, future: Future[Positions], count: int, size: int, *, whole: bool) -> None:
        self.count = count
        self.size = size
        self.whole = whole
        self.refused: Error | None = None
        self._ids: list[Any] = []
        self._expected = 1 if whole else count
        self._writer = writer
        self._future = future
        self._over = False

    def __call__(self, result: Any, message_id: Any) -> None:
        if result == _OK:
            self._ids.append(message_id)
            if len(self._ids) == self._expected:
                self._writer.settled(self)
        elif not self._over:
            self._over = True
            self._writer.failed(self, result)

    def finish(self) -> None:
        settle(self._future, self._writer.outcome(self._ids, self.count if self.whole else 0))

    def give_up(self) -> None:
        why = self._writer.given_up()
        settle(self._future, self.refused or why)
