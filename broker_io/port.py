"""The broker port: topics of messages, written, read, trimmed and compacted.

Four backends implement it and pass one contract suite (`broker_io.testing.contract`). A broker knows nothing of
transactions.

Rules of every backend:

- An append is acknowledged once it is durable, in order. A failed append leaves a prefix of itself in the log;
  the writer learns how long a prefix only by reading the log.
- Opening an exclusive writer fences every older writer of that topic: each later append of theirs fails with
  `Fenced`. While an exclusive writer is open no other writer can append. On a Pulsar cluster a shared writer of another
  process may block meanwhile and continue afterwards, so topics with an owner have no shared writers. With `wait` an
  exclusive writer fences no other: it opens once the current holder has closed or ended.
- Messages are read in position order, each at the position that was acknowledged. Positions grow and are never
  reused; they may have gaps.
- A reader never skips silently: reading from a position whose messages are gone raises `PositionTrimmed`. A position
  above the end is no error: the reader waits for the first message there or later. A reader of an embedded log that has
  passed messages which the log lacks, because an older copy of it was restored or a forced promotion has cut it, raises
  `LogRestored`.
- A reader repairs itself: once it was read for `READ_SECONDS` it has returned what a new reader would return, or has
  raised. So nobody opens another one because it returns nothing. As a new one would, it may return nothing while the
  storage is away or holds messages back: who knows that the next message exists gives up after that time (`existing`).
- Compaction keeps at least the newest message of each key, at its own position, unless that is a delete. A backend
  may keep more, so readers of a compacted topic build a map of their own. Messages without a key are dropped.
- `compact` ignores transactions, so it only accepts topics whose names begin with `__txnbuffer`. `broker_io.compaction`
  is for the others.

Every backend rejects, before it does anything, batches that can't be stored and the compaction of data topics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, PlacedBatch
from broker_io.errors import (
    DiskWatermark,
    Error,
    InvalidMessage,
    InvalidTopicName,
    MessageTooLarge,
    NotSupported,
    ServiceUnavailable,
    TopicNotFound,
)
from broker_io.partitions import Hashing
from broker_io.position import EARLIEST, NO_INDEX, Position, Positions

T = TypeVar("T")

MAX_MESSAGE_BYTES = 5 * 1024 * 1024
"""The default limit of one message: key, value and properties together."""

MAX_PROPERTIES = 1000
"""Distinct property names in one append, at most."""

MAX_TOPIC_NAME = 400


def check_topic_name(name: object) -> str:
    """Return the name, or raise InvalidTopicName."""
    if not isinstance(name, str):
        raise InvalidTopicName(f"topic name {name!r:.80} is not text: give a string")
    if not name:
        raise InvalidTopicName("topic name '' is empty: give at least one character")
    if len(name.encode(errors="replace")) > MAX_TOPIC_NAME:
        raise InvalidTopicName(f"topic name {name[:40]!r}… is longer than {MAX_TOPIC_NAME} bytes of UTF-8")
    if not name.isprintable() or name != name.strip():
        raise InvalidTopicName(f"topic name {name!r} has an unprintable character, or white space at an end")
    return name


def open_or_make(broker: Broker, topic: str, opening: Callable[[], T]) -> T:
    """Return what `opening` opens at a topic, and create the topic if it is missing.

    It tries to open first, because the topic usually exists and a check takes time.
    """
    try:
        return opening()
    except TopicNotFound:
        broker.create_topic(topic)
        return opening()


@dataclass(frozen=True, slots=True)
class Ledger:
    """One ledger of a topic that still exists.

    `entries` counts all messages ever written to it (next entry number), `bytes` its size in storage;
    `closed` says that nothing will be added. A ledger that is not `lasting` is empty and may be replaced by another.
    `original` is the first ledger that the topic ever had, so nothing before it was trimmed; False if that is unknown.
    """

    ledger: int
    entries: int
    bytes: int
    closed: bool
    lasting: bool = True
    original: bool = False


def first_written(ledgers: Sequence[Ledger]) -> int:
    """The first ledger that has messages or may get some: a forced promotion may leave empty ones before it."""
    return next((one.ledger for one in ledgers if one.entries or not one.closed), ledgers[-1].ledger)


def messages_up_to(ledgers: list[Ledger], position: Position | None) -> int:
    """The number of messages in these ledgers up to and including a position."""
    if position is None:
        return 0
    below = sum(ledger.entries for ledger in ledgers if ledger.ledger < position.ledger)
    inside = [ledger.entries for ledger in ledgers if ledger.ledger == position.ledger]
    return below + (min(position.entry + 1, inside[0]) if inside else 0)


def messages_after(ledgers: list[Ledger], position: Position, end: Position | None) -> int:
    """The number of messages after a position up to `end`; at least one if there are any.

    Messages that share an entry, as on a cluster, count as one.
    """
    rest_of_entry = end is not None and position < end and position.batch != NO_INDEX
    return max(messages_up_to(ledgers, end) - messages_up_to(ledgers, position), int(rest_of_entry))


class Resource(Protocol):
    """What is open until `close`, which may be called again, or until the end of a `with` block."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def settle(future: Future[T], outcome: T | Exception) -> None:
    """Resolve the future of an append unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Writer(Resource, Protocol):
    def append(self, batch: Batch) -> Future[Positions]:
        """Append messages in order; the future gives their positions once they are durable.

        `published` of the positions is the publish time if the backend knows it.

        Raises MessageTooLarge before anything of the batch is written. The future fails with Fenced,
        Closed, DiskFull, DiskFailed or DiskWatermark. After DiskFull and DiskFailed the messages may or may not be
        there once the log is opened again.
        """

    def close(self) -> None:
        """Wait for pending appends, then close the writer."""


MAX_TOGETHER_BYTES = 64 * 1024 * 1024
"""Approximate bytes of several appends in one operation, at most; a single append may be larger."""


TogetherAppend: TypeAlias = tuple[Writer, Batch]
"""One of the appends of `AtomicBroker.append_together`."""
TogetherResult: TypeAlias = list[Positions | Error] | Exception
"""What became of them: the outcome of each, or why all of them failed."""


@runtime_checkable
class AtomicBroker(Protocol):
    """A broker that appends to several topics in one operation."""

    def append_together(self, appends: Sequence[TogetherAppend], done: Callable[[TogetherResult], None]) -> None:
        """Append to topics of this broker: after a crash all of it is there, or nothing. On disks it is one sync.

        Calls `done` once, in any thread and maybe before this returns; it must neither block nor raise. Its result has
        for each append its positions, or TopicNotFound for a topic that was deleted. All of them fail together as
        `Writer.append` does: if a writer is fenced or closed nothing was written. They may use the reserve of the
        storage: ask `space_refusal` before. Appends are durable, become visible and are done in the order of the calls
        of this and of `Writer.append`; those to the same topic in their own order.

        Raises MessageTooLarge, also for more than MAX_TOGETHER_BYTES in several appends, and InvalidMessage, before
        anything is written.
        """

    def space_refusal(self) -> DiskWatermark | None:
        """The error for which `Writer.append` is refused now; None: there is space. It is cheap."""


class Reader(Resource, Protocol):
    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        """The next messages, at least one and at most about `limit`; None if none came in `timeout` seconds.

        All messages of a batch are of one ledger. Raises PositionTrimmed if the next messages are gone,
        Damaged if they can't be read.
        """


READ_SECONDS = 30.0
"""Seconds of reading within which a reader returns the next message that a new reader would return."""


def existing(placed: PlacedBatch | None, topic: str, at: Position) -> PlacedBatch:
    """What a reader returned within `READ_SECONDS` where there are messages. Raises ServiceUnavailable for None."""
    if placed is None:
        raise ServiceUnavailable(
            f"topic {topic!r} has messages from {at} on, but nothing came within {READ_SECONDS:g} s: check the broker, "
            "and try again"
        )
    return placed


@runtime_checkable
class NotifyingReader(Protocol):
    """A reader with a callback for new messages, so that no thread has to wait for them."""

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in any thread, when `read` may return messages or fail; at once if it may now.

        The callback must neither block nor read. It replaces a callback that was not called yet. A reader notices that
        it has to connect again only while it is read, so read it from time to time as well. From the first call on
        `read` without a timeout never waits, not even for messages that exist: one thread can read many topics.
        """


