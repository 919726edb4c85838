"""The rows of the conformance checklist about streams; rows 50 and 51 are with the failover log.

Rows 55 to 57 and 59 are about cursors and backfills, which the mutation manager hides.
"""

from __future__ import annotations

import pytest
from stream_rigs import LOG, ClientRig, ServerRig, W, facts, request, rows

from broker_io.errors import TooManyStreams
from txnbuffer.errors import (
    ConnectionSilent,
    ConnectionSuperseded,
    ForeignToken,
    SeqnoOutOfRange,
    StreamExists,
    StreamMemoryExhausted,
    StreamTrimmed,
)
from txnbuffer.streams.failover import FailoverLog, Version
from txnbuffer.streams.messages import (
    CloseCursor,
    CloseStream,
    EndConnection,
    EndReason,
    Goodbye,
    Grant,
    Noop,
    NoopAnswer,
    Ok,
    OpenCursor,
    Refused,
    RequestFlag,
    RollbackRequired,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamEnd,
    StreamMutations,
)
from txnbuffer.streams.server import Connections, ServerConfig, answer


def refusal(*asked: object, **known: object) -> type[Exception]:
    result = answer(*asked, facts(**known))  # type: ignore[arg-type]  # one request
    assert isinstance(result, Refused), result
    return type(result.error)


def test_row_52_purge() -> None:
    assert answer(request(start=100), facts(purge_seqno=200)) == RollbackRequired(1, 0)
    assert isinstance(answer(request(start=100, purge_seqno=200), facts(purge_seqno=200)), Ok)
    assert isinstance(answer(request(start=100, flags=RequestFlag.IGNORE_PURGED), facts(purge_seqno=200)), Ok)
    assert isinstance(answer(request(start=200), facts(purge_seqno=200)), Ok)


@pytest.mark.parametrize(("start", "purge", "continues"), [(100, 99, True), (100, 101, False), (0, 101, True)])
def test_row_52_purge_after_the_request(start: int, purge: int, continues: bool) -> None:
    rig = ServerRig()
    rig.open(request(start=start), facts())
    assert rig.server.scan_opens(1, purge) is continues
    assert rig.heard() == ([] if continues else [StreamEnd(1, EndReason.ROLLBACK)])
    assert not rig.server.scan_opens(2, 0), "a stream that is gone needs no scan"


def test_row_52_a_known_purge() -> None:
    rig = ServerRig()
    rig.open(request(), facts(purge_seqno=200))
    rig.snapshot(1, 1, 250, 5, ends=False)
    assert rig.server.scan_opens(1, 200)
    assert not rig.server.scan_opens(1, 201)


@pytest.mark.parametrize(("flags", "trimmed"), [(RequestFlag.NONE, 0), (RequestFlag.FROM_OLDEST, 50)])
def test_row_52_a_purge_before_anything_was_sent(flags: RequestFlag, trimmed: int) -> None:
    rig = ServerRig()
    rig.open(request(flags=flags), facts(purge_seqno=100, trimmed_seqno=trimmed))
    assert rig.server.scan_opens(1, 150)
    rig.snapshot(1, trimmed + 1, 60)
    assert rig.server.scan_opens(1, 200), "all of the first snapshot was emptied"
    rig.snapshot(1, 61, 250, 65, ends=False)
    assert rig.server.scan_opens(1, 200), "what it has was read after the purge"
    assert not rig.server.scan_opens(1, 201)


def test_row_53_only_the_marker_of_a_snapshot_was_seen() -> None:
    result = answer(request(start=300, snapshot_start=300, snapshot_end=301), facts())
    assert isinstance(result, Ok)
    assert (result.start, result.snapshot_start, result.snapshot_end) == (300, 300, 300)
    assert refusal(request(start=300, snapshot_start=301, snapshot_end=301)) is SeqnoOutOfRange
    assert refusal(request(start=300, snapshot_start=200, snapshot_end=299)) is SeqnoOutOfRange
    assert answer(request(start=301), facts()) == RollbackRequired(1, 300)
    assert refusal(request(start=301, end=300)) is SeqnoOutOfRange


