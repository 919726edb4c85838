"""What became of the links of a node: when the next one may begin, and why the last one ended

A link that has not followed for a while before it ended has failed: its copy, or something that it brought. The node
that connects waits after each failure in a row, longer each time, because a copy costs both machines a lot. The reason
of a failure is shown until a link has followed for a while, also while the next one tries the same.
"""

from __future__ import annotations

from broker_io.filelog.replication.member import PairMember, Settings


def pause_after(failures: int, settings: Settings) -> int:
    """Nanoseconds to wait after so many failures in a row: none after one, then longer each time, up to two leases."""
    first = settings.member_timeout // 8
    return min(first << min(failures - 2, 30), 2 * settings.terms.ttl) if failures > 1 else 0


def is_compared(member: PairMember) -> bool:
    """Whether the logs of both members were compared on the link, and nothing is copied any more."""
    peer = member.peer
    return not member.log.partial and (member.followed is not None or (peer is not None and peer.durable is not None))


class LinkRecord:
    """The links of a node, whose lock its callers hold; times in nanoseconds. `problem`: why the last one failed."""

    def __init__(self, settings: Settings) -> None:
        self.problem = ""
        self._settings = settings
        self._failures = 0
        self._number: int | None = None
        self._follows_since: int | None = None
        self._next = 0

    def may_begin(self, now: int) -> bool:
        return now >= self._next

    def up(self, number: int) -> None:
        self._number, self._follows_since = number, None

    def tick(self, member: PairMember, now: int) -> None:
        """See whether the link follows."""
        if not is_compared(member):
            self._follows_since = None
        elif self._follows_since is None:
            self._follows_since = now
        elif now >= self._follows_since + self._settings.member_timeout:
            self._failures, self.problem = 0, ""

    def ended(self, number: int, reason: str, now: int) -> None:
        """A link has ended; reported more than once, the first time counts."""
        if number != self._number:
            return
        self._number = self._follows_since = None
        self.problem = reason or self.problem
        self._failures += 1
        self._next = now + pause_after(self._failures, self._settings)
