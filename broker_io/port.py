"""The broker port: topics of messages, written, read, trimmed and compacted.

Four backends stand behind it and pass one contract suite (`broker_io.testing.contract`). A broker
knows nothing of transactions.

Rules that every backend keeps:

- An append is acknowledged once it is durable, in order; what a failed append leaves behind is a
  prefix of it, and its fate is unknown to the writer until the log is read.
- Opening an exclusive writer fences every older writer of that topic: each later append of theirs
  fails with `Fenced`. While an exclusive writer is open nobody else can append; on a Pulsar cluster a
  shared writer of another process may wait meanwhile, and go on behind it, so what has an owner has no
  shared writers. Who takes a topic over only when its holder is gone opens with `wait`, which fences
  nobody.
- Messages come back in position order, each exactly where it was acknowledged. Positions grow and are
  never used twice; they need not be dense.
- A reader never jumps silently: a start position whose messages are gone is `PositionTrimmed`. One above
  the end is no error: the reader waits for the first message that stands there or later.
- Compaction keeps at least the newest message of each key, at its own position, unless that is a
  delete; what it keeps besides is the backend's business, so whoever reads a compacted topic keeps a
  map of its own. Messages without a key don't survive compaction.
- Compaction knows no transactions, so a topic of records, whose name does not begin with `__txnbuffer`, is
  not compacted.

What every backend refuses before it does anything: batches that can't be stored, compaction of data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, PlacedBatch, PropertyColumn
from broker_io.errors import Error, InvalidMessage, InvalidTopicName, MessageTooLarge, NotSupported, TopicNotFound
from broker_io.partitions import Hashing
from broker_io.position import EARLIEST, Position, Positions

T = TypeVar("T")

MAX_MESSAGE_BYTES = 5 * 1024 * 1024
"""The default limit of one message: key, value and properties together."""

MAX_PROPERTIES = 1000
"""Different property names that the messages of one append may have."""

MAX_TOPIC_NAME = 400


def check_topic_name(name: object) -> str:
    """Return the name, or raise InvalidTopicName that says what is wrong with it."""
    if not isinstance(name, str):
        raise InvalidTopicName(f"a topic is named by text, not {name!r:.80}")
    if not name:
        raise InvalidTopicName("a topic needs a name of at least one character")
    if len(name.encode(errors="replace")) > MAX_TOPIC_NAME:
        raise InvalidTopicName(f"topic name {name[:40]!r}… is longer than {MAX_TOPIC_NAME} bytes of UTF-8")
    if not name.isprintable() or name != name.strip():
        raise InvalidTopicName(f"topic name {name!r} holds an unprintable character, or white space at an end")
    return name


def open_or_make(broker: Broker, topic: str, opening: Callable[[], T]) -> T:
    """What `opening` opens at a topic, which is made if it is missing: as a rule it isn't, and asking costs time."""
    try:
        return opening()
    except TopicNotFound:
        broker.create_topic(topic)
        return opening()


@dataclass(frozen=True, slots=True)
class Ledger:
    """One ledger of a topic that still exists.

    `entries` counts its messages ever written (next entry number), `bytes` its size in storage;
    `closed` says that nothing will be added. One that is not `lasting` holds nothing, and may give place to another.
    """

    ledger: int
    entries: int
    bytes: int
    closed: bool
    lasting: bool = True


def messages_up_to(ledgers: list[Ledger], position: Position | None) -> int:
    """How many messages these ledgers have up to a position, that of the position included."""
    if position is None:
        return 0
    below = sum(ledger.entries for ledger in ledgers if ledger.ledger < position.ledger)
    inside = [ledger.entries for ledger in ledgers if ledger.ledger == position.ledger]
    return below + (min(position.entry + 1, inside[0]) if inside else 0)


