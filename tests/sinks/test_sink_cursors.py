"""The durable cursors of sinks and relays move only up to what is durable there."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from sinks.sink_rigs import ListSink, Script, batch, row, token
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch
from broker_io.errors import AppendUnknown
from broker_io.memory import MemoryBroker
from txnbuffer.client.streams import cursors as following
from txnbuffer.client.streams.cursors import CursorLease
from txnbuffer.errors import InvalidRequest, SeqnoOutOfRange, ServiceUnavailable, SinkFull, UnknownCursor
from txnbuffer.sinks import relay as relay_module
from txnbuffer.sinks import relay as relaying
from txnbuffer.sinks.relay import Relay, RelayCursor
from txnbuffer.sinks.relay_targets import OwnedTarget
from txnbuffer.sinks.runner import run_sink


class Cursors:
    """Records each move, and the seqno of the sink at that time."""

    def __init__(self, sink: ListSink) -> None:
        self.begun: list[Any] = []
        self.moves: list[tuple[int, int]] = []
        self._sink = sink

    async def add(self, topic: str, cursor: str, at: Any) -> int:
        self.begun.append(at)
        return 0

    async def advance(self, topic: str, cursor: str, at: Any) -> int:
        assert self._sink.token is not None
        self.moves.append((at.seqno, self._sink.token.seqno))
        return int(at.seqno)


class Slow(ListSink):
    """A sink that is full at its third write."""

    def write(self, batches: Any) -> None:
        if len(self.writes) == 2:
            raise SinkFull("no room")
        super().write(batches)


async def test_a_sink_moves_its_cursor_up_to_what_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOVE_INTERVAL", 0.0)
    monkeypatch.setattr("txnbuffer.sinks.runner.MAX_ROWS", 1)
    items = [batch(token(number), row(number, "a", str(number))) for number in range(3, 8)]
    client, sink = Script(items), Slow(token(2))
    cursors = client.cursors = Cursors(sink)  # type: ignore[attr-defined]  # a client has some
    with pytest.raises(SinkFull):
        await run_sink(client, "t", sink, cursor="table")  # type: ignore[arg-type]  # a fake client
    assert cursors.begun == [token(2)]
    assert cursors.moves[-1] == (4, 4)
    assert all(moved <= held for moved, held in cursors.moves)
    again = Script([None])
    cursors = again.cursors = Cursors(ListSink())  # type: ignore[attr-defined]  # a client has some
    await run_sink(again, "t", ListSink(), cursor="table")  # type: ignore[arg-type]  # a fake client
    assert (cursors.begun, cursors.moves) == (["beginning"], [])


class Breaking(OwnedTarget):
    """A target that loses its third append and all later ones."""

    appends = 0

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        self.appends += 1
        if self.appends < 3:
            return super().append(batch, seqno)
        lost: Future[Any] = Future()
        lost.set_exception(AppendUnknown("the connection broke: open another writer"))
        return lost


class Service:
    """Records a relay's calls and the number of messages in its target; `raised` has errors by method."""

    def __init__(self, far: MemoryBroker) -> None:
        self.asked: list[tuple[str, Any, int]] = []
        self.raised: dict[str, list[Exception]] = {}
        self.far = far

    def __call__(self, broker: Any, method: str, question: dict[str, Any]) -> None:
        last = self.far.last_position("clean") if "clean" in self.far.topics() else None
        self.asked.append((method, question["at"], 0 if last is None else last.entry + 1))
        if self.raised.get(method):
            raise self.raised[method].pop()

    def moves(self) -> list[tuple[Any, int]]:
        return [(at, landed) for method, at, landed in self.asked if method == "AdvanceCursor"]


@pytest.fixture
def source() -> MemoryBroker:
    """A topic with six records, each of a transaction."""
    cluster = MemoryBroker()
    log, manager = TopicWriter(cluster, "t"), LogOwner(cluster.connect())
    manager.recover()
    manager.register("t")
    for number in range(1, 7):
        log.records(number, str(number))
        log.commit(number)
        manager.pump()
    return cluster


def relay(source: MemoryBroker, target: OwnedTarget, service: Service) -> Relay:
    return Relay(source.connect, "t", target, max_unavailable=0.0, cursor=RelayCursor(service, "t", "relay"))


