"""Whether a stream that is asked for can be had: the server's checks, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from txnbuffer.streams.errors import ForeignToken, SeqnoOutOfRange, StreamMemoryExhausted, StreamTrimmed
from txnbuffer.streams.failover import FailoverLog
from txnbuffer.streams.messages import Ok, Refused, RequestFlag, Rollback, StreamRequest
from txnbuffer.streams.rollback import rollback_point

Answer: TypeAlias = Ok | Rollback | Refused


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What the owner of a topic knows of it.

    `high_seqno`: the newest mutation; `purge_seqno`: deletions up to it may be forgotten; `trimmed_seqno`: all up
    to it is gone from the log. `has_memory`: there is some left for another stream.
    """

    cluster: str
    incarnation: str
    log: FailoverLog
    high_seqno: int
    purge_seqno: int = 0
    trimmed_seqno: int = 0
    has_memory: bool = True


def answer(request: StreamRequest, facts: TopicFacts) -> Answer:
    """Ok, with what the stream starts from; or what the client has to do first; or why not."""
    stream, topic, start, end = request[:4]
    snapshot_start, snapshot_end, flags = request.snapshot_start, request.snapshot_end, request.flags
    if request.cluster not in ("", facts.cluster):
        return Refused(stream, ForeignToken(f"topic {topic} is of cluster {facts.cluster}, not {request.cluster}"))
    anew = RequestFlag.FROM_NOW in flags or RequestFlag.FROM_OLDEST in flags
    if anew:
        start = facts.high_seqno if RequestFlag.FROM_NOW in flags else facts.trimmed_seqno
        snapshot_start = snapshot_end = start
    if not 0 <= start <= end:
        return _out_of_range(stream, topic, f"start {start} lies behind end {end}")
    if not 0 <= snapshot_start <= start <= snapshot_end:
        return _out_of_range(stream, topic, f"start {start} is not within [{snapshot_start}, {snapshot_end}]")
    point = None if anew else _rollback(request, facts)
    if point is not None:
        return Rollback(stream, point)
    if RequestFlag.TO_NOW in flags:
        end = facts.high_seqno
    if not start <= min(end, facts.high_seqno):
        return _out_of_range(stream, topic, f"start {start} lies behind its last mutation, {facts.high_seqno}")
    if start < facts.trimmed_seqno:
        return Refused(
            stream,
            StreamTrimmed(
                f"topic {topic} is trimmed up to seqno {facts.trimmed_seqno}, a stream behind {start} would have a "
                f"hole; start from the oldest mutation there is"
            ),
        )
    if start in (snapshot_start, snapshot_end):
        snapshot_start = snapshot_end = start
    if not facts.has_memory:
        return Refused(stream, StreamMemoryExhausted(f"no memory for a stream of topic {topic} now; try again"))
    return Ok(
        *(stream, facts.log.told, start, snapshot_start, snapshot_end, end, facts.high_seqno, facts.purge_seqno),
        *(facts.cluster, facts.incarnation),
    )


def _rollback(request: StreamRequest, facts: TopicFacts) -> int | None:
    """A topic made anew under an old name has nothing in common with the old one."""
    same = request.incarnation in ("", facts.incarnation)
    return rollback_point(
        request.start,
        request.snapshot_start,
        request.snapshot_end,
        request.versions if same else (),
        facts.log,
        facts.high_seqno,
        purge_seqno=0 if RequestFlag.IGNORE_PURGED in request.flags else facts.purge_seqno,
        known_purge_seqno=request.purge_seqno if same else 0,
        strict=RequestFlag.STRICT in request.flags,
    )


def _out_of_range(stream: int, topic: str, what: str) -> Refused:
    return Refused(stream, SeqnoOutOfRange(f"no stream of topic {topic}: {what}; go on from a resume token"))