@runtime_checkable
class PolicyBroker(Protocol):
    """A broker whose operators can set policies, at any time, that drop messages or stop topics."""

    def check_topic(self, topic: str) -> None:
        """Raises UnsafePolicy that names the policy, or NotAuthorized if these credentials may not see policies."""


@runtime_checkable
class PolicyLookupBroker(Protocol):
    """A broker that looks up many policies before it opens a writer."""

    def writer_of_new(self, topic: str) -> Writer:
        """A shared writer to a topic that `create_topic` has just checked; its policies are not looked up again."""


@runtime_checkable
class AnnotatedBroker(Protocol):
    """A broker that stores an annotation, a line of text, with each topic; a re-created topic has none."""

    def annotate(self, topic: str, text: str) -> None:
        """Set or replace the annotation, without retries: it may be set even if this raises."""

    def annotation(self, topic: str) -> str | None:
        """The annotation of a topic, or None, in one request. Raises TopicNotFound."""


@runtime_checkable
class StoredBroker(Protocol):
    """A broker that can check the stored files of each topic as the next owner would."""

    def damages(self) -> dict[str, Error]:
        """Topic → the error for which an owner could not open the log; internal topics included."""


@runtime_checkable
class VerifyingBroker(Protocol):
    """A broker that stores the log itself, so that it can verify the stored bytes."""

    @property
    def repaired(self) -> tuple[str, ...]:
        """The damaged files that were repaired since the log was opened, in order."""

    def check_stored(self, topic: str, ledger: int, start: int = 0, size: int | None = None) -> int:
        """Read and verify the blocks of a ledger that begin within `size` bytes from an offset on, or all of them.

        Return where the next block begins; 0 at the end of the ledger, or if it does not exist any more. Raises
        Damaged, UnsupportedFormat, or TopicNotFound.
        """

    def damaged_topics(self) -> dict[str, Error]:
        """The topics with a file that anything has found damaged, and that is not repaired, each with its error."""

    def on_damage(self, notify: Callable[[], object]) -> Callable[[], object]:
        """Let `notify` be called, in any thread, when damage was found or repaired; the result ends that."""


