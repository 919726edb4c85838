"""Figures of streams and their connections, as plain values; bytes, seconds, counts, seqnos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.messages import SnapshotFlag
from txnbuffer.streams.producer import Producer
from txnbuffer.streams.states import Producing


class StreamStatistics(NamedTuple):
    """One stream at the server.

    `state`: pending, backfilling, in-memory or dead. `last_read_seqno`: the last that its cursor gave; `items_ready` of
    what it gave wait for the connection to take them, `last_sent_seqno` is the last one taken. `items_remaining`:
    seqnos between the last read and the newest one, an upper bound of what is still to come. `max_buffer_*`: what
    the client has room for, and `unacked_*` how much of that is taken by what it has not consumed yet, both as its
    grants show. `paused_current_reason` is "" while not paused.
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
    """One connection at the server, with its streams of now; the totals count those that ended too.

    `unacked_bytes` and `max_buffer_bytes` are those of its streams together; `backfill_num_active` of them read the
    log, `backfill_num_pending` have given nothing yet.
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
    """`ready`: what the connection has not taken yet."""
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
