"""Readers with an end: `until` now, a position, a seqno or a time, against a naive model, and with faults."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.port import Reader
from broker_io.testing.disk import SimulatedClock
from txnbuffer import Position, connect
from txnbuffer.client.reading.ends import after, complete
from txnbuffer.client.reading.reader import ISOLATIONS, CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.client.reading.starts import Seqno
from txnbuffer.errors import InvalidRequest, ReplayStalled
from txnbuffer.recordset import pack

T = "orders"
UNCOMMITTED = "read_uncommitted"
ENDS = pytest.mark.timeout(120)  # instead of reading for ever


@dataclass
class Written:
    """One record of the log: `txn` is that of the model, None for an ordinary one."""

    position: Position
    value: str
    txn: int | None
    time: int


@dataclass
class Log:
    """A log, and all that was written to it."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    written: list[Written] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(clock=self.clock, ledger_entries=5)
        self.owner = LogOwner(self.broker)
        self.owner.recover()
        self.owner.register(T)
        self.writer = TopicWriter(self.broker, T)
        self._plain = self.broker.writer(T)
        self._txns = 0

    def do(self, step: tuple[str, int]) -> None:
        """Make one step, if it is possible."""
        kind, number = step
        value = str(len(self.written))
        if kind == "plain":
            self._add(self.writer.plain(value).first, value, None)
        elif kind == "set":
            packed = Batch.of([pack(Batch.of([Message(value=f"{value}.{n}".encode()) for n in range(3)]))])
            at = self._plain.append(packed).result(10).first
            for n in range(3):
                self._add(at._replace(batch=n), f"{value}.{n}", None)
        elif kind == "record":
            if number >= len(self.open):
                self._txns += 1
                self.open.append(self._txns)
            txn = self.open[min(number, len(self.open) - 1)]
            self._add(self.writer.records(txn, value).first, value, txn)
        elif kind in ("commit", "abort") and self.open:
            txn = self.open.pop(number % len(self.open))
            if kind == "abort":
                self.aborted.add(txn)
                self.writer.abort(txn)
            else:
                self.writer.commit(txn)
        elif kind == "snapshot":
            self.owner.pump()
            self.owner.snapshot(T)
        elif kind == "tick":
            self.clock.advance(1)

    def trim(self) -> None:
        """Drop all ledgers but the newest."""
        for _ in range(2):
            self.do(("snapshot", 0))
        newest = self.broker.ledgers(T)[-1].ledger
        assert self.owner.trim(T, newest) == newest

    def _add(self, position: Position, value: str, txn: int | None) -> None:
        self.written.append(Written(position, value, txn, self.clock.now_ms()))

    def visible(self) -> list[Written]:
        """What readers get now."""
        first_open = next((row for row, one in enumerate(self.written) if one.txn in self.open), len(self.written))
        return [one for one in self.written[:first_open] if one.txn not in self.aborted]

    def reader(self, **options: Any) -> CommittedReader:
        return CommittedReader(self.broker, T, clock=self.clock, **options)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["plain", "set", "record", "record", "commit", "commit", "abort", "snapshot", "tick"]),
        st.integers(0, 2),
    ),
    max_size=14,
)


def values(records: list[Record]) -> list[str]:
    return [record.value.decode() for record in records]


def rest(reader: CommittedReader, limit: int) -> list[str]:
    return values([record for batch in reader.batches(limit=limit) for record in batch])


@ENDS
@given(before=STEPS, later=STEPS, limit=st.sampled_from([1, 2, 100]), read_first=st.booleans())
def test_until_now_is_what_was_visible_at_the_opening(
    before: list[tuple[str, int]], later: list[tuple[str, int]], limit: int, read_first: bool
) -> None:
    log = Log()
    for step in before:
        log.do(step)
    expected = [one.value for one in log.visible()]
    everything = [one.value for one in log.written]
    with log.reader(until="now") as reader, log.reader(until="now", isolation=UNCOMMITTED) as uncommitted:
        found = [values([*batch]) if (batch := one.read(limit=limit)) else [] for one in (reader, uncommitted)]
        for step in later if read_first else []:
            log.do(step)
        assert found[0] + rest(reader, limit) == expected
        assert found[1] + rest(uncommitted, limit) == everything
        for step in later:
            log.do(step)
        assert reader.finished
        assert reader.read(timeout=1000) is None
        assert (log.clock.monotonic(), rest(reader, limit)) == (log.clock.monotonic(), [])
        reader.seek("beginning")
        assert rest(reader, limit) == [one.value for one in log.visible()]


