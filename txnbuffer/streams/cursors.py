"""Durable cursors: up to where a reader has everything, as the owner of its topic keeps it; what follows stays.

A cursor is a name and a seqno. It moves forward with what its reader acknowledges, never back; where history
branched it stands where both histories part, at most.
"""

from __future__ import annotations

from collections.abc import Mapping

from txnbuffer.errors import InvalidRequest
from txnbuffer.streams.errors import ForeignToken, SeqnoOutOfRange, StreamBranched
from txnbuffer.streams.requests import TopicFacts
from txnbuffer.streams.rollback import common_seqno
from txnbuffer.streams.token import ResumeToken

MAX_NAME = 200


def check_cursor_name(name: object) -> str:
    """Raises InvalidRequest."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidRequest(f"a cursor is named by 1 to {MAX_NAME} bytes of printable text, not {repr(name)[:80]}")
    return name


def acknowledged(at: int | ResumeToken, topic: str, facts: TopicFacts) -> int:
    """Up to which seqno a reader has everything that stands at a seqno or at a resume token.

    Raises ForeignToken for a token of another topic, StreamBranched for one of another history, SeqnoOutOfRange.
    """
    if isinstance(at, ResumeToken):
        if (at.topic, at.cluster, at.incarnation) != (topic, facts.cluster, facts.incarnation):
            raise ForeignToken(f"the resume token is of another topic than {topic!r}, or of one that had its name")
        common = common_seqno(at.versions, facts.log, facts.high_seqno)
        if at.seqno and (common is None or at.seqno > common):
            raise StreamBranched(f"the history of topic {topic!r} branched behind seqno {common or 0}: roll back first")
        at = at.seqno
    if not 0 <= at <= facts.high_seqno:
        raise SeqnoOutOfRange(f"topic {topic!r} has mutations 1 to {facts.high_seqno}: a cursor can't stand at {at}")
    return at


def first_needed(seqno: int, first_seqnos: Mapping[int, int]) -> int | None:
    """The first ledger that holds anything behind a seqno; None if no ledger has a visible record.

    `first_seqnos`: ledger → the number of the first visible record from its beginning on.
    """
    usable = [ledger for ledger, first in first_seqnos.items() if first <= seqno + 1]
    return max(usable, default=min(first_seqnos, default=None))
