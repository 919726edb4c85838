"""A picture of the log of a topic: its messages, which transaction each is of, and what readers get

One row is one message. Each transaction has a column from its first record to its marker; columns are used again, and
when all are in use, a further transaction has none. The same rows are drawn as text for a terminal and as SVG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import click

from broker_io.batch import PlacedBatch, PlacedMessage
from broker_io.port import Broker
from broker_io.position import NO_INDEX, Position
from snapshots.format import reaches
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import decided_rows, visible_counts
from txnbuffer.cli.output import escaped
from txnbuffer.cli.svg import WIDTH, Drawing, fitted, text_width
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import counted
from txnbuffer.follow import LogFollower, read_existing
from txnbuffer.model import EARLIEST, MarkerItem, TxnId
from txnbuffer.protocol import MARKER, RECORDS, REMOVED, SEQ, TXN, decode_marker
from txnbuffer.recovery.restore import load

COLUMNS = 8
"""The most transactions that have a column at the same time."""
GLYPHS = {"record": "●", "ordinary": "○", "commit": "✓", "abort": "✗", "through": "│", "": " "}
TEXT_COLOURS = {"good": "green", "bad": "red", "wait": "yellow"}
CONTENT_BYTES = 200
"""The bytes of a key and of a value that are shown at most."""
HEADERS = ("position", "transactions", "message", "readers get")
SUPPRESSED = "suppressed"
ROW = 26
LIMIT = 28
"""Pixels of a row, and of the line of maxReadPosition."""
PAD = 16


class LogRow(NamedTuple):
    """One message. `cells`: what each column shows, and in which colour; `got`: what readers get, and its colour."""

    position: Position
    text: str
    cells: list[tuple[str, str]]
    got: str
    colour: str


@dataclass(slots=True)
class LogPicture:
    """Messages of a topic in log order. `max_read_position`: None if nothing is decided.

    `end`: the last position of the log. `waits_for`: the oldest open transaction. `more`: the first position that
    follows the rows, None at the end of the log.
    """

    topic: str
    rows: list[LogRow]
    max_read_position: Position | None
    waits_for: TxnId | None
    more: Position | None = None

    @property
    def decided(self) -> int:
        """The number of rows, from the first, up to maxReadPosition."""
        limit = self.max_read_position
        return 0 if limit is None else sum(row.position <= limit for row in self.rows)

    @property
    def width(self) -> int:
        """The number of columns."""
        return max((len(row.cells) for row in self.rows), default=0)

    @property
    def summary(self) -> list[str]:
        """What the whole picture says."""
        messages = counted(len(self.rows), "message")
        everything = f"A consumer without this library gets {'it' if len(self.rows) == 1 else f'all {messages}'}."
        if self.waits_for is None:
            return [everything]
        return [f"Below maxReadPosition readers wait for the end of transaction {self.waits_for}.", everything]


def stored_messages(broker: Broker, topic: str, first: Position, limit: int) -> Iterator[PlacedBatch]:
    """Up to `limit` messages of a topic from a position on, in batches, to the present end of its log."""
    before = first if first == EARLIEST else Position(first.ledger, first.entry - 1)
    for placed in read_existing(broker, topic, before, broker.last_position(topic)):
        found = placed.take(slice(placed.positions.search(first), None)).take(slice(limit))
        limit -= len(found)
        yield found
        if limit <= 0:
            return


def read_picture(broker: Broker, topic: str, first: Position, limit: int) -> LogPicture:
    """The picture of up to `limit` messages of a topic. Raises as readers of the topic do."""
    loaded = load(broker, topic)
    buffer = loaded.buffer
    with LogFollower(broker, topic, buffer, loaded.resume) as follower:
        follower.replay()
    batches = [placed for placed in stored_messages(broker, topic, first, limit + 1) if len(placed)]
    oldest = buffer.ongoing.oldest()
    picture = LogPicture(topic, [], buffer.max_read_position, None if oldest is None else oldest.txn)
    columns, seqnos = PictureColumns(buffer), _seqnos(broker, topic, batches, buffer)
    for placed in batches:
        counts, decided = visible_counts(placed, buffer).tolist(), decided_rows(placed, buffer)
        for number, message in enumerate(placed):
            if len(picture.rows) == limit:
                picture.more = message.position
                break
            got = _got(message, seqnos, counts[number], decided=number < decided, buffer=buffer)
            cells = columns.row(message, late=got[0] == SUPPRESSED)
            picture.rows.append(LogRow(message.position, message_text(message), cells, *got))
    return picture


def _seqnos(
    broker: Broker, topic: str, batches: Sequence[PlacedBatch], buffer: TransactionBuffer
) -> dict[Position, list[int | None]]:
    """The seqnos of the records that readers get of each message, by its position."""
    found: dict[Position, list[int | None]] = {}
    limit = buffer.max_read_position
    if not batches or limit is None or batches[0].positions.first > limit:
        return found
    last = min(batches[-1].positions.last, limit)
    in_sets = {place[:2] for placed in batches for place in placed.positions if place.batch == NO_INDEX}
    with CommittedReader(broker, topic, start=batches[0].positions.first) as reader:
        while (records := reader.read()) is not None:
            for record in records:
                ledger, entry, index = record.position
                place = Position(ledger, entry, NO_INDEX if (ledger, entry) in in_sets else index)
                found.setdefault(place, []).append(record.seqno)
            if reaches(records.positions.last, last):
                break
    return found


def _got(
    message: PlacedMessage,
    seqnos: Mapping[Position, Sequence[int | None]],
    count: int,
    *,
    decided: bool,
    buffer: TransactionBuffer,
) -> tuple[str, str]:
    """What readers get of a message, and its colour."""
    properties = message.message.properties
    if MARKER in properties:
        return "", ""
    if not decided:
        return "waits", "wait"
    if count:
        of = [seqno for seqno in seqnos.get(message.position, ()) if seqno is not None]
        if REMOVED in properties:
            return "emptied", "soft"
        if not of:
            return counted(count, "record"), "good"
        return (f"seqno {of[0]}" if len(of) == 1 else f"seqno {of[0]} to {of[-1]}"), "good"
    txn = _txn(properties)
    return "aborted" if txn is not None and buffer.is_aborted(txn) else SUPPRESSED, "bad"


def _txn(properties: Mapping[str, str]) -> TxnId | None:
    try:
        return TxnId.parse(properties[TXN])
    except (KeyError, ValueError):
        return None


class PictureColumns:
    """The columns of transactions, from row to row."""

    def __init__(self, buffer: TransactionBuffer) -> None:
        self._buffer = buffer
        self._columns: list[TxnId | None] = []

    def row(self, message: PlacedMessage, *, late: bool) -> list[tuple[str, str]]:
        """What each column shows for the next message; `late`: it is a record that begins no transaction."""
        properties = message.message.properties
        cells = [("through" if txn else "", self._colour(txn)) for txn in self._columns]
        if MARKER in properties:
            for ended, outcome, _ in _ends(message.message.value):
                if ended in self._columns:
                    at = self._columns.index(ended)
                    cells[at] = (outcome.name.lower(), self._colour(ended))
                    self._columns[at] = None
            return cells
        txn = _txn(properties)
        column = self._columns.index(txn) if txn is not None and txn in self._columns else self._free()
        if column is None:
            return cells
        if column == len(self._columns):
            self._columns.append(None)
        if txn is None or late:
            cell = ("ordinary", "soft")
        else:
            cell = ("record", self._colour(txn))
            self._columns[column] = txn
        return [*cells[:column], cell, *cells[column + 1 :]]

    def _free(self) -> int | None:
        """The first column without a transaction; None if all are in use."""
        if None in self._columns:
            return self._columns.index(None)
        return len(self._columns) if len(self._columns) < COLUMNS else None

    def _colour(self, txn: TxnId | None) -> str:
        """Good: committed; bad: aborted; wait: open."""
        if txn is None:
            return ""
        if self._buffer.is_aborted(txn):
            return "bad"
        return "good" if self._buffer.has_ended(txn) else "wait"


def _ends(value: bytes | None) -> tuple[MarkerItem, ...]:
    """The transactions that a marker ends; none of one that cannot be decoded."""
    try:
        return decode_marker(value).items
    except ValueError:
        return ()


def message_text(message: PlacedMessage) -> str:
    """What a message is, in a few words."""
    key, value, properties, _ = message.message
    if MARKER in properties:
        ended = [f"{outcome.name} {txn}" for txn, outcome, _ in _ends(value)]
        return f"marker {', '.join(ended) or 'of an epoch'}"
    of = f"{properties[TXN]} seq {properties.get(SEQ, '?')}" if TXN in properties else ""
    shown = ""
    if RECORDS in properties:
        shown = f"{properties[RECORDS]} records"
    elif REMOVED not in properties:
        content = "(deleted)" if value is None else escaped(value[:CONTENT_BYTES])
        shown = content if key is None else f"{escaped(key[:CONTENT_BYTES])}={content}"
    return ", ".join(filter(None, (of, shown)))


def as_text(picture: LogPicture, width: int | None, *, coloured: bool) -> Iterator[str]:
    """The lines of the picture in at most `width` characters; None: nothing is cut."""
    places = [str(row.position) for row in picture.rows]
    columns = max(len(HEADERS[1]), 2 * picture.width)
    indents = max(map(len, (HEADERS[0], *places))) + 2, columns + 2
    most = max(map(len, (HEADERS[2], *(row.text for row in picture.rows))))
    got = max(map(len, (HEADERS[3], *(row.got for row in picture.rows))))
    message = most if width is None else max(min(most, width - sum(indents) - got - 2), 8)

    def line(place: str, cells: str, text: str, readers: str) -> str:
        cut = text if len(text) <= message else f"{text[: message - 1]}…"
        return f"{place:<{indents[0]}}{cells}{cut:<{message}}  {readers}".rstrip()

    def styled(text: str, colour: str) -> str:
        return click.style(text, TEXT_COLOURS[colour]) if coloured and colour in TEXT_COLOURS else text

    yield line(HEADERS[0], f"{HEADERS[1]:<{indents[1]}}", *HEADERS[2:])
    limit = f"── maxReadPosition {picture.max_read_position or 'is before the first message'} "
    limit += "─" * (sum(indents) + message + 2 + got - len(limit))
    for number, (place, row) in enumerate(zip(places, picture.rows, strict=True)):
        if number == picture.decided:
            yield limit
        cells = "".join(f"{styled(GLYPHS[kind], colour)} " for kind, colour in row.cells)
        yield line(place, cells + " " * (indents[1] - 2 * len(row.cells)), row.text, styled(row.got, row.colour))
    if picture.decided == len(picture.rows) and picture.more is None:
        yield limit
    yield "● record of a transaction  ○ other record  ✓ commit  ✗ abort"
    yield from picture.summary


def as_drawing(picture: LogPicture, name: str) -> Drawing:
    """The picture as a drawing, in which a text that is too long is cut."""
    drawing = Drawing(name, f"The log of topic {picture.topic}", " ".join(picture.summary))
    drawing.text(PAD, 28, f"topic {picture.topic}", style="bold")
    top = 56
    place = max(text_width(str(row.position), mono=True) for row in picture.rows) if picture.rows else 0
    columns = PAD + round(max(place, text_width(HEADERS[0]))) + 14
    texts, plain = columns + round(max(picture.width * 18, text_width(HEADERS[1]))) + 8, WIDTH - PAD - 34
    readers = plain - 92
    for x, header in zip((PAD, columns - 6, texts, readers), HEADERS, strict=True):
        drawing.text(x, top, header, "soft")
    drawing.text(WIDTH - PAD, top, "others", "soft", anchor="end")
    tops = [
        top + 12 + number * ROW + (LIMIT if number >= picture.decided else 0) for number in range(len(picture.rows))
    ]
    for y in tops[picture.decided :]:
        drawing.box(PAD - 6, y + 1, WIDTH - 2 * PAD + 12, ROW - 2, "", "wait-fill")
    if picture.decided < len(tops) or picture.more is None:
        _limit(drawing, picture, top + 12 + picture.decided * ROW)
    for number, (y, row) in enumerate(zip(tops, picture.rows, strict=True)):
        base, middle = y + 17, y + ROW / 2
        drawing.text(PAD, base, str(row.position), "soft", style="mono")
        _cells(drawing, picture, number, columns, y)
        drawing.text(texts, base, fitted(row.text, readers - texts - 6))
        drawing.text(readers, base, row.got, row.colour or "soft")
        drawing.dot(WIDTH - PAD - 18, middle, "soft", radius=3.5)
    drawing.lines(PAD, drawing.bottom + 24, picture.summary, "soft")
    return drawing


def _limit(drawing: Drawing, picture: LogPicture, y: float) -> None:
    """The line of maxReadPosition above the row at `y`."""
    label = f"maxReadPosition {picture.max_read_position or 'is before the first message'}"
    drawing.line([(PAD - 6, y + 14), (WIDTH - PAD + 6, y + 14)], "main", width=2)
    width = text_width(label) + 8
    drawing.box(WIDTH - PAD - width, y + 4, width, 20, "main", "main-fill")
    drawing.text(WIDTH - PAD - width / 2, y + 18.5, label, "main", anchor="middle")


def _cells(drawing: Drawing, picture: LogPicture, number: int, left: float, y: float) -> None:
    """What the columns show of a row, and their lines to the row below."""
    rows = picture.rows
    below = rows[number + 1].cells if number + 1 < len(rows) else []
    gap = LIMIT if number + 1 == picture.decided and number + 1 < len(rows) else 0
    for at, (kind, colour) in enumerate(rows[number].cells):
        x, middle = left + at * 18 + 5, y + ROW / 2
        if kind in ("record", "through"):
            continues = at < len(below) and below[at][0] in ("record", "through", "commit", "abort")
            bottom = middle + ROW + gap if continues else y + ROW + 8
            drawing.line([(x, middle), (x, bottom)], colour, width=2, dashed=not continues)
        if kind in ("record", "ordinary"):
            drawing.dot(x, middle, colour, filled=kind == "record")
        elif kind in ("commit", "abort"):
            drawing.box(x - 7, middle - 7, 14, 14, colour, f"{colour}-fill", radius=3)
            drawing.line(
                [(x - 3.5, middle), (x - 1, middle + 3), (x + 4, middle - 3.5)] if kind == "commit"
                else [(x - 3, middle - 3), (x, middle), (x + 3, middle - 3), (x, middle), (x + 3, middle + 3),
                      (x, middle), (x - 3, middle + 3)],
                colour,
            )  # fmt: skip
