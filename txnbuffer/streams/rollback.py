"""How far a client has to go back before it can read on: the search, step by step.

The client holds everything up to `start`, which lies in the snapshot `[snapshot_start, snapshot_end]`:
up to `snapshot_start` its data is what the topic was at that seqno, from there on it is that only once the
snapshot is complete. `versions` are those of its data, newest first.

1. A client that holds nothing goes on, unless it insists on its version.
2. Deletions up to the purge seqno are forgotten. A client that may have missed one starts over; one that
   names this very purge seqno was told of it when it had all before, and has missed none.
3. The newest of its versions that the server knows is where both histories were last the same: up to the
   end of that version here, and up to where the client's own history left it. If there is none, it starts over.
4. A client in a snapshot of which it has nothing yet holds a complete one that ends at `start`.
5. If the snapshot it is in lies within what both have, it goes on.
6. If it holds all of its snapshot, that is complete at `start`.
7. It goes back to what both have, or to the beginning of the snapshot that it can't complete, if that is lower.

So the answer is always below `start`: a client that follows it is never told the same again.
"""

from __future__ import annotations

from txnbuffer.streams.failover import MAX_SEQNO, FailoverLog, Version


def rollback_point(
    start: int,
    snapshot_start: int,
    snapshot_end: int,
    versions: tuple[Version, ...],
    log: FailoverLog,
    high_seqno: int,
    *,
    purge_seqno: int = 0,
    known_purge_seqno: int = 0,
    strict: bool = False,
) -> int | None:
    """The seqno to which the client must go back at least, None if it need not."""
    if start == 0 and not (strict and versions):
        return None
    if 0 < start < purge_seqno and known_purge_seqno != purge_seqno:
        return 0
    common = common_seqno(versions, log, high_seqno)
    if common is None:
        return 0
    if start == snapshot_start:
        snapshot_end = start
    if snapshot_end <= common:
        return None
    if start == snapshot_end:
        snapshot_start = start
    return min(common, snapshot_start)


def common_seqno(versions: tuple[Version, ...], log: FailoverLog, high_seqno: int) -> int | None:
    """Up to where a history of these versions, newest first, is that of the log; None if nothing tells."""
    left = MAX_SEQNO
    for version in versions:
        end = log.end_of(version.uuid, high_seqno)
        if end is not None:
            return min(end, left)
        left = min(left, version.seqno)
    return None