@ENDS
@given(before=STEPS, later=STEPS, limit=st.sampled_from([1, 3, 100]), data=st.data())
def test_until_a_place_is_all_that_becomes_visible_up_to_there(
    before: list[tuple[str, int]], later: list[tuple[str, int]], limit: int, data: st.DataObject
) -> None:
    whole = Log()
    for step in [*before, *later, *[("commit", 0)] * 20, ("plain", 0)]:
        whole.do(step)
    row = data.draw(st.integers(0, len(whole.written) - 1))
    at = whole.written[row].position
    message = at._replace(batch=-1)
    time = whole.clock.now_ms() - 1000 * data.draw(st.integers(0, 5))
    shown = whole.visible()
    seqno = data.draw(st.integers(1, len(shown)))
    cases: list[tuple[Any, list[Written]]] = [
        (at, [one for one in shown if one.position <= at]),
        (message, [one for one in shown if one.position[:2] <= at[:2]]),
        (Seqno(seqno), shown[:seqno]),
        (datetime.fromtimestamp(time / 1000, UTC), [one for one in shown if one.time < time]),
    ]
    for until, expected in cases:
        log = Log()
        for step in before:
            log.do(step)
        with log.reader(until=until) as reader:
            found = [values([*batch]) if (batch := reader.read(limit=limit)) else []]
            for step in [*later, *[("commit", 0)] * 20, ("plain", 0)]:
                log.do(step)
            assert found[0] + rest(reader, limit) == [one.value for one in expected], until
        with whole.reader(start=until, until="now") as reader:
            first = {one.value for one in expected}
            begun = [one.value for one in shown if one.value not in first]
            if isinstance(until, datetime):  # two readers that meet at a time return everything once
                assert rest(reader, limit) == begun


def test_a_time_in_the_future_ends_when_it_has_come() -> None:
    log = Log()
    log.do(("plain", 0))
    until = datetime.fromtimestamp(log.clock.now_ms() / 1000 + 30, UTC)
    with log.reader(until=until) as reader:
        assert rest(reader, 10) == ["0"]
        assert 30 <= log.clock.monotonic() < 32
        assert reader.finished


def test_a_position_past_the_end_waits_until_it_is_visible() -> None:
    log = Log()
    log.do(("plain", 0))
    with log.reader(until=Position(log.written[0].position.ledger, 1)) as reader:
        assert [values([*batch]) for batch in reader.batches(timeout=5)] == [["0"]]
        assert not reader.finished
        log.do(("record", 0))
        assert reader.read() is None
        log.do(("plain", 0))
        log.do(("commit", 0))
        assert rest(reader, 10) == ["1"]


def test_what_is_held_back_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    for kind in ("plain", "record", "plain"):
        log.do((kind, 0))
    caplog.set_level(logging.WARNING, "txnbuffer.client")
    with log.reader(until="now") as reader:
        log.do(("commit", 0))
        assert values([*reader.records()]) == ["0"]
        (held,) = reader.held_back()
        assert (held.messages, str(held.txn)) == (1, "0:1")
        assert [record.getMessage() for record in caplog.records] == [str(held)]
    caplog.clear()
    log.do(("record", 0))
    log.do(("plain", 0))
    with log.reader(until=log.written[0].position) as reader:
        assert values([*reader.records()]) == ["0"]
        assert reader.held_back() == []
    assert caplog.records == []


def test_topics_without_records_end_at_once() -> None:
    log = Log()
    log.broker.create_topic("empty")
    log.owner.register("empty")
    with CommittedReader(log.broker, [T, "empty", "missing"], until="now", wait=True, clock=log.clock) as reader:
        assert [*reader.records()] == []
        assert reader.read(timeout=1000) is None
        assert log.clock.monotonic() < 1
    with pytest.raises(TopicNotFound):
        CommittedReader(log.broker, "missing", until="now")


def test_a_missing_topic_is_awaited_until_a_place_in_it() -> None:
    log = Log()
    with CommittedReader(log.broker, "later", until=Seqno(2), wait=True, clock=log.clock) as reader:
        assert reader.read(timeout=5) is None
        log.owner.register("later")
        TopicWriter(log.broker, "later").plain("a", "b", "c")
        assert rest(reader, 10) == ["a", "b"]


def test_partitions_have_ends_of_their_own_and_none_is_added() -> None:
    log = Log()
    log.broker.partition("wide", 2)
    writers = [TopicWriter(log.broker, f"wide-partition-{number}") for number in range(2)]
    for number, writer in enumerate(writers):
        writer.plain(*(f"{number}.{n}" for n in range(3)))
    with CommittedReader(log.broker, "wide", until="now", clock=log.clock) as reader:
        log.broker.partition("wide", 3)
        TopicWriter(log.broker, "wide-partition-2").plain("2.0")
        log.clock.advance(60)
        assert sorted(rest(reader, 10)) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    ends: dict[str, Any] = {"wide-partition-0": Seqno(1), "wide": "now"}
    with CommittedReader(log.broker, "wide", until=ends, clock=log.clock) as reader:
        assert sorted(rest(reader, 10)) == ["0.0", "1.0", "1.1", "1.2", "2.0"]
    with pytest.raises(InvalidRequest, match="until seqno 1 is in one partition of 'wide': give a until for each"):
        CommittedReader(log.broker, "wide", until=Seqno(1))


