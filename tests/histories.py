"""Histories of one topic: logs written by tests, and Hypothesis strategies for them.

A `Log` places messages and keeps an `Event` for each that describes its meaning; the naive model uses the events,
the product the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.position import Position, Positions
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import RECORDS, REMOVED, SEQ, TXN, VERSION, encode_marker


class Event(NamedTuple):
    """One message: a record (`size` None), a record set, an undecodable one (`bad`) or a marker.

    `unreadable`: it is not a message of Pulsar; only the broker plug-in meets such entries.
    """

    position: Position
    txn: TxnId | None = None
    seq: int = 0
    size: int | None = None
    bad: bool = False
    marker: Marker | None = None
    unreadable: bool = False

    @property
    def records(self) -> list[Position]:
        if self.marker is not None:
            return []
        if self.size is None:
            return [self.position]
        return [self.position._replace(batch=index) for index in range(self.size)]


def place(messages: Sequence[Message], positions: Sequence[Position]) -> PlacedBatch:
    return PlacedBatch(Positions.of(list(positions)), np.zeros(len(positions), np.int64), Batch.of(messages))


def record(txn: TxnId | str | None, seq: int = 1, *, size: int | None = None, value: bytes = b"v") -> Message:
    properties = {} if txn is None else {VERSION: "1", TXN: str(txn), SEQ: str(seq)}
    if size is not None:
        properties |= {VERSION: "1", RECORDS: str(size)}
    return Message(b"k", value, properties)


def marker(
    *items: tuple[TxnId, Outcome, int], epoch: int = 1, lwm: int = 0, decided: bool = True, coordinator: int = 0
) -> Marker:
    return Marker(coordinator, epoch, lwm, decided, tuple(MarkerItem(*item) for item in items))


@dataclass
class Log:
    """A log that grows by one message per call."""

    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ledger: int = 1
    entry: int = 0

    def new_ledger(self, skip: int = 1) -> None:
        self.ledger, self.entry = self.ledger + skip, 0

    def _add(self, message: Message, batch: int = -1, **event: object) -> Position:
        position = Position(self.ledger, self.entry, batch)
        if batch == -1:
            self.entry += 1
        self.events.append(Event(position, **event))  # type: ignore[arg-type]  # fields by name
        self.messages.append(message)
        return position

    def record(self, txn: TxnId | None, seq: int = 0, size: int | None = None) -> Position:
        return self._add(record(txn, seq, size=size), txn=txn, seq=seq, size=size)

    def records(self, txn: TxnId | None, first_seq: int, count: int) -> list[Position]:
        return [self.record(txn, first_seq + step if txn else 0) for step in range(count)]

    def member(self, txn: TxnId | None, seq: int, batch: int) -> Position:
        """A message inside a batch of the broker; `next_entry` ends the batch."""
        return self._add(record(txn, seq), batch, txn=txn, seq=seq)

    def next_entry(self) -> None:
        self.entry += 1

    def bad(self, message: Message, size: int | None = None) -> Position:
        return self._add(message, bad=True, size=size)

    def mark(self, marker: Marker) -> Position:
        return self._add(encode_marker(marker), marker=marker)

    def end(self, txn: TxnId, outcome: Outcome, records: int = 0, **rest: object) -> Position:
        return self.mark(marker((txn, outcome, records), coordinator=txn.most, **rest))  # type: ignore[arg-type]  # fields by name

    def again(self, low: int, high: int) -> None:
        """Append a range of messages again, after newer ones, as a crashing broker does."""
        for event, message in zip(self.events[low:high], self.messages[low:high], strict=True):
            if event.position.batch == -1:
                self._add(message, **{name: value for name, value in event._asdict().items() if name != "position"})

    def batches(self, start: int = 0, stop: int | None = None, sizes: Sequence[int] = (1000,)) -> Iterator[PlacedBatch]:
        """The messages from index `start` to `stop` in batches of one ledger and of `sizes`, cyclically."""
        stop = len(self.events) if stop is None else stop
        turn = 0
        while start < stop:
            end = min(stop, start + sizes[turn % len(sizes)])
            ledger = self.events[start].position.ledger
            while self.events[end - 1].position.ledger != ledger:
                end -= 1
            yield place(self.messages[start:end], [event.position for event in self.events[start:end]])
            start, turn = end, turn + 1


BROKEN = [
    {VERSION: "1", TXN: "junk", SEQ: "1"},
    {VERSION: "1", TXN: "0:0", SEQ: "1"},
    {VERSION: "1", TXN: "7", SEQ: "1"},
    {VERSION: "1", TXN: "0:1"},
    {VERSION: "1", TXN: "0:1", SEQ: "0"},
    {VERSION: "1", TXN: "0:1", SEQ: "-3"},
    {VERSION: "1", TXN: "0:1", SEQ: "x"},
    {VERSION: "1", TXN: "0:1", SEQ: str(2**63)},
    {VERSION: "1", SEQ: "1"},
    {VERSION: "1", TXN: "0:1", SEQ: "1", RECORDS: "0"},
    {VERSION: "1", TXN: "0:1", SEQ: "1", RECORDS: "many"},
    {VERSION: "1", RECORDS: str(2**31)},
    {TXN: "0:1", SEQ: "1"},
]
"""Properties of undecodable records, none of them a valid record set."""

BROKEN_SET = {VERSION: "1", TXN: "junk", SEQ: "1", RECORDS: "3"}


@dataclass(frozen=True)
class History:
    """A log and its trims: (number of messages before it, first ledger)."""

    log: Log
    trims: tuple[tuple[int, int], ...]


class _Writer:
    """Draws one message after another; transactions count their seqs, so that most histories make sense."""

    def __init__(self, draw: st.DrawFn, ids: list[TxnId]) -> None:
        self.draw = draw
        self.ids = ids
        self.log = Log()
        self.sent: dict[TxnId, int] = {}

    KINDS: tuple[str, ...] = (
        "run", "run", "run", "end", "end", "end", "set", "plain", "again", "again", "border", "lwm",
        "overlap", "ledger", "rare",
    )  # fmt: skip

    def step(self) -> None:
        getattr(self, self.draw(st.sampled_from(self.KINDS)))()

    def txn(self) -> TxnId:
        return self.draw(st.sampled_from(self.ids))

    def run(self) -> None:
        txn, count = self.txn(), self.draw(st.integers(1, 4))
        self.log.records(txn, self._advance(txn, count), count)

    def set(self) -> None:
        size = self.draw(st.integers(1, 4))
        txn = self.draw(st.sampled_from([None, *self.ids]))
        self.log.record(txn, 0 if txn is None else self._advance(txn, size), size)

    def plain(self) -> None:
        self.log.records(None, 0, self.draw(st.integers(1, 3)))

    def again(self) -> None:
        """Resend a range of messages, perhaps an old one, sometimes with its markers."""
        high = self.draw(st.integers(0, len(self.log.events)))
        self.log.again(max(0, high - self.draw(st.integers(1, 5))), high)

    def end(self) -> None:
        items = [self._item(txn) for txn in self.draw(st.lists(st.sampled_from(self.ids), min_size=1, max_size=3))]
        most = items[0][0].most
        self._mark(most, [item for item in items if item[0].most == most])

    def border(self) -> None:
        self._mark(self.txn().most, [], lwm=0)

    def lwm(self) -> None:
        txn = self.txn()
        self._mark(txn.most, [], lwm=txn.least)

    def ledger(self) -> None:
        self.log.new_ledger(self.draw(st.integers(1, 2)))

    def overlap(self) -> None:
        """A run that begins with repeated records and ends with new ones."""
        txn = self.txn()
        seq = max(1, self.sent.get(txn, 0) - self.draw(st.integers(0, 2)))
        self.sent[txn] = seq + 3
        if self.draw(st.booleans()):
            self.log.record(txn, seq, 4)
        else:
            self.log.records(txn, seq, 4)

    def rare(self) -> None:
        which = self.draw(st.sampled_from(["bad", "bad set", "members", "gap"]))
        if which == "bad":
            self.log.bad(Message(b"k", b"v", self.draw(st.sampled_from(BROKEN))))
        elif which == "bad set":
            self.log.bad(Message(b"k", b"v", BROKEN_SET), size=3)
        elif which == "members":
            self._members()
        else:
            self.sent[self.txn()] = self.draw(st.integers(0, 6))

    def _members(self) -> None:
        for index in range(self.draw(st.integers(1, 3))):
            txn = self.draw(st.sampled_from([None, *self.ids]))
            self.log.member(txn, 0 if txn is None else self._advance(txn, 1), index)
        self.log.next_entry()

    def _advance(self, txn: TxnId, count: int) -> int:
        first = self.sent.get(txn, 0) + 1
        self.sent[txn] = first + count - 1
        return first

    def _item(self, txn: TxnId) -> tuple[TxnId, Outcome, int]:
        sent = self.sent.get(txn, 0)
        return txn, self.draw(st.sampled_from(Outcome)), self.draw(st.sampled_from([sent, sent, sent, 0, 1]))

    def _mark(
        self, most: int, items: list[tuple[TxnId, Outcome, int]], lwm: int | None = None, decided: bool | None = None
    ) -> None:
        if lwm is None:
            lwm = self.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3]))
        epoch = self.draw(st.sampled_from([1, 1, 2, 2, 3]))
        decided = self.draw(st.booleans()) if decided is None else decided
        self.log.mark(marker(*items, epoch=epoch, lwm=lwm, decided=decided, coordinator=most))


class _OddWriter(_Writer):
    """As on a cluster: batches of the broker are usual; some messages stop the topic, which no `Event` says."""

    KINDS = (*_Writer.KINDS, "packed", "packed", "packed", "packed", "emptied", "copied", "stopping")

    def packed(self) -> None:
        for index in range(self.draw(st.integers(1, 5))):
            if self.draw(st.integers(0, 5)) == 0:
                item = self._item(self.txn())
                ended = marker(item, epoch=self.draw(st.integers(1, 3)), coordinator=item[0].most)
                self.log._add(encode_marker(ended), index, marker=ended)
                continue
            txn = self.draw(st.sampled_from([None, *self.ids]))
            if self.draw(st.integers(0, 9)) == 0:  # record sets are never in a batch
                self.log._add(record(txn, 1, size=2), index, bad=True)
                continue
            self.log.member(txn, 0 if txn is None else self._advance(txn, 1), index)
        self.log.next_entry()

    def emptied(self) -> None:
        """A record, or a record set, that compaction has emptied."""
        message = record(self.txn(), self.draw(st.integers(1, 4)), size=self.draw(st.sampled_from([None, 2])))
        self.log._add(Message(None, b"", {**message.properties, REMOVED: "1"}))

    def copied(self) -> None:
        """A record with properties that a program copied from another topic, alone or in a batch."""
        seq = self.draw(st.sampled_from([1, 1, 2, 3, 9]))
        self.log._add(record(self.txn(), seq), batch=self.draw(st.sampled_from([-1, 0])))
        if self.log.events[-1].position.batch == 0:
            self.log.next_entry()

    def stopping(self) -> None:
        """Rarely, since nothing after it is read."""
        getattr(self, self.draw(st.sampled_from(["damaged", "damaged", "newer", "border", "unreadable"])))()

    def damaged(self) -> None:
        """A marker of which some bytes are cut, changed or added: it may be another marker, or none."""
        ended = marker(self._item(TxnId(0, 1)), self._item(TxnId(0, 2)), decided=self.draw(st.booleans()))
        value = bytearray(encode_marker(ended).value or b"")
        for kind, at, byte in self.draw(st.lists(DAMAGES, max_size=3)):
            damage(value, kind, at, byte)
        self.log._add(Message(None, bytes(value), encode_marker(ended).properties))

    def newer(self) -> None:
        version = self.draw(st.sampled_from(["2", "", "01", "x"]))
        self.log._add(Message(b"k", b"v", {**record(self.txn()).properties, VERSION: version}))

    def unreadable(self) -> None:
        self.log._add(Message(None, self.draw(st.binary(max_size=40))), unreadable=True)

    def end_all(self) -> None:
        """Decide all that is open."""
        for txn in self.ids:
            self._mark(txn.most, [self._item(txn)], decided=True)


DAMAGES = st.tuples(st.sampled_from(["change", "change", "add", "cut"]), st.integers(0, 63), st.integers(0, 255))


def damage(value: bytearray, kind: str, at: int, byte: int) -> None:
    """Change, add or cut a byte, by its index modulo the length."""
    at %= len(value) + (kind == "add") or 1
    if kind == "add":
        value.insert(at, byte)
    elif kind == "cut":
        del value[at:]
    elif value:
        value[at] = byte


@st.composite
def histories(draw: st.DrawFn, max_steps: int = 30, *, odd: bool = False) -> History:
    """Short histories in which the rare interleavings are frequent: few ids, many repetitions.

    `odd`: with what the naive model does not know: emptied records, and messages that stop the topic.
    """
    ids = [TxnId(most, least) for most, least in draw(st.sampled_from(UNIVERSES))]
    writer = (_OddWriter if odd else _Writer)(draw, ids)
    trims: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, max_steps))):
        writer.step()
        if draw(st.integers(0, 9)) == 0:
            trims.append((len(writer.log.events), draw(st.integers(0, writer.log.ledger))))
    if isinstance(writer, _OddWriter) and draw(st.booleans()):
        writer.end_all()
    return History(writer.log, tuple(trims))


UNIVERSES = [
    [(0, 1), (0, 2), (0, 3)],
    [(0, 2), (0, 7), (1, 2)],
    [(0, 1), (0, 2), (0, 3), (0, 4), (2**63 - 1, 2**63 - 1)],
]

cuts = st.lists(st.integers(1, 40), min_size=1, max_size=4)
segment_sizes = st.sampled_from([1, 1, 2, 3, 5, 8000])