SCHEMA_VERSION = "tb.schema_version"
"""The property in which readers give the version of the schema that a message was written with. It is not stored."""


class TopicSchema(NamedTuple):
    """A schema that is registered for a topic. `kind`: avro, json, or another one; `definition`: as registered."""

    kind: str
    definition: str
    version: int


@runtime_checkable
class SchemaBroker(Protocol):
    """A broker with a schema registry, whose readers add SCHEMA_VERSION to messages that have one."""

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """The schema of a topic with this version, by default the newest; None if the topic has none."""

    def write_with(self, topic: str, schema: TopicSchema) -> None:
        """Let writers of a topic that are opened from now on declare a schema that is registered."""


BackupProgress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done, and with those of the whole backup."""


class BackupReport(NamedTuple):
    """What a backup holds. `messages`: all that were written to its ledgers; compaction may have removed some."""

    topics: int
    ledgers: int
    messages: int
    bytes: int


@runtime_checkable
class BackupBroker(Protocol):
    """A broker that stores the log itself, so that it can write a backup of all topics as they are at one moment."""

    def back_up(self, path: str, progress: BackupProgress) -> BackupReport:
        """Write a backup to a new file of this machine; appends continue. Files that it needs are kept meanwhile.

        Raises CallerError if the file exists or another backup is being written, Damaged, DiskFull, DiskFailed,
        DiskWatermark, Closed once the broker is being closed, and what `progress` raises; then there is no backup.
        """


@runtime_checkable
class ReplicatedBroker(Protocol):
    """A broker that is one of a pair; at a time one of them is live and can be written to, with `writer(…, wait=…)`."""

    @property
    def live(self) -> bool:
        """Whether this one is live."""

    @property
    def term(self) -> int:
        """A number of the time for which this one is live, another one each time; 0 while it is not."""

    def check_answer(self) -> None:
        """Raises NotLive unless what was read here before this call is the newest, so that it may be sent."""

    def on_role(self, notify: Callable[[], None]) -> None:
        """Call a function, in any thread, whenever this one becomes live, is no longer live, or fails."""

    @property
    def failure(self) -> Error | None:
        """The error after which it takes no part any more, until its directory is opened again."""

    def status(self) -> Mapping[str, Any]:
        """Facts about the pair as seen here, ready for JSON."""

    def switch(self) -> None:
        """Make the other one primary; returns once it is.

        Raises NotLive if this one is not live, NotInSync unless the other one has everything, and LockUnavailable if
        the other one has not taken the role in time.
        """

    def promote(self) -> None:
        """Make this one primary although records may be lost; returns once that is requested.

        Raises NotPromotable if its directory can't become the log, and LockUnavailable.
        """


@runtime_checkable
class ReloadingBroker(Protocol):
    """A broker that loads topics again at times: then their writers reconnect, and any other writer may come first."""

    def writer_of_left(self, topic: str) -> Writer | None:
        """Open the exclusive writer of a topic whose last one is gone; None: it is there, or may still come back.

        Call it again and again: it compares what it sees each time. Raises as `writer`, but waits for no outage.
        """


PLUG_IN_SETTINGS = {
    "topicFactoryClassName": "txnbuffer.broker.TxnTopicFactory",
    "allowOverrideEntryFilters": "true",
    "transactionCoordinatorEnabled": "false",
}
"""The settings of a broker with the plug-in; it does not start without the class that a setting names."""


PLUG_IN_LOCK = "managedLedgerStorageClassName=txnbuffer.broker.LockedStorage"
"""The setting with which a broker serves locked namespaces."""


class BrokerPlugIn(NamedTuple):
    """A broker of a cluster, and what it lacks to show plain consumers only what committed.

    `version` is that of Pulsar, empty if the broker does not answer; `plug_in` is that of its plug-in, empty until it
    has loaded a topic. `reads`: the newest version of each format that the plug-in reads, by name.
    """

    broker: str
    version: str
    plug_in: str
    missing: tuple[str, ...]
    reads: Mapping[str, int]


@runtime_checkable
class PlugInBroker(Protocol):
    """A cluster whose brokers may have a plug-in that shows plain consumers only what committed."""

    def plug_ins(self) -> list[BrokerPlugIn]:
        """All active brokers; those that do not answer lack that. Raises NotAuthorized if only others may ask."""

    def lock_plug_in(self, *, locked: bool) -> None:
        """Let only brokers with the plug-in and PLUG_IN_LOCK load topics of the namespace from now on; or any broker.

        Raises CallerError if a broker lacks that setting, and NotAuthorized.
        """

    def plug_in_state(self, topic: str) -> dict[str, str]:
        """What the plug-in says of a topic, such as `state` and `reason`; empty if its broker has none."""


class PlainReader(Resource, Protocol):
    def read(self, *, limit: int = 1000, timeout: float = 0.0) -> PlacedBatch | None:
        """The next messages, at most `limit`; None if none came in `timeout` seconds."""

    def has_more(self) -> bool | None:
        """Whether there are more messages for it, as the cluster says; None if that does not answer."""


@runtime_checkable
class PlainBroker(Protocol):
    """A broker of which other programs may see only a part."""

    def plain_reader(self, topic: str) -> PlainReader:
        """Read a topic from its first message on, as a reader of another program does."""


@runtime_checkable
class BulkBroker(Protocol):
    """A broker that creates many topics for about the cost of one."""

    def create_topics(self, topics: Iterable[str]) -> None:
        """Create topics, all of them or none; existing topics stay as they are."""


@runtime_checkable
class DeduplicatingBroker(Protocol):
    """A broker whose writers resend by themselves what may already be in the log after a crash."""

    def deduplicate(self, topic: str) -> None:
        """Drop duplicates of one writer of a topic; it applies to writers that are opened later."""


@runtime_checkable
class PartitionedBroker(Protocol):
    """A broker with partitioned topics, whose partitions are topics of their own; see `broker_io.partitions`.

    Calls with the name of a partitioned topic raise TopicPartitioned, a TopicNotFound.
    """

    @property
    def hashing(self) -> Hashing:
        """The hash by which keys choose partitions."""

    def partitions(self, topic: str) -> int:
        """The number of partitions, which may grow; 0 if the topic is not partitioned or does not exist."""

    def partition(self, topic: str, count: int) -> None:
        """Create a topic with `count` partitions. An existing topic may keep its number: call `partitions`."""


class Broker(Resource, Protocol):
    @property
    def max_message_bytes(self) -> int:
        """The limit of one message: key, value and properties together."""

    def topics(self) -> list[str]:
        """Names of all topics, sorted: of each partition, but not of partitioned topics as a whole."""

    def create_topic(self, topic: str) -> None:
        """Create a topic; an existing one stays as it is."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and all its messages. If it is created again, it has another incarnation."""

    def incarnation(self, topic: str) -> str:
        """A text that is unique to this topic, and differs once the topic is deleted and created again."""

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> Writer:
        """Open a writer. Raises Fenced if another holds the topic exclusively and this one is shared.

        `unbatched`: each message becomes an entry of its own, even in backends that combine messages.

        With `wait` an exclusive writer fences no open exclusive writer: it waits up to `wait` seconds until that one
        is closed or its process has ended. Raises StillHeld, which is retryable, if the other one is still open then,
        and NotSupported if the backend can't wait.
        """

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> Reader:
        """Open a reader at a position, or after it if not `inclusive`; EARLIEST is the first existing message.

        `compacted` reads the topic as the last compaction left it.
        """

    def ledgers(self, topic: str) -> list[Ledger]:
        """The ledgers that still exist, ascending; at least one."""

    def first_position(self, topic: str) -> Position | None:
        """Position of the first message that still exists; None for an empty topic."""

    def last_position(self, topic: str) -> Position | None:
        """Position of the last acknowledged message of the raw log; None if there never was one."""

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        """Position of the first message published at or after a time; None if there is none."""

    def roll(self, topic: str) -> None:
        """Close the newest ledger and start another; nothing happens if it is empty."""

    def trim(self, topic: str, first_ledger: int) -> None:
        """Drop all closed ledgers below `first_ledger`; the newest ledger always stays."""

    def compact(self, topic: str) -> None:
        """Keep the newest message of each key in all closed ledgers, and in the newest if the backend can.

        Raises NotSupported for a data topic.
        """


