"""The service's side of one `Read` stream: one question of the client, one answer."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np

from broker_io.batch import Labels, PlacedBatch
from broker_io.errors import TopicNotFound, as_error
from broker_io.port import Broker, Reader
from broker_io.position import LATEST, NO_INDEX, Position
from broker_io.remote.messages import Answer, Ask, Opened, OpenReader

ANSWER_BYTES = 1024 * 1024
"""About the most bytes of one answer, which has at least one message."""
ROW_BYTES = 64
"""What a message takes besides its bytes, about."""
SLICE = 0.2
"""Seconds of one wait, after which a reader whose client is gone is given up."""
LONGEST_WAIT = 30.0


class Reading:
    """A reader and what of its last batch was not sent yet. Everything here waits: call it in worker threads."""

    def __init__(self, broker: Broker, opening: OpenReader) -> None:
        self._stopped = False
        self._lock = threading.Lock()
        self._rest: PlacedBatch | None = None
        self._reader: Reader
        self._open(broker, opening)

    def _open(self, broker: Broker, opening: OpenReader) -> None:
        topic, start = opening.topic, opening.start
        behind = _end(broker, topic) if start >= LATEST else start
        incarnation = broker.incarnation(topic)
        if opening.incarnation not in ("", incarnation):
            raise _made_anew(topic)
        self._reader = broker.reader(topic, start, inclusive=opening.inclusive, compacted=opening.compacted)
        if broker.incarnation(topic) != incarnation:
            self._reader.close()
            raise _made_anew(topic)
        self.opened = Opened(incarnation, behind)

    def answer(self, ask: Ask) -> Answer:
        """What the reader has now, or within the time that the client waits."""
        with self._lock:
            try:
                return self._answer(max(ask.limit, 1), time.monotonic() + min(ask.wait_ms / 1000, LONGEST_WAIT))
            except Exception as error:
                return Answer(error=as_error(error))

    def _answer(self, limit: int, deadline: float) -> Answer:
        while self._rest is None:
            remaining = deadline - time.monotonic()
            self._rest = self._reader.read(limit=limit, timeout=min(max(remaining, 0.0), SLICE))
            if self._rest is None and (remaining <= 0 or self._stopped):
                return Answer()
        batch, self._rest = self._rest, None
        rows = _fitting(batch, limit)
        if rows < len(batch):
            self._rest = batch.take(slice(rows, None))
            batch = batch.take(slice(0, rows))
        return Answer(_lean(batch), more=self._rest is not None or rows >= limit)

    def stop(self) -> None:
        """Give up waiting soon; safe from any thread."""
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        with self._lock:
            self._reader.close()


def _end(broker: Broker, topic: str) -> Position:
    """A position that all messages to come stand behind, and that none which is trimmed meanwhile hides."""
    last = broker.last_position(topic)
    return Position(broker.ledgers(topic)[0].ledger, -1, NO_INDEX) if last is None else last


def _made_anew(topic: str) -> TopicNotFound:
    return TopicNotFound(f"topic {topic!r} was deleted and made anew while it was read: open a reader of the new one")


def _lean(batch: PlacedBatch) -> PlacedBatch:
    """The same messages without labels that none of them has: a slice shares the labels of the whole."""
    properties = {
        name: _used(column) if isinstance(column, Labels) and len(column.values) > len(column) else column
        for name, column in batch.messages.properties.items()
    }
    return replace(batch, messages=replace(batch.messages, properties=properties))


def _used(labels: Labels) -> Labels:
    codes, renamed = np.unique(labels.codes, return_inverse=True)
    absent = int(codes[0] < 0)
    return Labels((renamed - absent).astype(np.int32), tuple(labels.values[code] for code in codes[absent:].tolist()))


def _fitting(batch: PlacedBatch, limit: int) -> int:
    """How many messages of a batch make one answer."""
    rows = min(len(batch), limit)
    messages = batch.messages
    if len(messages.keys.data) + len(messages.values.data) + ROW_BYTES * rows <= ANSWER_BYTES:
        return rows
    sizes = np.cumsum(messages.sizes()[:rows] + ROW_BYTES)
    return max(int(np.searchsorted(sizes, ANSWER_BYTES, side="right")), 1)
