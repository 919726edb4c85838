"""One stream at the server: the conversion of the cursor's snapshots to those of the client, and its statistics.

A cursor returns snapshots as they are in memory or in the log. A client that has a snapshot in part has sent its end
with the request. The mutations that it lacks may be in several snapshots of the cursor: the server sends these as one,
which ends where the last of them does. Until then the client's data equals the topic at no seqno: it lacks mutations
that its own snapshot omitted because newer ones of the same key were to follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.messages import (
    Ok,
    ServerMessage,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamMutations,
    StreamRequest,
)
from txnbuffer.streams.states import Allowance, Event, Producing, next_state


@dataclass(slots=True, eq=False)
class Producer:
    """`sent`: last seqno sent; `complete`: seqno at which the client's data is complete; `high`: newest seqno.

    `announced`: end of the client's snapshot; `cursor_end`: of that of the cursor.
    """

    request: StreamRequest
    end: int
    state: Producing = Producing.ASKED
    allowance: Allowance = field(default_factory=Allowance)
    sent: int = 0
    complete: int = 0
    announced: int = 0
    cursor_end: int = 0
    high: int = 0
    purge: int = 0
    flags: SnapshotFlag = SnapshotFlag.NONE
    last_snap_end: int = 0
    snapshots: int = 0
    disk_items: int = 0
    paused_since: float | None = None

    def opened(self, ok: Ok) -> None:
        self.state = next_state(self.state, Event.OK)
        self.sent, self.complete, self.end = ok.start, ok.snapshot_start, ok.end
        self.announced, self.high, self.purge = ok.snapshot_end, ok.high_seqno, ok.purge_seqno

    @property
    def finished(self) -> bool:
        return self.state is Producing.BETWEEN and self.complete == self.sent and self.complete >= self.end

    def snapshot_begins(self, start: int, end: int, *, disk: bool, repeats: bool) -> ServerMessage:
        """The cursor's snapshot `[start, end]` begins, perhaps again, with a later end.

        `repeats`: a key may occur more than once. Raises ValueError if it leaves a gap or goes back.
        """
        if start > self.sent + 1 or end <= self.sent:
            raise ValueError(f"a snapshot [{start}, {end}] does not follow seqno {self.sent}")
        partial = self.sent > self.complete
        self.state = next_state(self.state, Event.SNAPSHOT_BEGIN)
        self.cursor_end = end
        self.announced = max(end, self.announced) if partial else end
        self.high = max(self.high, end)
        self.flags = (SnapshotFlag.DISK if disk else SnapshotFlag.NONE) | (
            SnapshotFlag.REPEATS if partial or repeats else SnapshotFlag.NONE
        )
        return SnapshotBegin(self.request.stream, self.complete + 1, self.announced, self.flags)

    def mutations(self, mutations: MutationBatch, size: int) -> ServerMessage:
        """Mutations of the snapshot, at least one. Raises ValueError if they are not in it, or exceed the grant."""
        first, last = int(mutations.seqnos[0]), int(mutations.seqnos[-1])
        if not self.sent < first <= last <= self.cursor_end:
            raise ValueError(f"mutations {first} to {last} are not within {self.sent + 1} to {self.cursor_end}")
        if len(mutations) > self.allowance.left()[0]:
            raise ValueError(f"{len(mutations)} mutations exceed the grant of {self.allowance.left()[0]}")
        self.state = next_state(self.state, Event.MUTATIONS)
        self.sent = last
        self.allowance.sent_items += len(mutations)
        self.allowance.sent_bytes += size
        if SnapshotFlag.DISK in self.flags:
            self.disk_items += len(mutations)
        return StreamMutations(self.request.stream, mutations)

    def snapshot_ends(self) -> ServerMessage | None:
        """The cursor's snapshot ends; None if the client's does not end with it."""
        if self.cursor_end < self.announced:
            self.sent = self.cursor_end
            return None
        self.state = next_state(self.state, Event.SNAPSHOT_END)
        self.sent = self.complete = self.last_snap_end = self.announced
        self.snapshots += 1
        return SnapshotEnd(self.request.stream, self.complete, self.high)

    def pause(self, now: float) -> None:
        """Update the time since which messages wait for credits."""
        if self.sent >= self.high or self.allowance.left()[0]:
            self.paused_since = None
        elif self.paused_since is None:
            self.paused_since = now


class StreamStatistics(NamedTuple):
    """Statistics of one stream at the server.

    `state`: pending, backfilling, in-memory or dead. `last_read_seqno`: last mutation returned by its cursor;
    `items_ready` mutations wait for the connection; `last_sent_seqno` is the last one that it took. `items_remaining`:
    seqnos between the last read and the newest one, an upper bound of the mutations to come. `max_buffer_*`: the
    client's window, and `unacked_*` the part that it has not consumed yet, both by its grants. `paused_current_reason`
    is "" while not paused.
    """

    stream: int
    topic: str
    state: str
    cursor_registered: bool
    start_seqno: int
    end_seqno: int
    last_read_seqno: int
    last_sent_seqno: int
    last_sent_snap_end_seqno: int
    snapshots_sent: int
    items_sent: int
    bytes_sent: int
    items_remaining: int
    items_ready: int
    unacked_items: int
    unacked_bytes: int
    max_buffer_items: int
    max_buffer_bytes: int
    backfill_disk_items: int
    backfill_mem_items: int
    paused_current_reason: str
    paused_current_duration: float


class ConnectionStatistics(NamedTuple):
    """Statistics of one connection at the server, with its open streams; totals include ended ones.

    `unacked_bytes` and `max_buffer_bytes` are sums over its streams; `backfill_num_active` of them read the log,
    `backfill_num_pending` have returned nothing yet.
    """

    name: str
    streams: tuple[StreamStatistics, ...]
    items_sent: int
    bytes_sent: int
    items_remaining: int
    items_ready: int
    unacked_bytes: int
    max_buffer_bytes: int
    backfill_num_active: int
    backfill_num_pending: int
    messages_waiting: int
    noops_sent: int
    streams_opened: int
    rollbacks: int
    stream_ends: tuple[tuple[str, int], ...]


def of_stream(producer: Producer, now: float, ready: Sequence[MutationBatch]) -> StreamStatistics:
    """The statistics of a stream; `ready` mutations have not been taken by the connection yet."""
    allowance, request = producer.allowance, producer.request
    paused = producer.paused_since
    return StreamStatistics(
        stream=request.stream,
        topic=request.topic,
        state=state_of(producer),
        cursor_registered=producer.state in (Producing.BETWEEN, Producing.INSIDE),
        start_seqno=request.start,
        end_seqno=producer.end,
        last_read_seqno=producer.sent,
        last_sent_seqno=ready[0].first - 1 if ready else producer.sent,
        last_sent_snap_end_seqno=producer.last_snap_end,
        snapshots_sent=producer.snapshots,
        items_sent=allowance.sent_items,
        bytes_sent=allowance.sent_bytes,
        items_remaining=max(0, producer.high - producer.sent),
        items_ready=sum(map(len, ready)),
        unacked_items=allowance.window_items - (allowance.granted_items - allowance.sent_items),
        unacked_bytes=allowance.window_bytes - (allowance.granted_bytes - allowance.sent_bytes),
        max_buffer_items=allowance.window_items,
        max_buffer_bytes=allowance.window_bytes,
        backfill_disk_items=producer.disk_items,
        backfill_mem_items=allowance.sent_items - producer.disk_items,
        paused_current_reason="" if paused is None else "credits",
        paused_current_duration=0.0 if paused is None else now - paused,
    )


def state_of(producer: Producer) -> str:
    if producer.state is Producing.DEAD:
        return "dead"
    if producer.state is Producing.ASKED or not (producer.snapshots or producer.state is Producing.INSIDE):
        return "pending"
    return "backfilling" if SnapshotFlag.DISK in producer.flags else "in-memory"