NUMBER_DIGITS = 20
"""Bytes of a numeric property, at most."""


OWN_PREFIX = "__txnbuffer"
"""Name prefix of topics without transactions, which may be compacted."""


def check_compaction(topic: str, prefix: str) -> None:
    """Raises NotSupported for a data topic: the newest record of a key may be an aborted one."""
    if not topic.startswith(prefix):
        raise NotSupported(
            f"topic {topic!r} can't be compacted in this way, which ignores transactions and could drop committed "
            f"records: only topics that begin with {prefix!r} can; use `txnbuf compact` on an embedded log, or a relay"
        )


def check_data_topic(topic: str, prefix: str) -> None:
    """Raises NotSupported for a topic without transactions."""
    if topic.startswith(prefix):
        raise NotSupported(f"topic {topic!r} has no transactions, and is compacted when it needs it: name a data topic")


def check_batch(batch: Batch, limit: int) -> int:
    """Check a batch before anything of it is appended, and return its approximate bytes.

    Raises MessageTooLarge or InvalidMessage.
    """
    count = len(batch.values.offsets) - 1
    lengths = {count, len(batch.keys.offsets) - 1}
    if batch.event_times is not None:
        lengths.add(len(batch.event_times))
    if len(batch.properties) > MAX_PROPERTIES:
        raise InvalidMessage(f"the batch has {len(batch.properties)} distinct properties: use at most {MAX_PROPERTIES}")
    largest, total = 0, 8 * count
    for name, column in batch.properties.items():
        labels = column.values if isinstance(column, Labels) else ()
        lengths.add(len(column.codes if isinstance(column, Labels) else column.values))
        try:
            sizes = [*map(len, map(str.encode, labels))]
            named = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"property {name!r} is not valid Unicode ({error.reason}): correct it") from None
        if isinstance(column, Labels):
            largest += named + max(sizes, default=0)
            total += named + sum(sizes) + 4 * count
        else:
            largest += named + NUMBER_DIGITS
            total += named + 8 * count
    if lengths != {count}:
        raise InvalidMessage(f"the columns of the batch have different lengths ({sorted(lengths)}): make them equal")
    for blobs in (batch.keys, batch.values):
        longest, size = _measure(blobs)
        largest += longest
        total += size
    if largest > limit:
        _check_sizes(batch, limit)
    return total