def test_row_54_rollback_of_a_topic_ends_its_streams() -> None:
    rig = ServerRig()
    rig.open(request(1), facts())
    rig.open(request(2, topic="u"), facts())
    rig.server.end_topic("t", EndReason.ROLLBACK)
    assert rig.heard() == [StreamEnd(1, EndReason.ROLLBACK)]
    assert rig.effects()[1:] == [CloseCursor(1, EndReason.ROLLBACK)]
    assert [one.stream for one in rig.server.wanted()] == [2]


def test_row_58_a_reader_that_makes_no_progress_is_too_slow() -> None:
    rig = ServerRig(ServerConfig(slow_after=5.0))
    rig.open(request(), facts(high=2), granted=(1, 100))
    rig.snapshot(1, 1, 2, 1, ends=False)
    assert rig.server.statistics(1.5).streams[0].paused_current_duration == 1.5
    rig.server.advanced("t", 3, 3.0)  # more to send is no progress, nor is an empty grant
    rig.say(Grant(1, 1, 100), now=4.0)
    rig.server.tick(4.9)
    assert rig.heard() == []
    rig.server.tick(5.0)
    assert rig.heard() == [StreamEnd(1, EndReason.TOO_SLOW)]


def test_row_58_nothing_to_send_or_credits_in_time_is_not_slow() -> None:
    rig = ServerRig(ServerConfig(slow_after=5.0))
    rig.open(request(), facts(high=1), granted=(1, 100))
    rig.snapshot(1, 1, 1, 1)
    rig.server.tick(6.0)
    assert rig.heard() == []
    rig.server.advanced("t", 2, 6.0)
    rig.say(Grant(1, 2, 200), now=10.0)
    rig.server.tick(11.0)
    assert not any(isinstance(message, StreamEnd) for message in rig.heard())
    assert [one.items for one in rig.server.wanted()] == [1]


def test_row_60_numbers_of_streams_are_used_once() -> None:
    rig = ServerRig()
    rig.open(request(3), facts())
    rig.say(request(3))
    (refused,) = rig.heard()
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, StreamExists)
    assert [one.stream for one in rig.server.wanted()] == [3], "the stream that is there is unharmed"
    rig.say(CloseStream(3), request(3))
    (goodbye,) = rig.heard()
    assert isinstance(goodbye, Goodbye)


def test_row_60_no_memory_for_another_stream() -> None:
    assert refusal(request(), has_memory=False) is StreamMemoryExhausted
    rig = ServerRig(ServerConfig(max_streams=1))
    rig.open(request(1), facts())
    rig.say(request(2))
    (refused,) = rig.heard()
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, TooManyStreams)
    rig.say(CloseStream(1))
    assert isinstance(rig.open(request(3), facts())[0], Ok)


def test_row_61_a_whole_topic_then_the_stream_stays_open() -> None:
    rig = ServerRig()
    ok, *_ = rig.open(request(), facts(high=3))
    assert ok == Ok(1, LOG, 0, 0, 0, request().end, 3, 0, "c-1", "i-1")
    begin, mutations, end = rig.snapshot(1, 1, 3, 1, 3)
    assert begin == SnapshotBegin(1, 1, 3, SnapshotFlag.NONE)
    assert isinstance(mutations, StreamMutations)
    assert mutations.mutations.seqnos.tolist() == [1, 3]
    assert end == SnapshotEnd(1, 3, 3)
    assert rig.snapshot(1, 4, 5, 5)[0] == SnapshotBegin(1, 4, 5, SnapshotFlag.NONE)


def test_row_61_a_stream_ends_after_the_snapshot_that_holds_its_end() -> None:
    rig = ServerRig()
    rig.open(request(end=2), facts())
    assert rig.effects() == [OpenCursor(1, "t", 0, 2, 0)]
    assert rig.snapshot(1, 1, 1, 1)[-1] == SnapshotEnd(1, 1, 300)
    assert rig.snapshot(1, 2, 3, 3)[-1] == StreamEnd(1, EndReason.OK)
    assert rig.effects() == [CloseCursor(1, EndReason.OK)]


