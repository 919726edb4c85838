"""Readers of a cluster's topics that notice every gap.

A Pulsar reader whose messages were trimmed gets no error: it is given the next messages that exist. So each message is
checked. Messages are consecutive within an entry and a ledger; another ledger starts at its first entry, after the
ledger before was read to its end, with no messages in the ledgers between.

A `MessageSource` is one reader of the client library; a `PulsarReader` opens another one where it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import _pulsar
import numpy as np
import pulsar

from broker_io.batch import PlacedBatch, Width
from broker_io.environment import current
from broker_io.errors import Closed, Damaged, Error, PositionTrimmed, ServiceUnavailable, TopicNotFound
from broker_io.position import EARLIEST, LATEST, Position, Positions
from broker_io.pulsar import threads
from broker_io.pulsar.answers import open_error
from broker_io.pulsar.cluster import Cluster, Handle
from broker_io.pulsar.ledgers import COMPACTION, LedgerState, last_position, topic_state
from broker_io.pulsar.messages import decode_messages, is_hole, properties_of
from broker_io.pulsar.threads import flusher
from broker_io.varint import encode_varint

ASK_SECONDS = 2.0
"""Timeout of the library's answer whether there is more; the call can hang."""


class MessageSource:
    """Reads the messages from `start` on, including the one at `start`."""

    def __init__(
        self, cluster: Cluster, topic: str, start: Position, *, compacted: bool, ahead: int, name: str | None = None
    ) -> None:
        """`name`: begins the name of its subscription instead of that of readers of the log."""
        self._topic = topic
        message_id = pulsar.MessageId(-1, start.ledger, start.entry, start.batch)
        self._reader: Any = cluster.opened(
            topic,
            "reader",
            lambda: cluster.client.create_reader(
                cluster.url(topic),
                message_id,
                receiver_queue_size=ahead,
                subscription_role_prefix=name or cluster.reading,
                is_read_compacted=compacted,
                start_message_id_inclusive=True,
            ),
        )
        self._raw = self._reader._reader  # without its Python wrapper, which doubles the cost per message
        self._coming: Future[Any] | None = None  # of the asynchronous read that is pending
        self._callback: Callable[[], None]
        self._buffered: Any | None = None  # the message after the last one, if the library gave it early

    def next(self, milliseconds: int) -> Any | None:
        """A message, or None if none comes in time. After an error another source may still read on."""
        if self._buffered is not None:
            message, self._buffered = self._buffered, None
            return message
        if self._coming is None:
            return self._read(milliseconds)
        try:
            message = self._coming.result(milliseconds / 1000)
        except TimeoutError:
            return None  # the queue may already have the message after it
        self._coming = None
        if message is None:
            return self._read(milliseconds)
        other = self._read(0)  # usually the next one; a message that came during the call is the one before it
        if other is not None and place_of(other) < place_of(message):
            message, other = other, message
        self._buffered = other
        return message

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        """Call `callback` when there is a message, or when there will be none."""
        self._callback = callback
        if self._buffered is not None or (self._coming is not None and self._coming.done()):
            callback()
        elif self._coming is None:
            coming: Future[Any] = Future()
            self._coming = coming

            def came(result: Any, message: Any) -> None:
                coming.set_result(message if result == pulsar.Result.Ok else None)
                self._callback()

            self._raw.read_next_async(came)

    def _read(self, milliseconds: int) -> Any | None:
        try:
            return self._raw.read_next(milliseconds)
        except _pulsar.Timeout:
            return None
        except pulsar.PulsarException as error:
            raise open_error(error, self._topic, "reader") from None

    def is_connected(self) -> bool:
        return bool(self._raw.is_connected())

    def has_more(self) -> bool | None:
        """Whether the library knows of more messages; None if it does not answer."""
        said: list[bool] = []
        heard = current().threads.event()

        def hear(result: Any, more: bool) -> None:
            if result == pulsar.Result.Ok:
                said.append(more)
            heard.set()

        self._raw.has_message_available_async(hear)
        heard.wait(ASK_SECONDS)
        return said[0] if said else None

    def close(self) -> None:
        """Close the reader without waiting."""
        flusher.run(self._reader.close, 0.0)  # the answer is lost if the topic is unloaded just then


def place_of(message: Any) -> Position:
    return position_of(message.message_id())


def position_of(message_id: Any) -> Position:
    return Position(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())