class Writer(Protocol):
    def append(self, batch: Batch) -> Future[Positions]:
        """Add messages at the end, in order; the future gives their positions once they are durable.

        Where the backend knows when they were published, `published` of the positions tells that too.

        Raises MessageTooLarge before anything of the batch is written. The future fails with Fenced,
        Closed, DiskFull, DiskFailed or DiskWatermark.
        """

    def close(self) -> None:
        """Wait for what is under way and give up writing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ReservingWriter(Protocol):
    """A writer to storage of which a part is kept free for what ends transactions."""

    def append_reserved(self, batch: Batch) -> Future[Positions]:
        """As `Writer.append`, also where records fail with DiskWatermark, until that part is used up, too."""


class Reader(Protocol):
    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        """The next messages, at least one and at most about `limit`; None if none came in `timeout` seconds.

        Never more than one ledger's in one batch. Raises PositionTrimmed if what comes next is gone,
        Damaged if it can't be read.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class NotifyingReader(Protocol):
    """A reader that tells when there is more, so that no thread has to wait for that."""

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        """Have `tell` called once, in any thread, when `read` may give something or fail; at once if it may now.

        It must neither wait nor read. It takes the place of one that was not called yet. Where a reader is dead without
        knowing it nobody is told: read now and then, too.
        """


@runtime_checkable
class PolicyBroker(Protocol):
    """A broker where others' policies may drop or stop what is needed, also those that come later."""

    def check_topic(self, topic: str) -> None:
        """Raises UnsafePolicy that names what endangers a topic, NotAuthorized to who may not see policies."""


@runtime_checkable
class PolicyLookupBroker(Protocol):
    """A broker that asks many questions about policies before it opens a writer."""

    def writer_of_new(self, topic: str) -> Writer:
        """A shared writer to a topic for which `create_topic` was called just now: it asked them."""


@runtime_checkable
class AnnotatedBroker(Protocol):
    """A broker where a note of ours, a line of text, can stand beside each topic; a topic made anew has none."""

    def annotate(self, topic: str, text: str) -> None:
        """Put a note in the place of the one before. Asked once only: it may stand there even if this raises."""

    def annotation(self, topic: str) -> str | None:
        """The note of a topic, None if it has none, in one question. Raises TopicNotFound."""


@runtime_checkable
class StoredBroker(Protocol):
    """A broker that can look at what is stored of each topic as whoever opens the log next would."""

    def damages(self) -> dict[str, Error]:
        """Topic → why an owner would refuse to open the log for it; internal topics too."""


@runtime_checkable
class VerifyingBroker(Protocol):
    """A broker that has the log itself, so that it alone can find out whether what is stored is what was written."""

    def check_stored(self, topic: str, ledger: int) -> None:
        """Read all that a ledger holds, if it still exists. Raises Damaged or TopicNotFound."""


@runtime_checkable
class BulkBroker(Protocol):
    """A broker that makes many topics for about the cost of one."""

    def create_topics(self, topics: Iterable[str]) -> None:
        """Make topics, all of them or none; those that exist are left as they are."""


@runtime_checkable
class DeduplicatingBroker(Protocol):
    """A broker whose writers send again by themselves what a crash may have let stand already."""

    def deduplicate(self, topic: str) -> None:
        """Have it drop what comes twice from one writer of a topic, from the writers that are opened next."""


@runtime_checkable
class PartitionedBroker(Protocol):
    """A broker where a topic may have partitions, which are topics of their own; see `broker_io.partitions`.

    Whoever takes the name of such a topic for that of a log gets TopicPartitioned, a TopicNotFound.
    """

    @property
    def hashing(self) -> Hashing:
        """How keys choose partitions."""

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has, which may grow; 0 if it has none, or isn't there."""

    def partition(self, topic: str, count: int) -> None:
        """Make a topic with so many partitions. One that is there need not become one with that many: ask."""