def test_row_61_nothing_is_left_to_send() -> None:
    rig = ServerRig()
    assert rig.open(request(start=5, end=5), facts())[-1] == StreamEnd(1, EndReason.OK)
    assert isinstance(rig.open(request(2, flags=RequestFlag.TO_NOW), facts(high=0))[-1], StreamEnd)


def test_row_61_a_partial_snapshot_is_completed_by_several() -> None:
    """The client has [100, 200] up to 150; the cursor's snapshots end at 170, 180 and 230."""
    rig = ServerRig()
    rig.open(request(start=150, snapshot_start=100, snapshot_end=200), facts())
    assert rig.effects() == [OpenCursor(1, "t", 150, request().end, 200)]
    begin, mutations = rig.snapshot(1, 151, 170, 160)
    assert begin == SnapshotBegin(1, 101, 200, SnapshotFlag.REPEATS)
    assert isinstance(mutations, StreamMutations)
    assert rig.snapshot(1, 171, 180) == [SnapshotBegin(1, 101, 200, SnapshotFlag.REPEATS)]
    begin, _, end = rig.snapshot(1, 181, 230, 181)
    assert begin == SnapshotBegin(1, 101, 230, SnapshotFlag.REPEATS)
    assert end == SnapshotEnd(1, 230, 300)
    assert rig.snapshot(1, 231, 231, 231)[0] == SnapshotBegin(1, 231, 231, SnapshotFlag.NONE)


def test_row_61_a_snapshot_whose_keys_repeat_begins_again_with_a_later_end() -> None:
    rig = ServerRig()
    rig.open(request(), facts())
    rig.server.snapshot_begins(1, 1, 10, repeats=True)
    assert rig.heard() == [SnapshotBegin(1, 1, 10, SnapshotFlag.REPEATS)]
    rig.server.mutations(1, rows(3), 0.0)
    rig.server.snapshot_begins(1, 1, 20, disk=True, repeats=True)
    assert rig.heard()[1:] == [SnapshotBegin(1, 1, 20, SnapshotFlag.DISK | SnapshotFlag.REPEATS)]
    rig.server.snapshot_ends(1)
    assert rig.heard() == [SnapshotEnd(1, 20, 300)]


def test_row_61_from_now_and_from_the_oldest() -> None:
    now = answer(request(start=7, snapshot_start=9, flags=RequestFlag.FROM_NOW | RequestFlag.TO_NOW), facts())
    assert isinstance(now, Ok)
    assert (now.start, now.snapshot_start, now.snapshot_end, now.end) == (300, 300, 300, 300)
    oldest = answer(request(flags=RequestFlag.FROM_OLDEST), facts(trimmed_seqno=40))
    assert isinstance(oldest, Ok)
    assert (oldest.start, oldest.snapshot_end) == (40, 40)
    assert refusal(request(), trimmed_seqno=40) is StreamTrimmed
    assert refusal(request(start=39), trimmed_seqno=40) is StreamTrimmed
    assert isinstance(answer(request(start=40), facts(trimmed_seqno=40)), Ok)


def test_row_61_a_re_created_topic_has_no_common_history() -> None:
    """Even if a version is equal: the client's data is of another topic."""
    assert answer(request(start=5, incarnation="i-0"), facts()) == RollbackRequired(1, 0)
    assert answer(request(start=5, incarnation="i-0", purge_seqno=9), facts(purge_seqno=9)) == RollbackRequired(1, 0)
    assert isinstance(answer(request(start=5, incarnation="i-1"), facts()), Ok)
    assert refusal(request(start=5, cluster="c-2")) is ForeignToken


def test_row_62_a_second_connection_of_a_name_closes_the_first() -> None:
    names = Connections()
    older, newer, nameless = ServerRig(name="indexer"), ServerRig(name="indexer"), ServerRig()
    older.open(request(), facts())
    assert names.named(older.server) is None
    assert names.named(nameless.server) is None
    assert names.named(newer.server) is older.server
    (goodbye,) = older.heard()
    assert isinstance(goodbye, Goodbye)
    assert isinstance(goodbye.error, ConnectionSuperseded)
    assert older.effects()[-1] == EndConnection(goodbye.error)
    names.closed(older.server)
    assert names.named(ServerRig(name="indexer").server) is newer.server, "the newer one still has the name"