def check_together(size: int) -> None:
    """Check the bytes of several appends in one operation, as `check_batch` counts them. Raises MessageTooLarge."""
    if size > MAX_TOGETHER_BYTES:
        raise MessageTooLarge(
            f"appends in one operation have {size} bytes: append at most {MAX_TOGETHER_BYTES} together"
        )


def _measure(blobs: Blobs) -> tuple[int, int]:
    """Bytes of the longest string and of all. Raises InvalidMessage for offsets that do not fit the data."""
    offsets = blobs.offsets
    first, last = int(offsets[0]), int(offsets[-1])
    shortest = longest = last - first
    if len(offsets) > 2:
        lengths = offsets[1:] - offsets[:-1]
        shortest, longest = int(np.minimum.reduce(lengths)), int(np.maximum.reduce(lengths))
    if first < 0 or shortest < 0 or last > len(blobs.data):
        raise InvalidMessage("the offsets of the batch do not fit its bytes: make them ascend from 0 to the length")
    return longest, last - first


def _check_sizes(batch: Batch, limit: int) -> None:
    sizes = batch.sizes()
    index = int(np.argmax(sizes > limit))
    if sizes[index] > limit:
        raise MessageTooLarge(
            f"message {index} of the batch has {sizes[index]} bytes, more than the limit of {limit}: "
            "split it, or raise the limit of message bytes; nothing of the batch was appended"
        )
