"""The server's side of streams: start and end of connections, frames, statistics, errors of the shell."""

from __future__ import annotations

import pytest
from stream_rigs import ServerRig, facts, request, rows

from broker_io.errors import TopicNotFound
from txnbuffer.errors import ConnectionSilent, StreamViolation
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseCursor,
    CloseStream,
    EndConnection,
    EndReason,
    FindTopic,
    Goodbye,
    Grant,
    NoopAnswer,
    Refused,
    StreamHello,
    StreamMutations,
)
from txnbuffer.streams.server import ServerConfig, StreamServer


@pytest.mark.parametrize(
    "messages",
    [
        (NoopAnswer(),),
        (request(),),
        (StreamHello("x" * 201, 10.0),),
        (StreamHello("", 0.0),),
        (StreamHello("", float("nan")),),
        (StreamHello("", 10.0), StreamHello("", 10.0)),
    ],
)
def test_a_connection_must_begin_with_one_valid_hello(messages: tuple[ClientMessage, ...]) -> None:
    server = StreamServer(ServerConfig(), 0.0)
    server.receive((*messages, request(5)), 0.0)
    (goodbye,) = server.take_frame(1, 0.0)
    assert isinstance(goodbye, Goodbye)
    assert isinstance(goodbye.error, StreamViolation)
    assert server.take_effects() == [EndConnection(goodbye.error)]
    assert server.closed


def test_a_connection_without_hello_is_ended() -> None:
    server = StreamServer(ServerConfig(hello_timeout=60.0), 0.0)
    server.tick(59.0)
    assert not server.closed
    server.tick(60.0)
    (goodbye,) = server.take_frame(1, 60.0)
    assert isinstance(goodbye, Goodbye)
    assert isinstance(goodbye.error, ConnectionSilent)


def test_a_topic_of_another_service_and_a_stream_closed_meanwhile() -> None:
    rig = ServerRig()
    rig.say(request(1), request(2), CloseStream(2))
    assert rig.effects() == [FindTopic(1, "t"), FindTopic(2, "t")]
    rig.server.topic_refused(1, TopicNotFound("no topic t"))
    rig.server.topic_refused(2, TopicNotFound("no topic t"))
    rig.server.topic_found(2, facts(), 0.0)
    (refused,) = rig.heard()
    assert isinstance(refused, Refused)
    assert refused.stream == 1
    assert rig.effects() == []


def test_a_lost_connection_closes_its_cursors() -> None:
    rig = ServerRig()
    rig.open(request(1), facts())
    rig.effects()
    rig.server.disconnected()
    assert rig.effects() == [CloseCursor(1, EndReason.DISCONNECTED)]
    rig.server.tick(100.0)
    rig.say(request(2))
    assert rig.heard() == []
    assert rig.server.wanted() == []


def test_frames_are_limited_by_bytes_and_have_at_least_one_message() -> None:
    rig = ServerRig()
    rig.open(request(), facts())
    rig.server.snapshot_begins(1, 1, 9)
    for seqno in range(1, 5):
        rig.server.mutations(1, rows(seqno, size=8), 0.0)
    counts = []
    while frame := rig.heard(max_bytes=25):
        counts.append(sum(isinstance(message, StreamMutations) for message in frame))
    assert counts == [2, 2]
    rig.server.mutations(1, rows(5, size=100), 0.0)
    assert len(rig.heard(max_bytes=25)) == 1


@pytest.mark.parametrize(
    ("begin", "given"), [((2, 4), ()), ((1, 0), ()), ((1, 4), (5,)), ((1, 4), (2, 1)), ((1, 4), (0,))]
)
def test_a_cursor_must_not_leave_a_gap_or_go_back(begin: tuple[int, int], given: tuple[int, ...]) -> None:
    rig = ServerRig()
    rig.open(request(), facts())
    with pytest.raises(ValueError, match=r"follow|not within"):
        rig.snapshot(1, *begin, *given)


def test_statistics_follow_a_stream() -> None:
    rig = ServerRig(name="indexer")
    rig.open(request(start=10), facts(high=20), granted=(5, 100))
    (before,) = rig.server.statistics(0.0).streams
    assert (before.state, before.cursor_registered, before.start_seqno, before.items_remaining) == (
        *("pending", True, 10),
        10,
    )
    rig.server.snapshot_begins(1, 11, 15, disk=True)
    rig.server.mutations(1, rows(11, 14), 0.0)
    waiting = rig.server.statistics(0.0)
    (part,) = waiting.streams
    assert (part.last_read_seqno, part.last_sent_seqno, part.items_ready) == (14, 10, 2)
    assert (waiting.items_ready, waiting.unacked_bytes, waiting.max_buffer_bytes) == (2, part.unacked_bytes, 100)
    assert (waiting.backfill_num_active, waiting.backfill_num_pending) == (1, 0)
    rig.heard()
    (part,) = rig.server.statistics(0.0).streams
    assert (part.state, part.last_sent_seqno, part.last_sent_snap_end_seqno) == ("backfilling", 14, 0)
    assert (part.last_read_seqno, part.items_ready) == (14, 0)
    rig.server.snapshot_ends(1)
    rig.snapshot(1, 16, 20, 18, 19, 20)
    rig.heard()
    whole = rig.server.statistics(7.0)
    (after,) = whole.streams
    assert (after.state, after.last_sent_seqno, after.last_sent_snap_end_seqno) == ("in-memory", 20, 20)
    assert (after.backfill_disk_items, after.backfill_mem_items, after.items_sent, after.bytes_sent) == (2, 3, 5, 30)
    assert (after.items_remaining, after.paused_current_reason) == (0, "")
    assert (after.unacked_items, after.unacked_bytes, after.max_buffer_items, after.max_buffer_bytes) == (5, 30, 5, 100)
    rig.server.advanced("t", 21, 2.0)
    (paused,) = rig.server.statistics(7.0).streams
    assert (paused.paused_current_reason, paused.paused_current_duration) == ("credits", 5.0)
    rig.say(Grant(1, 6, 110))
    (granted,) = rig.server.statistics(7.0).streams
    assert (granted.unacked_items, granted.unacked_bytes, granted.paused_current_reason) == (4, 20, "")
    rig.say(CloseStream(1))
    rig.open(request(2, start=99), facts(high=20))
    total = rig.server.statistics(7.0)
    assert (total.name, total.items_sent, total.bytes_sent, total.streams) == ("indexer", 5, 30, ())
    assert (total.streams_opened, total.rollbacks, total.stream_ends) == (1, 1, (("CLOSED", 1),))
