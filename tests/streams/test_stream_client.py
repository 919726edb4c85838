"""The client's side of streams, with messages that a server sends, and with ones that it must not send."""

from __future__ import annotations

import pytest
from stream_rigs import ClientRig, W, rows

from broker_io.errors import TopicNotFound
from txnbuffer.errors import (
    ForeignToken,
    InvalidRequest,
    StreamClosed,
    StreamMemoryExhausted,
    StreamTooSlow,
    StreamTrimmed,
    StreamViolation,
)
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import ResumeToken, Version
from txnbuffer.streams.messages import (
    NO_END,
    CaughtUp,
    CloseStream,
    Completed,
    Delivered,
    EndConnection,
    EndReason,
    Goodbye,
    Grant,
    Interrupted,
    Refused,
    RequestFlag,
    RollbackReceived,
    RollbackRequired,
    ServerMessage,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamEnd,
    StreamEnded,
    StreamHello,
    StreamMutations,
    StreamOpened,
    StreamRequest,
)

PART = ResumeToken("t", "c-1", "i-1", (W,), 150, 100, 200)


def begin(start: int, end: int, stream: int = 1) -> SnapshotBegin:
    return SnapshotBegin(stream, start, end, SnapshotFlag.NONE)


def some(*seqnos: int, stream: int = 1, size: int = 3) -> StreamMutations:
    return StreamMutations(stream, rows(*seqnos, size=size))


def request_of(rig: ClientRig) -> StreamRequest:
    (found,) = (message for message in rig.said() if isinstance(message, StreamRequest))
    return found


def test_the_first_messages_of_a_connection() -> None:
    rig = ClientRig(PART, config=ClientConfig("indexer", 10, 1000, 5.0))
    assert rig.first == [
        StreamHello("indexer", 5.0),
        StreamRequest(1, "t", 150, NO_END, (W,), 100, 200, RequestFlag.NONE, "c-1", "i-1", 0),
        Grant(1, 10, 1000),
    ]


def test_a_snapshot_from_its_beginning_to_its_end() -> None:
    rig = ClientRig()
    (opened,) = rig.ok(high=4)
    assert isinstance(opened, StreamOpened)
    assert (opened.token.cluster, opened.token.incarnation, opened.token.versions) == ("c-1", "i-1", (W,))
    assert rig.tell(begin(1, 4)) == []
    first, second = rig.tell(some(1), some(3, 4))
    assert isinstance(first, Delivered)
    assert isinstance(second, Delivered)
    assert (first.token.seqno, first.token.snapshot_start, first.token.snapshot_end) == (1, 0, 4)
    assert not first.token.complete
    done, caught_up = rig.tell(SnapshotEnd(1, 4, 4))
    assert isinstance(done, Completed)
    assert (done.token.seqno, done.token.snapshot_start, done.token.complete) == (4, 4, True)
    assert isinstance(caught_up, CaughtUp)


def test_caught_up_is_reported_once_each_time() -> None:
    rig = ClientRig()
    assert [type(event) for event in rig.ok(high=0)] == [StreamOpened, CaughtUp]
    assert [type(event) for event in rig.tell(begin(1, 1), SnapshotEnd(1, 1, 1))] == [Completed]
    assert [type(event) for event in rig.tell(begin(2, 2), SnapshotEnd(1, 2, 3))] == [Completed]
    assert [type(event) for event in rig.tell(begin(3, 3), SnapshotEnd(1, 3, 3))] == [Completed, CaughtUp]


def test_a_snapshot_whose_end_was_lost_is_complete_after_reopening() -> None:
    rig = ClientRig(PART.reached(200))
    opened, done = rig.ok(200)
    assert isinstance(opened, StreamOpened)
    assert isinstance(done, Completed)
    assert done.token.snapshot_start == 200


def test_it_requests_the_rest_of_a_snapshot_with_its_bounds() -> None:
    rig = ClientRig()
    rig.ok()
    rig.tell(begin(1, 9), some(2))
    rig.client.disconnected()
    rig.client.connected(1.0)
    asked = request_of(rig)
    assert (asked.stream, asked.start, asked.snapshot_start, asked.snapshot_end) == (1, 2, 0, 9)
    rig.ok(2, snapshot_start=0, snapshot_end=9)
    (moved,) = rig.tell(begin(1, 12), some(5))
    assert isinstance(moved, Delivered)
    assert (moved.token.snapshot_start, moved.token.snapshot_end) == (0, 12)


