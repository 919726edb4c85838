"""Compares what plain consumers of a topic get with its committed records: `txnbuf verify --plain`

With the broker plug-in the two are the same. They are compared up to where the log was decided at the start, entry by
entry, because brokers give the messages of an entry other indexes if some of them are hidden. An entry of which only a
part is decided is left out: a plain consumer may get more of it by now. The properties of the log protocol are not
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TypeAlias

from broker_io.batch import PlacedBatch
from broker_io.environment import current
from broker_io.errors import InvalidAddress
from broker_io.port import READ_SECONDS, Broker, PlainBroker, PlainReader
from broker_io.position import Position
from txnbuffer.follow import read_existing, unpacked
from txnbuffer.progress import report
from txnbuffer.protocol import RESERVED
from txnbuffer.recovery.audit import CommittedLog

FIRST_DIFFERENCES = 10
POLL_SECONDS = 0.2

Row: TypeAlias = tuple[object, ...]
"""Key, value, event time, publish time and properties of a record."""


class Entry(NamedTuple):
    """The records of one entry of the log."""

    place: tuple[int, int]
    rows: list[Row]


class EntryDifference(NamedTuple):
    """An entry of which plain consumers do not get the committed records. `what`: missing, extra or different."""

    position: Position
    what: str
    committed: int
    plain: int


class PlainCheck(NamedTuple):
    """`records`: committed ones that were compared; `differences` has the first ones of `different` entries."""

    records: int
    different: int
    differences: tuple[EntryDifference, ...]


class Entries:
    """The entries of batches up to a place; `first` is the next one, None at the end."""

    def __init__(self, batches: Iterable[PlacedBatch], last: tuple[int, int]) -> None:
        self._entries = groupby((row for placed in batches for row in _rows(placed)), lambda row: row[0])
        self._last = last
        self.first: Entry | None = None
        self.advance()

    def advance(self) -> None:
        place, rows = next(self._entries, (None, ()))
        found = None if place is None or place > self._last else Entry(place, [row for _, row in rows])
        self.first = found


def verify_plain(broker: Broker, topic: str, timeout: float = READ_SECONDS) -> PlainCheck:
    """Compare a topic. A committed record that does not come in `timeout` seconds is missing.

    Raises InvalidAddress if the broker is no cluster, and what reading the log raises.
    """
    if not isinstance(broker, PlainBroker):
        raise InvalidAddress("plain consumers are those of a Pulsar cluster: give pulsar://HOST:PORT/TENANT/NAMESPACE")
    log = CommittedLog(broker, topic)
    last = _last_entry(broker, topic, log.last)
    committed = Entries((found.records for found in log.records()), last)
    records, different = 0, 0
    first: list[EntryDifference] = []
    with broker.plain_reader(topic) as reader, report("verification", "records", log.end - log.start + 1) as progress:
        plain = Entries(_plain(reader, lambda: committed.first is not None, timeout), last)
        while here := [one.first.place for one in (committed, plain) if one.first is not None]:
            wanted, got = (_taken(one, min(here)) for one in (committed, plain))
            records += len(wanted)
            progress.advance(len(wanted))
            if wanted != got:
                different += 1
                what = "extra" if not wanted else "missing" if not got else "different"
                first.append(EntryDifference(Position(*min(here)), what, len(wanted), len(got)))
                del first[FIRST_DIFFERENCES:]
    return PlainCheck(records, different, tuple(first))


def _taken(entries: Entries, place: tuple[int, int]) -> list[Row]:
    """The rows of the next entry, if that is this one, which is passed over then."""
    if entries.first is None or entries.first.place != place:
        return []
    rows = entries.first.rows
    entries.advance()
    return rows


def _last_entry(broker: Broker, topic: str, last: Position | None) -> tuple[int, int]:
    """The last entry whose messages are all decided, if `last` is the last one that is."""
    if last is None:
        return (-1, -1)
    placed = next(read_existing(broker, topic, last, broker.last_position(topic)), None)
    is_split = placed is not None and placed.positions.first[:2] == last[:2]
    return (last.ledger, last.entry - is_split)


def _plain(reader: PlainReader, is_wanted: Callable[[], bool], timeout: float) -> Iterator[PlacedBatch]:
    """What a plain reader gets, up to the end as the cluster says, or until what is wanted does not come."""
    clock = current().clock
    since = clock.monotonic()
    while True:
        placed = reader.read(timeout=POLL_SECONDS)
        if placed is not None:
            yield unpacked(placed)[0]
            since = clock.monotonic()
        elif clock.monotonic() - since > timeout or (not is_wanted() and reader.has_more() is False):
            return


def _rows(placed: PlacedBatch) -> Iterator[tuple[tuple[int, int], Row]]:
    batch = placed.messages
    properties = {name: column.to_list() for name, column in batch.properties.items() if not name.startswith(RESERVED)}
    times = [None] * len(batch) if batch.event_times is None else batch.event_times.tolist()
    shown = zip(batch.keys.to_list(), batch.values.to_list(), times, placed.publish_times.tolist(), strict=True)
    ledgers, entries = placed.positions.ledgers.tolist(), placed.positions.entries.tolist()
    for index, (ledger, entry, row) in enumerate(zip(ledgers, entries, shown, strict=True)):
        own = tuple((name, texts[index]) for name, texts in properties.items() if texts[index] is not None)
        yield (ledger, entry), (*row, *sorted(own))
