"""The loop that writes to a sink: what one write contains, rollbacks, and when it stops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from service_setup import engine_on, eventually
from sinks.sink_rigs import ListSink, Script, batch, row, token
from streamed import client_of, write

from broker_io.memory import MemoryBroker
from txnbuffer import Rollback, ServiceUnavailable
from txnbuffer.errors import ForeignSink, StreamTrimmed
from txnbuffer.sinks import runner
from txnbuffer.sinks.runner import SinkProgress, in_thread, run_sink


async def filled(script: Any, sink: ListSink, **options: Any) -> SinkProgress:
    return await run_sink(script, "t", sink, **options)


def seqnos(sink: ListSink) -> list[int]:
    return [row.seqno for row in sink.rows]


async def test_waiting_batches_are_written_at_once():
    sink, heard = ListSink(), []
    items = [batch(token(n), row(n, "a", "x"), caught_up=n == 5) for n in range(1, 6)]
    done = await filled(Script([*items, None]), sink, on_progress=lambda now: heard.append(now.token.seqno))
    assert (sink.writes, heard, seqnos(sink)) == ([5], [5], [1, 2, 3, 4, 5])
    assert (done.mutations, done.rollbacks, done.token, done.caught_up) == (5, 0, token(5), True)


async def test_a_large_snapshot_is_written_in_parts_after_earlier_batches(monkeypatch):
    monkeypatch.setattr(runner, "MAX_ROWS", 4)
    parts = [batch(token(n, 2, 20), row(n, f"{n}", "x")) for n in range(3, 11)]
    whole = [batch(token(1), row(1, "a", "x")), batch(token(2), row(2, "b", "x"))]
    sink, heard = ListSink(), []
    end = batch(token(20), row(20, "z", "x"))
    await filled(Script([*whole, *parts, end, None]), sink, on_progress=lambda now: heard.append(now.token))
    assert seqnos(sink) == [1, 2, *range(3, 11), 20]
    assert heard == [token(2), token(6, 2, 20), token(10, 2, 20), token(20)]


async def test_bytes_limit_a_write_too(monkeypatch):
    monkeypatch.setattr(runner, "MAX_BYTES", 100)
    parts = [batch(token(n, 0, 9), row(n, f"{n}", "x" * 60)) for n in range(1, 6)]
    sink = ListSink()
    await filled(Script([*parts, batch(token(9)), None]), sink)
    assert sink.writes == [2, 2, 2]


async def test_a_sink_continues_from_its_token():
    place = token(7, 5, 9)
    script, sink = Script([batch(token(9), row(9, "a", "x")), None]), ListSink(place)
    await filled(script, sink)
    assert (script.asked, seqnos(sink)) == ([place], [9])
    empty = Script([None])
    done = await filled(empty, ListSink())
    assert (empty.asked, done.token) == (["beginning"], None)


async def test_a_rollback_is_applied_and_reported_to_the_stream():
    back = Rollback("t", 6, token(9))
    items = [batch(token(5), row(5, "a", "x")), batch(token(9), row(9, "a", "y")), back]
    script, sink = Script([*items, batch(token(8), row(8, "b", "z")), None]), ListSink(points=(0, 5))
    done = await filled(script, sink)
    assert (script.undone, seqnos(sink)) == ([5], [5, 8])
    assert (done.rollbacks, done.token) == (1, token(8))


async def test_the_start_of_a_snapshot_is_dropped_if_it_is_rolled_back():
    back = Rollback("t", 6, token(9, 5, 12))
    items = [batch(token(5), row(5, "a", "x")), batch(token(9, 5, 12), row(9, "a", "y")), back]
    script, sink = Script([*items, batch(token(8), row(8, "b", "z")), None]), ListSink()
    await filled(script, sink)
    assert (script.undone, seqnos(sink)) == ([5], [5, 8])


async def test_a_discarded_sink_starts_over_from_the_oldest():
    back = Rollback("t", 0, token(9))
    script = Script([batch(token(9), row(9, "a", "y")), back], [batch(token(2), row(2, "b", "z")), None])
    sink = ListSink()
    done = await filled(script, sink)
    assert (script.asked, script.undone, seqnos(sink)) == (["beginning", "beginning"], [], [2])
    assert (done.rollbacks, done.mutations) == (1, 2)


async def test_a_sink_of_another_cluster_is_rejected():
    sink = ListSink(token(0))
    with pytest.raises(ForeignSink, match="the list holds topic 't' of cluster c-1, not c-2: use another sink"):
        await filled(Script([batch(token(3, cluster="c-2"), row(3, "a", "x"))]), sink)
    assert sink.rows == []


async def test_it_stops_on_request():
    stop = asyncio.Event()
    script, sink = Script([batch(token(1), row(1, "a", "x"))]), ListSink()
    done = await filled(script, sink, stop=stop, on_progress=lambda now: stop.set())
    assert (done.mutations, script.ran_dry) == (1, True)


@pytest.mark.parametrize("error", [ServiceUnavailable("gone"), StreamTrimmed("trimmed")])
def test_errors_of_the_stream_are_raised_and_writes_are_complete(error):
    sink = ListSink()
    with pytest.raises(type(error)):
        asyncio.run(filled(Script([batch(token(1), row(1, "a", "x")), error]), sink))
    assert sink.token is None
    again = Script([batch(token(1), row(1, "a", "x")), None])
    asyncio.run(filled(again, sink))
    assert (again.asked, seqnos(sink)) == (["beginning"], [1])


async def test_a_cancelled_caller_waits_for_the_sink():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append(1)

    task = asyncio.ensure_future(in_thread(work))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


async def test_a_sink_follows_an_engine_and_is_rejected_by_another():
    broker = MemoryBroker()
    sink = ListSink()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1", "b": "2"})
        await run_sink(client, "t", sink, to="now")
        assert seqnos(sink) == [1, 2]
        stop = asyncio.Event()
        following = asyncio.ensure_future(run_sink(client, "t", sink, stop=stop))
        await write(client, "t", {"c": "3"})
        await eventually(lambda: seqnos(sink) == [1, 2, 3])
        stop.set()
        assert (await following).caught_up
    other = MemoryBroker()
    async with engine_on(other) as engine, client_of(engine, other) as client:
        await write(client, "t", {"a": "1"})
        with pytest.raises(ForeignSink, match="the list has data of another log"):
            await run_sink(client, "t", sink)
    assert seqnos(sink) == [1, 2, 3]