@pytest.mark.parametrize("until", ["end", 5, Position(-5, 0), {"other": "now"}, {T: "later"}, b"now"])
def test_other_ends_are_refused(until: Any) -> None:
    with pytest.raises(InvalidRequest, match="until"):
        Log().reader(until=until)


def test_a_seqno_needs_seqnos() -> None:
    with pytest.raises(InvalidRequest, match="has no seqnos here"):
        Log().reader(until=Seqno(3), isolation=UNCOMMITTED)


def test_records_that_are_trimmed_before_they_are_read_are_an_error() -> None:
    log = Log()
    for _ in range(12):
        log.do(("plain", 0))
    with log.reader(until="now") as reader:
        assert reader.read(limit=1) is not None
        log.broker.roll(T)
        log.do(("plain", 0))
        with log.reader(until="now") as late:
            log.trim()
            assert rest(late, 10) == ["12"]  # nothing was returned before, so it opens again
        with pytest.raises(PositionTrimmed):
            rest(reader, 1)


def test_an_uncommitted_reader_of_an_emptied_log_ends() -> None:
    log = Log()
    for _ in range(3):
        log.do(("plain", 0))
    log.broker.roll(T)
    log.trim()
    for isolation in ISOLATIONS:
        with log.reader(until="now", isolation=isolation) as reader:
            assert rest(reader, 10) == []


class SlowReader:
    """Returns nothing when it is read for the first time."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._late, self.close = reader, False, reader.close

    def read(self, **options: Any) -> Any:
        late, self._late = self._late, True
        return self._reader.read(**options) if late else None


def test_records_that_come_late_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before the snapshot are read from the log a second time."""
    log = Log()
    for kind in ("plain", "record", "commit", "plain", "snapshot"):
        log.do((kind, 0))
    opening = log.broker.reader

    def reader(topic: str, *arguments: Any, **options: Any) -> Any:
        found = opening(topic, *arguments, **options)
        return SlowReader(found) if topic == T else found

    monkeypatch.setattr(log.broker, "reader", reader)
    for isolation in ISOLATIONS:
        with log.reader(until="now", isolation=isolation) as one:
            assert rest(one, 1) == ["0", "1", "2"]
    monkeypatch.undo()


class SilentReader:
    """Returns no messages."""

    def __init__(self, clock: SimulatedClock, reader: Reader) -> None:
        self._clock, self.close = clock, reader.close

    def read(self, *, limit: int = 1, timeout: float = 0.0) -> None:
        self._clock.advance(timeout)


@ENDS
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_log_that_returns_nothing_is_an_error_and_no_end(isolation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of the moment exist, so a reader that does not get them has not reached the end."""
    log = Log()
    for kind in ("plain", "snapshot", "plain"):
        log.do((kind, 0))
    opening = log.broker.reader

    def reader(topic: str, *arguments: Any, **options: Any) -> Any:
        found = opening(topic, *arguments, **options)
        return SilentReader(log.clock, found) if topic == T else found

    monkeypatch.setattr(log.broker, "reader", reader)
    with log.reader(until="now", isolation=isolation) as reader_of_silence:
        for _ in range(2):
            with pytest.raises(ReplayStalled, match=r"nothing came after .* within 30 s"):
                rest(reader_of_silence, 10)
        assert not reader_of_silence.finished
        monkeypatch.undo()


@pytest.fixture(params=["memory:", "file:"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory:" else f"file:{tmp_path / 'log'}"


def test_both_clients_read_to_the_end(address: str) -> None:
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send_many("orders", [b"%d" % number for number in range(2500)])
        with client.reader("orders", until="now") as reader:
            client.send("orders", b"later")
            assert len(values([*reader.records()])) == 2500
            assert reader.finished
        asyncio_client = client.client

        async def read() -> list[int]:
            async with await asyncio_client.reader("orders", until="now") as one:
                batches = [len(batch) async for batch in one.batches(limit=1000)]
                assert one.finished
                assert await one.read(timeout=1000) is None
                await one.seek(Seqno(2000))
                return [*batches, len([record async for record in one.records()])]

        *batches, again = client.call(read)
        assert (sum(batches), again) == (2501, 502)


def test_rules_of_ends() -> None:
    whole, first, third = Position(1, 4), Position(1, 4, 0), Position(1, 4, 2)
    assert after(whole) == Position(1, 5)
    assert after(third) == Position(1, 4, 3)
    assert complete(whole, after(third), None)
    assert complete(Position(2, 0), after(whole), None)
    assert not complete(first, after(third), third)
    assert not complete(first, after(whole), third)
    assert complete(third, after(whole), third)
    assert not complete(Position(1, 3), after(whole), Position(1, 3))
