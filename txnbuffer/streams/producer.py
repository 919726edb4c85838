"""One stream at the server: from what a cursor gives to the snapshots that the client sees.

A cursor gives snapshots as memory or log happen to hold them. The client has announced the end of the
snapshot that it holds in part, and what it lacks of it may stand in several of the cursor's: they are
told as one, which ends where the last of them does. For until then the client's data is of no seqno: it
lacks mutations that its own snapshot left out since newer ones of the same key were to come.
"""

from __future__ import annotations

from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.credits import Allowance
from txnbuffer.streams.messages import (
    Ok,
    ServerMessage,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotFlag,
    StreamMutations,
    StreamRequest,
)
from txnbuffer.streams.states import Event, Producing, produced


class Producer:
    """`sent`: the last seqno told; `complete`: up to it the client's data is complete; `high`: the newest there is."""

    __slots__ = (
        "allowance", "announced", "complete", "cursor_end", "disk_items", "end", "flags", "high", "last_snap_end",
        "paused_since", "purge", "request", "sent", "snapshots", "state",
    )  # fmt: skip

    def __init__(self, request: StreamRequest) -> None:
        self.request = request
        self.state = Producing.ASKED
        self.allowance = Allowance()
        self.end = request.end
        self.sent = self.complete = self.announced = self.cursor_end = self.high = 0
        self.flags = SnapshotFlag.NONE
        self.purge = self.last_snap_end = self.snapshots = self.disk_items = 0
        self.paused_since: float | None = None

    def opened(self, ok: Ok) -> None:
        self.state = produced(self.state, Event.OK)
        self.sent, self.complete, self.end = ok.start, ok.snapshot_start, ok.end
        self.announced, self.high, self.purge = ok.snapshot_end, ok.high_seqno, ok.purge_seqno

    @property
    def finished(self) -> bool:
        return self.state is Producing.BETWEEN and self.complete == self.sent and self.complete >= self.end

    @property
    def behind(self) -> bool:
        """There is something to send."""
        return self.sent < self.high

    def snapshot_begins(self, start: int, end: int, *, disk: bool) -> ServerMessage:
        """The cursor's snapshot `[start, end]` begins; raises ValueError where it leaves a hole or goes back."""
        if start > self.sent + 1 or end <= self.sent:
            raise ValueError(f"a snapshot [{start}, {end}] does not follow seqno {self.sent}")
        partial = self.sent > self.complete
        self.state = produced(self.state, Event.SNAPSHOT_BEGIN)
        self.cursor_end = end
        self.announced = max(end, self.announced) if partial else end
        self.high = max(self.high, end)
        self.flags = (SnapshotFlag.DISK if disk else SnapshotFlag.NONE) | (
            SnapshotFlag.REPEATS if partial else SnapshotFlag.NONE
        )
        return SnapshotBegin(self.request.stream, self.complete + 1, self.announced, self.flags)

    def mutations(self, mutations: MutationBatch, size: int) -> ServerMessage:
        """Some of the snapshot, at least one. Raises ValueError where they are not of it, or not all granted."""
        first, last = int(mutations.seqnos[0]), int(mutations.seqnos[-1])
        if not self.sent < first <= last <= self.cursor_end:
            raise ValueError(f"mutations {first} to {last} don't stand behind {self.sent} up to {self.cursor_end}")
        if len(mutations) > self.allowance.left()[0]:
            raise ValueError(f"{len(mutations)} mutations where {self.allowance.left()[0]} are granted")
        self.state = produced(self.state, Event.MUTATIONS)
        self.sent = last
        self.allowance.spend(len(mutations), size)
        if SnapshotFlag.DISK in self.flags:
            self.disk_items += len(mutations)
        return StreamMutations(self.request.stream, mutations)

    def snapshot_ends(self) -> ServerMessage | None:
        """The cursor's snapshot ends; None while the client's does not."""
        if self.cursor_end < self.announced:
            self.sent = self.cursor_end
            return None
        self.state = produced(self.state, Event.SNAPSHOT_END)
        self.sent = self.complete = self.last_snap_end = self.announced
        self.snapshots += 1
        return SnapshotEnd(self.request.stream, self.complete, self.high)

    def pause(self, now: float) -> None:
        """Note since when nothing can be sent though there is something."""
        if not self.behind or self.allowance.left()[0]:
            self.paused_since = None
        elif self.paused_since is None:
            self.paused_since = now
