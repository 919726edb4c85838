"""The lease: how long a primary may serve, and when a challenger may take its place

A lock keeps a lease for a time to live T after it received the last renewal. The clock of each side may run up to a
share `drift` fast or slow, so the primary counts T(1 - 2 drift), and from the moment when it sent the renewal: the
answer comes later than the lock's clock started. Clocks must count suspended time (CLOCK_BOOTTIME).

A lock without a clock, such as a file, ends no lease. There a challenger must see the counter of renewals unchanged for
T(1 + 2 drift) by its own clock.

A lease that has lapsed is never revived by a renewal: its holder has to win the next epoch. Only stale reads depend on
leases; no data is lost if one ends early or late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from broker_io.filelog.log.records import Store


class LockLease(NamedTuple):
    """The lease of a primary as a lock shows it: its store, its session, and how often it was renewed."""

    store: Store
    session: int
    renewals: int


class Terms(NamedTuple):
    """The time to live of a lease in nanoseconds, the assumed drift of clocks, and whether the lock has a clock."""

    ttl: int
    drift: float = 0.01
    clocked: bool = True

    @property
    def valid_for(self) -> int:
        """How long after sending a renewal that succeeded its holder may serve, by its own clock."""
        return math.floor(self.ttl * (1 - 2 * self.drift))

    @property
    def watched_for(self) -> int:
        """How long a challenger must see no renewal, by its own clock, if the lock has none."""
        return math.ceil(self.ttl * (1 + 2 * self.drift))


@dataclass
class LockSession:
    """The session of a process with the lock; its lease, if it is live.

    `sent` is when the last renewal that succeeded was sent. A process that never had a session has none to renew.
    """

    number: int | None = None
    sent: int = 0
    renewing_since: int | None = None

    def holds_at(self, now: int, terms: Terms) -> bool:
        """Whether a primary may serve now."""
        return self.number is not None and now < self.sent + terms.valid_for

    def renewed(self, number: int, sent: int) -> bool:
        """A renewal that was sent at this time succeeded, or began a session; whether this one has begun with it.

        A late answer about another session changes nothing.
        """
        begun = self.number is None
        if begun:
            self.number = number
        if number == self.number:
            self.sent, self.renewing_since = sent if begun else max(self.sent, sent), None
        return begun


@dataclass
class Watch:
    """A challenger's watch of the lease of another store."""

    lease: LockLease | None = None
    since: int = 0

    def ended(self, lease: LockLease | None, begun: int, now: int, terms: Terms) -> bool:
        """Whether a lease, as a read of the lock that begun and ended at these times shows it, has ended."""
        if lease is None:
            return True
        if terms.clocked or lease != self.lease:
            self.lease, self.since = lease, now
            return False
        return begun - self.since >= terms.watched_for