def ends_entry(message_id: Any) -> bool:
    """Whether a message is the last one of its entry.

    The library shows the size of a batch only in the serialized id, a protobuf message of which it is the last field.
    """
    batch = message_id.batch_index()
    return batch < 0 or bytes(message_id.serialize()).endswith(BATCH_SIZE + encode_varint(batch + 1))


def follows(last: Position, place: Position, last_id: Any | None = None) -> bool:
    """Whether a message is proved to be the one after `last`, whose id tells the size of its batch."""
    if place.ledger != last.ledger:
        return False
    if place.entry == last.entry:
        return place.batch == last.batch + 1
    return place.entry == last.entry + 1 and place.batch <= 0 and (last_id is None or ends_entry(last_id))


def is_next_ledger(last: Position, place: Position, state: LedgerState) -> bool:
    """Whether the ledgers prove that there is no message between the end of one and the start of another."""
    ended = state.find(last.ledger)
    return (
        ended is not None
        and last.entry + 1 >= ended.entries
        and place.entry == 0
        and place.batch <= 0
        and state.empty_between(last.ledger, place.ledger)
    )


def is_gone(start: Position, state: LedgerState, *, compacted: bool, horizon: Position | None) -> bool:
    """Whether messages from `start` on may be gone.

    A compacted topic has kept the newest message of each key up to the `horizon` of the last compaction.
    """
    if state.find(start.ledger) is not None or start.ledger > state.newest:
        return False
    return not (compacted and horizon is not None and start.ledger <= horizon.ledger)


BATCH_SIZE = b"\x30"
"""The tag of the size of a batch in a serialized message id."""
BATCH_BYTES = 16 * 1024 * 1024
"""Approximate maximum size of one batch."""
SLICE_SECONDS = 0.5
"""A longer wait is cut into slices of this length, to check for errors."""
FIRST_CHECK_SECONDS, LONGEST_CHECK_SECONDS = 1.0, 10.0
"""Seconds without a message after which the cluster is asked whether there is more."""
RECONNECT_SECONDS = 5.0
"""Seconds that even a read without timeout waits for a reconnect, or for messages that are known to exist."""


class SourceReader(Handle):
    """A reader of a topic, over a source of its messages. Belongs to one thread at a time."""

    _source: MessageSource

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.topic = topic
        self._cluster = cluster
        self._dead: Error | None = None

    def close(self) -> None:
        self.end(Closed(f"this reader of topic {self.topic!r} is closed: open another one"))

    def detach(self, why: Error) -> None:
        self._dead = why
        threads.keep(self._source)

    def end(self, error: Error) -> None:
        if self._dead is None:
            self._dead = error
            self._source.close()

    def _check(self) -> None:
        self._cluster.check()
        if self._dead is not None:
            raise self._dead