@pytest.mark.parametrize(
    "messages",
    [
        (some(1),),
        (begin(2, 4),),
        (begin(1, 4), some(5)),
        (begin(1, 4), some(2), some(2)),
        (begin(1, 9), some(3, 2)),
        (begin(1, 4), SnapshotEnd(1, 3, 4)),
        (begin(1, 4), some(2), begin(1, 3)),
        (begin(1, 4), SnapshotEnd(1, 4, 4), begin(1, 4)),
        (SnapshotEnd(1, 4, 4),),
        (RollbackRequired(1, 0),),
        (StreamEnd(1, EndReason.OK),),
        (begin(1, 4), StreamEnd(1, EndReason.OK)),
    ],
)
def test_a_stream_that_violates_the_protocol_ends_for_good(messages: tuple[ServerMessage, ...]) -> None:
    rig = ClientRig()
    rig.ok()
    *_, ended = rig.tell(*messages)
    assert isinstance(ended, StreamEnded)
    assert isinstance(ended.error, StreamViolation)
    assert rig.said()[-1] == CloseStream(1)
    assert rig.tell(some(9)) == [], "later messages of it are ignored"
    rig.client.tick(1000.0)
    assert not any(isinstance(message, StreamRequest) for message in rig.said())


def test_more_than_was_granted_violates_the_protocol() -> None:
    rig = ClientRig(config=ClientConfig("", 2, 1000))
    rig.ok()
    assert isinstance(rig.tell(begin(1, 9), some(1, 2))[0], Delivered)
    assert isinstance(rig.tell(some(3))[0], StreamEnded)


def test_a_message_for_a_stream_that_was_never_requested_ends_the_connection() -> None:
    rig = ClientRig()
    (gone,) = rig.tell(begin(1, 1, stream=2), begin(1, 1))
    assert isinstance(gone, EndConnection)
    assert isinstance(gone.error, StreamViolation)


def test_row_54_the_reader_rolls_back_and_requests_again() -> None:
    rig = ClientRig(ResumeToken("t", "c-1", "i-1", (Version(0x12, 120), W), 150, 150, 150, 40))
    (event,) = rig.tell(RollbackRequired(1, 110))
    assert isinstance(event, RollbackReceived)
    assert event.seqno == 110
    assert rig.said() == [], "nothing is asked before it is done"
    for wrong in (111, -1):
        with pytest.raises(InvalidRequest, match="must be 0 to 110"):
            rig.client.rolled_back(rig.handle, wrong, 1.0)
    rig.client.rolled_back(rig.handle, 90, 1.0)
    asked = request_of(rig)
    assert (asked.stream, asked.start, asked.versions, asked.purge_seqno) == (2, 90, (W,), 0)
    with pytest.raises(InvalidRequest, match="no rollback was requested"):
        rig.client.rolled_back(rig.handle, 0, 1.0)


def test_row_54_a_rollback_survives_the_connection() -> None:
    rig = ClientRig(PART)
    rig.tell(RollbackRequired(1, 100))
    rig.client.disconnected()
    rig.client.connected(1.0)
    assert not any(isinstance(message, StreamRequest) for message in rig.said())
    rig.client.rolled_back(rig.handle, 100, 1.0)
    assert request_of(rig).start == 100


def test_a_strict_reader_without_data_is_rolled_back_to_zero_only_once() -> None:
    rig = ClientRig(ResumeToken("t", versions=(W,)), flags=RequestFlag.STRICT)
    rig.tell(RollbackRequired(1, 0))
    rig.client.rolled_back(rig.handle, 0, 1.0)
    assert request_of(rig).versions == ()
    assert isinstance(rig.tell(RollbackRequired(2, 0))[0], StreamEnded)


def test_it_is_opened_again_after_any_unexpected_end() -> None:
    rig = ClientRig(config=ClientConfig(first_retry=1.0, last_retry=3.0, noop_interval=1000.0))
    waits = []
    now = 0.0
    for stream in range(1, 5):
        rig.ok()
        (interrupted,) = rig.tell(StreamEnd(stream, EndReason.TOO_SLOW), now=now)
        assert isinstance(interrupted, Interrupted)
        assert isinstance(interrupted.error, StreamTooSlow)
        due = rig.client.next_tick()
        assert due is not None
        rig.client.tick(due - 0.1)
        assert rig.said() == []
        rig.client.tick(due)
        assert request_of(rig).stream == stream + 1
        waits.append(due - now)
        now = due
    assert waits == [1.0, 2.0, 3.0, 3.0]


def test_progress_resets_the_delay() -> None:
    rig = ClientRig(config=ClientConfig(first_retry=1.0, last_retry=9.0))
    rig.ok()
    rig.tell(StreamEnd(1, EndReason.CLOSED))
    rig.client.tick(1.0)
    rig.ok()
    rig.tell(begin(1, 1, stream=2), SnapshotEnd(2, 1, 1), StreamEnd(2, EndReason.CLOSED), now=1.0)
    assert rig.client.next_tick() == 2.0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (StreamEnd(1, EndReason.TRIMMED), StreamTrimmed),
        (Refused(1, TopicNotFound("no topic t")), TopicNotFound),
    ],
)
def test_an_error_that_is_not_retryable_ends_it(message: ServerMessage, error: type[Exception]) -> None:
    rig = ClientRig()
    if isinstance(message, StreamEnd):
        rig.ok()
    (ended,) = rig.tell(message)
    assert isinstance(ended, StreamEnded)
    assert isinstance(ended.error, error)