def test_a_relay_moves_its_cursor_up_to_what_its_target_has(
    source: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "RECORDS", 1)
    monkeypatch.setattr(relay_module, "MOVE_INTERVAL", 0.0)
    far = MemoryBroker()
    service = Service(far)
    with pytest.raises(AppendUnknown):
        relay(source, Breaking(far.connect, "clean"), service).run(follow=False)
    assert service.asked[0] == ("AddCursor", "beginning", 0)
    assert service.moves() == [(1, 2), (2, 2)]
    service = Service(far)
    relay(source, OwnedTarget(far.connect, "clean"), service).run(follow=False)
    assert service.asked[0] == ("AddCursor", 2, 2)
    assert service.moves()[-1] == (6, 6)
    assert all(moved <= landed for moved, landed in service.moves())


def test_a_relay_moves_its_cursor_rarely_and_at_its_end(source: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "RECORDS", 1)
    monkeypatch.setattr(relay_module, "MOVE_INTERVAL", 3600.0)
    far = MemoryBroker()
    service = Service(far)
    service.raised = {"AdvanceCursor": [ServiceUnavailable("away")]}
    relay(source, OwnedTarget(far.connect, "clean"), service).run(follow=False)
    assert [at for at, _ in service.moves()] == [1, 6]


def test_a_relay_that_has_caught_up_moves_its_cursor_to_the_end(
    source: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "RECORDS", 1)
    monkeypatch.setattr(relay_module, "MOVE_INTERVAL", 0.3)
    service = Service(MemoryBroker())
    polls: list[bool] = []

    def stop() -> bool:
        polls.append((6, 6) in service.moves())
        return polls[-1] or len(polls) > 300

    relay(source, OwnedTarget(service.far.connect, "clean"), service).run(stop=stop)
    assert polls[-1]


def test_a_relay_whose_cursor_was_dropped_ends(source: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MOVE_INTERVAL", 0.0)
    far = MemoryBroker()
    service = Service(far)
    service.raised = {"AdvanceCursor": [UnknownCursor("it was dropped")]}
    with pytest.raises(UnknownCursor, match="dropped"):
        relay(source, OwnedTarget(far.connect, "clean"), service).run(follow=False)


def test_if_the_service_is_behind_the_relay_everything_is_kept(source: MemoryBroker) -> None:
    far = MemoryBroker()
    relay(source, OwnedTarget(far.connect, "clean"), Service(far)).run(follow=False)
    service = Service(far)
    service.raised = {"AddCursor": [SeqnoOutOfRange("it has mutations 1 to 4")]}
    relay(source, OwnedTarget(far.connect, "clean"), service).run(follow=False)
    asked = [row[:2] for row in service.asked]
    assert asked == [("AddCursor", 6), ("AddCursor", "beginning"), ("AdvanceCursor", 6)]


def test_a_relay_without_new_records_repeats_the_last_move(
    source: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MOVE_INTERVAL", 0.0)
    service = Service(MemoryBroker())
    cursor = RelayCursor(service, "t", "relay")
    cursor.begin(source, None)
    cursor.move_if_due()
    assert service.moves() == []
    cursor.begin(source, 4)
    for _ in range(3):
        cursor.move_if_due()
    assert service.moves() == [(4, 0)]  # an existing cursor may be before it
    monkeypatch.setattr(relay_module, "REPEAT_INTERVAL", 0.0)
    cursor.move_if_due()
    assert service.moves() == [(4, 0)] * 2


async def test_a_reader_without_new_records_repeats_the_last_move(monkeypatch: pytest.MonkeyPatch) -> None:
    cursors = Cursors(ListSink(token(9)))
    hold = CursorLease(cursors, "t", "table")  # type: ignore[arg-type]  # fake cursors
    await hold.begin(token(4))
    await hold.moved()
    await hold.moved()
    assert cursors.moves == [(4, 9)]
    monkeypatch.setattr(following, "RESEND_INTERVAL", 0.0)
    await hold.moved()
    assert cursors.moves == [(4, 9)] * 2
    monkeypatch.setattr(following, "RESEND_INTERVAL", 3600.0)
    await hold.close()
    assert cursors.moves == [(4, 9)] * 2


def test_only_a_service_keeps_cursors() -> None:
    from txnbuffer.cli.options import LogAddress
    from txnbuffer.cli.relay import _cursor
    from txnbuffer.config import Config

    log = LogAddress("file:log", Config())
    with pytest.raises(InvalidRequest, match="--service"):
        _cursor(log, "t", "relay", None)
    assert _cursor(log, "t", "relay", "127.0.0.1:7711") is not None