class PulsarReader(SourceReader):
    """Gets the whole log, with markers."""

    def __init__(
        self, cluster: Cluster, topic: str, start: Position, *, inclusive: bool, compacted: bool, ahead: int
    ) -> None:
        super().__init__(cluster, topic)
        self.compacted = compacted
        self._monotonic = cluster.environment.clock.monotonic
        self._ahead = ahead
        self._incarnation = cluster.incarnation(topic)
        latest = start >= LATEST
        if latest:
            start, inclusive = last_position(cluster, topic) or EARLIEST, False
        state = topic_state(cluster, topic)
        if start != EARLIEST and is_gone(start, state, compacted=compacted, horizon=state.cursors.get(COMPACTION)):
            if not latest:
                raise self._trimmed(start, state)
            start = EARLIEST  # messages below are gone, and not requested
        self._start = start
        self._inclusive = inclusive
        self._last = start
        self._start_reached = False
        self._last_id: Any | None = None  # if the message at `last` was read: a new source must read it again
        self._held: Any | None = None
        self._known_successor = (-1, -1)
        self._check_interval = FIRST_CHECK_SECONDS
        self._broken = False  # whether the source failed: another one continues after it
        self._more_never_came = False  # whether the library reports more messages that do not come
        self._notifies = False  # whether a callback reports what comes later, so that no read waits for it
        self._source = self._new_source(start)
        self._asked_after = EARLIEST
        self._idle_since = self._monotonic()

    @property
    def position(self) -> Position:
        """Position of the last message that was read, or the start."""
        return self._last

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        limit = max(limit, 1)
        deadline = self._monotonic() + timeout
        max_unavailable = max(deadline, self._monotonic() + RECONNECT_SECONDS)
        wait = 0.0
        while True:
            self._check()
            batch = self._take(limit, wait)
            if batch is not None:
                self._check_interval, self._idle_since, self._more_never_came = (
                    FIRST_CHECK_SECONDS,
                    self._monotonic(),
                    False,
                )
                return batch
            now = self._monotonic()
            if now - self._idle_since > self._check_interval:
                self._ask_cluster()
            if now < deadline:
                wait = min(deadline - now, SLICE_SECONDS)
            elif now < max_unavailable and not self._notifies and self._may_have_more():
                wait = min(max_unavailable - now, SLICE_SECONDS)
            else:
                self._more_never_came |= (
                    now >= max_unavailable and self._source.is_connected() and self._may_have_more()
                )
                return None

    def notify_when_readable(self, callback: Callable[[], None]) -> None:
        self._notifies = True
        if self._held is not None or self._broken or self._dead is not None:
            callback()
        else:
            self._source.notify_when_readable(callback)

    def _take(self, limit: int, wait: float) -> PlacedBatch | None:
        """The available messages of one ledger; it waits for the first message only."""
        messages: list[Any] = []
        places: list[Position] = []
        properties: list[Mapping[str, str] | None] = []
        size, width = 0, Width()
        while len(messages) < limit and size < BATCH_BYTES and not width.full:
            message = self._next(None if messages else round(wait * 1000))
            if message is None:
                break
            message_id = message.message_id()
            place = position_of(message_id)
            if not self._start_reached or not follows(self._last, place, self._last_id):
                if messages:
                    self._held = message  # checked by the next call; the messages before are good
                    break
                self._held = message  # if this raises, the next call checks it again
                admitted = self._admit(message_id, place)
                self._held = None
                if not admitted:
                    continue
            self._last, self._last_id = place, message_id
            if self.compacted and place.batch >= 0 and is_hole(message):
                continue
            messages.append(message)
            places.append(place)
            properties.append(properties_of(message))
            width.add(properties[-1] or ())
            size += message.length()
        if not messages:
            return None
        times = np.fromiter((message.publish_timestamp() for message in messages), np.int64, len(messages))
        try:
            return PlacedBatch(Positions.of(places), times, decode_messages(messages, properties))
        except Damaged as error:  # to read on would skip a message
            self.end(error)
            raise

    def _next(self, milliseconds: int | None) -> Any | None:
        """The next message, or None if none comes in time; None for the time: after other messages, which are good."""
        held, self._held = self._held, None
        if held is not None:
            return held
        if self._broken:
            self._open_source()
        try:
            return self._source.next(milliseconds or 0)
        except Error as error:
            self._broken = True
            if milliseconds is not None:  # else the next call finds it broken, too
                self._check()  # this process may have closed it
                if not error.retryable:
                    raise
            return None

    def _may_have_more(self) -> bool:
        """Whether a read without timeout has to wait, because messages exist that have not arrived yet."""
        if not self._source.is_connected():
            return True
        # For a topic that was reloaded the library may report more for ever, though all of it was read.
        return not self._more_never_came and self._source.has_more() is not False

    # --- gap detection ---

    def _admit(self, message_id: Any, place: Position) -> bool:
        """Whether a message that does not simply follow is the next one, else it is skipped. Raises PositionTrimmed."""
        if self._start_reached and place <= self._last:
            return False
        if not self._start_reached:
            return self._admit_first(message_id, place)
        if self.compacted and place.ledger == self._last.ledger:
            return True
        self._check_topic()
        if self.compacted:
            return True
        state = topic_state(self._cluster, self.topic)
        if self._entry_is_read and (
            is_next_ledger(self._last, place, state) or self._is_known_successor(self._last, place)
        ):
            return True
        if state.find(self._last.ledger) is None:
            raise self._trimmed(self._last, state)
        return self._is_unreadable(self._last)

    def _admit_first(self, message_id: Any, place: Position) -> bool:
        start = self._start
        if place < start:
            return False
        if place == start:  # ledger numbers are unique in a cluster, so it is the same topic
            self._start_reached = True
            self._last, self._last_id = place, message_id
            return self._inclusive
        self._check_topic()
        known = follows(start, place, self._last_id) or (self._entry_is_read and self._is_known_successor(start, place))
        if self._last_id is None:
            known |= start == EARLIEST or place[:2] == start[:2]
        if not known and not self.compacted:
            state = topic_state(self._cluster, self.topic)
            if state.find(start.ledger) is None:
                raise self._trimmed(start, state)
            if self._last_id is not None and not (self._entry_is_read and is_next_ledger(start, place, state)):
                return self._is_unreadable(start)
        self._start_reached = True
        return True

    @property
    def _entry_is_read(self) -> bool:
        """Whether no message of the last entry is missing, as far as is known."""
        return self._last_id is None or ends_entry(self._last_id)

    def _is_unreadable(self, last: Position) -> bool:
        """Whether a source that was opened for this check skips the same entries after a position.

        Then they are not for readers: chunks of a message, or markers of Pulsar's own transactions.
        """
        if self._asked_after == last:
            self._start_reached = True
            return True
        self._open_source()
        self._asked_after = last  # only after success: a failure proves nothing
        return False

    def _is_known_successor(self, last: Position, place: Position) -> bool:
        """Whether the cluster has confirmed that a ledger begins right after the last message of another."""
        return self._known_successor == (last.ledger, place.ledger) and place.entry == 0

    def _check_topic(self, *, retry: bool = True) -> None:
        """Check the incarnation: the library continues silently with a re-created topic."""
        if self._cluster.incarnation(self.topic, retry=retry) != self._incarnation:
            raise TopicNotFound(f"topic {self.topic!r} was deleted: open a reader of the new one")

    def _trimmed(self, after: Position, state: LedgerState) -> PositionTrimmed:
        return PositionTrimmed(
            f"topic {self.topic!r}: messages from {after} on were trimmed, the log begins with ledger "
            f"{state.ledgers[0].ledger}: "
            "start at EARLIEST or later"
        )

    # --- end-of-topic detection ---

    def _ask_cluster(self) -> None:
        """Compare an idle reader with the end of the topic: the reader may have died silently."""
        self._idle_since = self._monotonic()
        self._check_interval = min(2 * self._check_interval, LONGEST_CHECK_SECONDS)
        try:
            state = topic_state(self._cluster, self.topic, retry=False)
            if state.find(self._last.ledger) is None:  # ledger numbers are unique in a cluster
                self._check_topic(retry=False)
        except ServiceUnavailable:
            return  # while the cluster is unavailable nothing comes, which is no error
        if state.last.entry < 0 or (state.last[:2] <= self._last[:2] and self._entry_is_read):
            if self._last.ledger != state.newest and state.empty_between(self._last.ledger, state.newest + 1):
                self._known_successor = (self._last.ledger, state.newest)
            if not self._source.is_connected():  # after an outage the library waits for up to a minute
                self._open_source()
            return
        trimmed = state.find(self._last.ledger) is None and self._known_successor != (
            self._last.ledger,
            state.ledgers[0].ledger,
        )
        if self._last_id is not None and trimmed and not self.compacted:
            raise self._trimmed(self._last, state)
        self._open_source()

    def _open_source(self) -> None:
        """Open a new source at the last message, which must come again to prove that nothing is missing."""
        start, inclusive = (
            (self._last, self._last_id is None) if self._start_reached else (self._start, self._inclusive)
        )
        source = self._new_source(start)
        self._source.close()
        self._source, self._start, self._inclusive = source, start, inclusive
        self._start_reached = self._broken = False
        self._idle_since = self._monotonic()

    def _new_source(self, start: Position) -> MessageSource:
        return MessageSource(self._cluster, self.topic, start, compacted=self.compacted, ahead=self._ahead)


class PlainPulsarReader(SourceReader):
    """See `PlainBroker.plain_reader`."""

    def __init__(self, cluster: Cluster, topic: str, ahead: int) -> None:
        super().__init__(cluster, topic)
        self._source = MessageSource(cluster, topic, EARLIEST, compacted=False, ahead=ahead, name=cluster.plain)

    def read(self, *, limit: int = 1000, timeout: float = 0.0) -> PlacedBatch | None:
        self._check()
        messages: list[Any] = []
        while len(messages) < limit:
            message = self._source.next(0 if messages else round(1000 * timeout))
            if message is None:
                break
            messages.append(message)
        if not messages:
            return None
        times = np.fromiter((message.publish_timestamp() for message in messages), np.int64, len(messages))
        places = Positions.of([position_of(message.message_id()) for message in messages])
        return PlacedBatch(places, times, decode_messages(messages, [*map(properties_of, messages)]))

    def has_more(self) -> bool | None:
        self._check()
        return self._source.has_more()