def test_a_retryable_refusal_is_retried() -> None:
    rig = ClientRig()
    (interrupted,) = rig.tell(Refused(1, StreamMemoryExhausted("full")))
    assert isinstance(interrupted, Interrupted)
    rig.client.tick(1.0)
    assert request_of(rig).stream == 2


@pytest.mark.parametrize("reason", [EndReason.TOO_SLOW, None])
def test_without_reopening_the_first_interruption_ends_it(reason: EndReason | None) -> None:
    rig = ClientRig(reopen=False)
    rig.ok()
    if reason is None:
        rig.client.disconnected()
        (ended,) = rig.client.take_events()
    else:
        (ended,) = rig.tell(StreamEnd(1, reason))
    assert isinstance(ended, StreamEnded)
    assert isinstance(ended.error, StreamTooSlow if reason else StreamClosed)


def test_an_end_that_was_reached_and_not_reported_is_not_requested_again() -> None:
    rig = ClientRig(end=2)
    rig.ok(end=2)
    rig.tell(begin(1, 3), some(1), SnapshotEnd(1, 3, 3))
    rig.client.disconnected()
    rig.client.connected(1.0)
    (ended,) = rig.client.take_events()
    assert isinstance(ended, StreamEnded)
    assert ended.error is None
    assert [type(message) for message in rig.said()] == [StreamHello]


def test_a_snapshot_begun_before_the_end_is_completed_beyond_it() -> None:
    rig = ClientRig(PART, end=120)
    assert rig.first[1] == StreamRequest(1, "t", 150, 200, (W,), 100, 200, RequestFlag.NONE, "c-1", "i-1", 0)


def test_now_is_resolved_once() -> None:
    rig = ClientRig(flags=RequestFlag.FROM_NOW | RequestFlag.TO_NOW)
    (opened, _) = rig.ok(300, end=300)
    assert isinstance(opened, StreamOpened)
    assert opened.token.seqno == 300
    rig.tell(StreamEnd(1, EndReason.OK))
    rig = ClientRig(flags=RequestFlag.FROM_NOW)
    rig.ok(300)
    rig.client.disconnected()
    rig.client.connected(1.0)
    asked = request_of(rig)
    assert (asked.start, asked.flags) == (300, RequestFlag.NONE)


def test_a_token_of_another_cluster_or_topic_ends_it() -> None:
    rig = ClientRig(ResumeToken("t", "c-2", "i-1", (W,), 150, 150, 150))
    (ended,) = rig.ok(150)
    assert isinstance(ended, StreamEnded)
    assert isinstance(ended.error, ForeignToken)
    rig = ClientRig(ResumeToken("t", "c-1", "i-0", (W,), 150, 150, 150))
    (ended,) = rig.ok(150)
    assert isinstance(ended, StreamEnded)
    assert isinstance(ended.error, StreamViolation)
    rig = ClientRig(PART)
    assert isinstance(rig.ok(140)[0], StreamEnded), "it starts elsewhere"


def test_goodbye_ends_the_connection_and_no_stream() -> None:
    rig = ClientRig()
    rig.ok()
    (gone,) = rig.tell(Goodbye(StreamViolation("no")), begin(1, 1))
    assert isinstance(gone, EndConnection)
    assert rig.client.next_tick() is None
    rig.client.connected(1.0)
    assert request_of(rig).stream == 1


def test_closing_leaves_no_event_and_opening_needs_no_connection() -> None:
    rig = ClientRig()
    rig.client.receive([Refused(1, TopicNotFound("no"))], 0.0)
    rig.client.close(rig.handle)
    assert rig.client.take_events() == []
    other = rig.client.open(ResumeToken("u"), 0.0)
    assert request_of(rig).topic == "u"
    rig.client.close(other)
    rig.client.close(other)
    assert rig.said() == [CloseStream(2)]
    offline = StreamClient(ClientConfig())
    offline.close(offline.open(ResumeToken("t"), 0.0))
    assert offline.take_frame() == ()
    with pytest.raises(InvalidRequest, match="end must be"):
        offline.open(ResumeToken("t"), 0.0, end=-1)


def test_grants_follow_what_the_reader_consumed() -> None:
    rig = ClientRig(config=ClientConfig("", 10, 100))
    rig.ok()
    rig.tell(begin(1, 300), some(1, 2, size=8), some(3, size=8))
    rig.said()
    rig.client.consumed(rig.handle, 1, 10)
    assert rig.said() == [], "a tenth is not worth a message"
    rig.client.consumed(rig.handle, 1, 10)
    assert rig.said() == [Grant(1, 12, 120)]
    with pytest.raises(ValueError, match="1 of 10 were delivered"):
        rig.client.consumed(rig.handle, 2, 10)


def test_unconsumed_mutations_count_against_the_next_connection() -> None:
    rig = ClientRig(config=ClientConfig("", 10, 100))
    rig.ok()
    rig.tell(begin(1, 300), some(1, 2, 3, size=8))
    rig.client.disconnected()
    rig.client.connected(1.0)
    assert rig.said()[-1] == Grant(1, 7, 70)
    rig.client.consumed(rig.handle, 3, 30)
    assert rig.said() == [Grant(1, 10, 100)]