def test_row_62_noop_is_sent_and_answered() -> None:
    rig = ServerRig()
    rig.server.tick(9.9)
    assert rig.heard(9.9) == []
    rig.server.tick(10.0)
    assert rig.heard(10.0) == [Noop()]
    rig.say(NoopAnswer(), now=19.0)
    rig.server.tick(20.0)
    assert not rig.server.closed, "an answer in time"


def test_row_62_noop_that_is_not_answered() -> None:
    rig = ServerRig()
    rig.server.tick(10.0)
    rig.heard(10.0)
    rig.server.tick(19.9)
    assert not rig.server.closed
    rig.server.tick(20.0)
    assert rig.server.closed
    goodbye = rig.heard()[-1]
    assert isinstance(goodbye, Goodbye)
    assert isinstance(goodbye.error, ConnectionSilent)


def test_row_62_a_suspended_server_sends_a_noop_before_it_gives_up() -> None:
    rig = ServerRig()
    rig.server.tick(1000.0)
    assert rig.heard(1000.0) == [Noop()]
    assert not rig.server.closed


def test_row_62_a_client_that_sends_gets_noops_too() -> None:
    rig = ServerRig()
    rig.say(CloseStream(9), now=9.0)
    rig.server.tick(10.0)
    assert rig.heard(10.0) == [Noop()]


def test_row_62_a_client_gives_up_after_two_silent_intervals() -> None:
    rig = ClientRig()
    assert rig.tell(Noop(), now=5.0) == []
    assert rig.said() == [NoopAnswer()]
    rig.client.tick(44.9)
    assert rig.client.take_events() == []
    rig.client.tick(45.0)
    (gone,) = rig.client.take_events()
    assert isinstance(gone, EndConnection)
    assert isinstance(gone.error, ConnectionSilent)


def test_row_62_flow_control() -> None:
    """Mutations and bytes are within the grant, except the bytes of the last one."""
    rig = ServerRig()
    rig.open(request(), facts(), granted=(0, 0))
    assert rig.server.wanted() == []
    rig.say(Grant(1, 3, 5))
    assert [tuple(one) for one in rig.server.wanted()] == [(1, 3, 5)]
    rig.snapshot(1, 1, 9, 1, ends=False)
    assert rig.server.wanted() == [], "k1 with three bytes is five"
    rig.say(Grant(1, 3, 50), Grant(1, 2, 40))
    assert [tuple(one) for one in rig.server.wanted()] == [(1, 2, 45)], "a grant that is late takes nothing back"
    with pytest.raises(ValueError, match="3 mutations exceed the grant of 2"):
        rig.server.mutations(1, rows(2, 3, 4), 0.0)


def test_row_62_many_streams_of_one_topic_take_turns() -> None:
    rig = ServerRig()
    for stream in range(1, 11):
        rig.open(request(stream), facts())
    firsts = [rig.server.wanted()[0].stream for _ in range(10)]
    assert sorted(firsts) == list(range(1, 11))
    for stream in range(1, 11):
        assert rig.snapshot(stream, 1, 1, 1)[-1] == SnapshotEnd(stream, 1, 300)


def test_row_62_close_and_open_again() -> None:
    rig = ServerRig()
    rig.open(request(1), facts())
    rig.effects()
    rig.say(CloseStream(1), CloseStream(1))
    assert rig.effects() == [CloseCursor(1, EndReason.CLOSED)]
    rig.server.snapshot_begins(1, 1, 1)
    rig.server.mutations(1, rows(1), 0.0)
    rig.server.snapshot_ends(1)
    assert rig.heard() == [], "what a cursor still gave goes nowhere"
    assert isinstance(rig.open(request(2, start=5), facts())[0], Ok)


def test_row_62_the_log_is_complete() -> None:
    log = FailoverLog((Version(0x12, 200), Version(0x11, 100), W))
    ok, *_ = ServerRig().open(request(start=50), facts(log=log))
    assert isinstance(ok, Ok)
    assert ok.log == log