class Broker(Protocol):
    @property
    def max_message_bytes(self) -> int:
        """The limit of one message: key, value and properties together."""

    def topics(self) -> list[str]:
        """Names of all topics, sorted. One that stands for partitions is none, each of these is."""

    def create_topic(self, topic: str) -> None:
        """Make a topic; one that exists is left as it is."""

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and all its messages. Made again, it has another incarnation."""

    def incarnation(self, topic: str) -> str:
        """A text that no other topic has, nor this name once it was deleted and made again."""

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> Writer:
        """Open a writer. Raises Fenced if another holds the topic exclusively and this one is shared.

        `unbatched`: each message becomes an entry of its own, where a backend would put many into one.

        With `wait` an exclusive one fences no exclusive writer that is open: it waits so many seconds until that one
        is closed, or its process gone. Raises StillHeld, which is retryable, if it is still there then, and
        NotSupported where a backend can't wait.
        """

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> Reader:
        """Open a reader at a position, or behind it if not inclusive; EARLIEST takes what there still is.

        `compacted` reads the topic as its last compaction left it.
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
        """Close the newest ledger and begin another; nothing happens if it is empty."""

    def trim(self, topic: str, first_ledger: int) -> None:
        """Drop all closed ledgers below `first_ledger`; the newest always stays."""

    def compact(self, topic: str) -> None:
        """Keep the newest message of each key of all closed ledgers, and of the newest where the backend can.

        Raises NotSupported for a topic of records.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


NUMBER_DIGITS = 20
"""What a property that is a number takes at most."""


OWN_PREFIX = "__txnbuffer"
"""What the names of topics begin with that hold no transactions, and so may be compacted."""


def check_compaction(topic: str, prefix: str) -> None:
    """Raises NotSupported for a topic of records: the newest of a key may be one that was aborted."""
    if not topic.startswith(prefix):
        raise NotSupported(
            f"topic {topic!r} can't be compacted, for compaction knows no transactions and could drop committed "
            f"records: only topics that begin with {prefix!r} are; to free space, trim it"
        )


def check_batch(batch: Batch, limit: int) -> int:
    """About the bytes of a batch. Raises MessageTooLarge or InvalidMessage; nothing of it was appended then."""
    count = len(batch)
    lengths = {len(batch.keys), *(len(column) for column in batch.properties.values())}
    if batch.event_times is not None:
        lengths.add(len(batch.event_times))
    if lengths != {count}:
        raise InvalidMessage(
            f"a batch whose columns have different lengths ({sorted(lengths | {count})}): make them one"
        )
    if len(batch.properties) > MAX_PROPERTIES:
        raise InvalidMessage(f"a batch with {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}")
    largest, total = 0, 0
    for name, column in batch.properties.items():
        longest, size = _measure_property(name, column, count)
        largest += longest
        total += size
    for blobs in (batch.keys, batch.values):
        longest, size = _measure(blobs)
        largest += longest
        total += size + 4 * count
    if largest > limit:
        _check_sizes(batch, limit)
    return total


def _measure(blobs: Blobs) -> tuple[int, int]:
    """Bytes of the longest string and of all. Raises InvalidMessage if the offsets lie."""
    offsets = blobs.offsets
    first, last = int(offsets[0]), int(offsets[-1])
    shortest = longest = last - first
    if len(offsets) > 2:
        lengths = offsets[1:] - offsets[:-1]
        shortest, longest = int(lengths.min()), int(lengths.max())
    if first < 0 or shortest < 0 or last > len(blobs.data):
        raise InvalidMessage("a batch whose offsets do not fit its bytes: make them ascend from 0 to the length")
    return longest, last - first


def _measure_property(name: str, column: PropertyColumn, count: int) -> tuple[int, int]:
    """At least the bytes of the longest name with text, about those of all. Raises InvalidMessage for no Unicode."""
    labels = column.values if isinstance(column, Labels) else ()
    try:
        sizes = [len(label.encode()) for label in labels]
        named = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"property {name!r} holds text that is no Unicode ({error.reason}): mend it") from None
    if isinstance(column, Labels):
        return named + max(sizes, default=0), named + sum(sizes) + 4 * count
    return named + NUMBER_DIGITS, named + 8 * count


def _check_sizes(batch: Batch, limit: int) -> None:
    sizes = batch.sizes()
    index = int(np.argmax(sizes > limit))
    if sizes[index] > limit:
        raise MessageTooLarge(
            f"message {index} of the batch has {sizes[index]} bytes, more than the limit of {limit}: "
            "split it, or raise the limit of message bytes; nothing of the batch was appended"
        )
