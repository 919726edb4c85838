"""The limits of an engine's clients: what each principal uses, and what is refused under overload

Only new work is refused: the first record of a transaction, an ordinary send, on a cluster a commit, and opening
sessions, change streams and topics. What was admitted continues, so a refusal loses nothing. The queue delay is the lag
of the event loop, or the age of the oldest append that is not durable if that is more. A connection whose requests are
refused is not read for as long as its share would have needed for them, so refusals cost little. A session with few
transactions in flight waits for its answers, so the delay of a slow machine is no sign that it asks for too much: its
work is admitted, and its connection is not read for as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from broker_io.errors import LimitExceeded, TooManyStreams
from txnbuffer.access.limits import NO_LIMITS, Contender, Excess, FairAdmission, PrincipalLimits, PrincipalUsage
from txnbuffer.errors import TooManyTopics, TooManyTransactions
from txnbuffer.service.door.access import Permissions

STEP = 0.1
"""Seconds between two adjustments of the shares."""
KIB = 1024
MAX_HOLD = 2.0
"""Seconds for which a connection is not read at most: members of groups send heartbeats."""
MAX_RETRY = 10.0
OVERLOAD_RETRY = 0.5
"""Seconds before a retry under overload, at least: retries count as demand."""
SMALLEST_CREDIT = 64 * KIB
FEW = 16
"""A session with at most so many transactions and ordinary sends in flight is never refused under overload. It is twice
the promised 8, because here a transaction is in flight until its markers are durable, and for its client until then or
until it is decided."""
OVERLOAD = "overload"
KEPT = 10_000
"""Principals without a connection whose usage is remembered, so that a new connection does not reset it."""
CLASSES = {
    "open_transactions": TooManyTransactions,
    "streams": TooManyStreams,
    "topics_created": TooManyTopics,
}
"""The classes of refusals that have one of their own."""


class ClientQuota:
    """What one connection may do. `limited`: whether new work has to ask `admit`; otherwise `ask` counts it.

    `applies`: whether there is anything to ask or count, now or ever.
    """

    def __init__(
        self, quotas: Quotas, usage: PrincipalUsage, contender: Contender, whose: str, contends: str = ""
    ) -> None:
        """`whose`: the limits, in errors; `contends`: who gets a share of its own, if not the same."""
        self.usage = usage
        self.applies = quotas.limits_any or usage.contender is contender
        self._contender = contender
        self._quotas = quotas
        self._whose = whose
        self._contends = contends or whose
        self._excess_work = 0.0
        self._in_flight: list[Callable[[], bool]] = []
        """Of work in flight, up to one more than FEW: whether it has ended. It is kept only while `limited`."""
        self.last_send: Callable[[], Callable[[], bool]] = lambda: lambda: True
        """Returns whether the newest send of the connection has ended, as a function."""
        self._refusal: LimitExceeded | None = None
        self._refused_at = -inf

    @property
    def limited(self) -> bool:
        return self._contender.bucket is not None or self.usage.limits_requests

    def ask(self, requests: int, size: int) -> None:
        """Count work that needed no admission, or is part of work that was admitted."""
        self._quotas.ask(self._contender, requests + size / KIB)

    def admit(self, ended: Callable[[], bool], size: int = 0) -> LimitExceeded | None:
        """Ask to begin new work, a request with `size` bytes of records; the refusal if it must not begin.

        `ended()`: whether the work is no longer in flight.
        """
        quotas, now, work = self._quotas, self._quotas.now(), 1.0 + size / KIB
        wait = quotas.wait(self._contender, work, now)
        excess = self.usage.request(now) if not wait or self.has_few(FEW - 1) else Excess(OVERLOAD, 0.0, wait)
        if excess is None:
            self._excess_work += work * bool(wait)
            if self.has_few(FEW):
                self._in_flight.append(ended)
            return None
        self._excess_work += work
        quotas.refused[_name(excess)] += 1
        # Many requests of a frame are refused for the same reason.
        if self._refusal is None or self._refused_at != now or self._refusal.limit != _name(excess):
            self._refusal, self._refused_at = self._error(excess), now
        return self._refusal

    def has_few(self, most: int = FEW) -> bool:
        """Whether at most so many transactions and ordinary sends are that began while `limited` are in flight."""
        if len(self._in_flight) > most:
            self._in_flight = [ended for ended in self._in_flight if not ended()]
        return len(self._in_flight) <= most

    def waits(self) -> LimitExceeded | None:
        """The refusal of a request that prepares work, such as a lease, while new work is refused."""
        wait = self._quotas.wait(self._contender, 0.0, self._quotas.now())
        return self.refuse(Excess(OVERLOAD, 0.0, wait)) if wait else None

    def check(self, limit: str, used: int, more: int = 1) -> LimitExceeded | None:
        """The refusal of what would use more of a limit than there is."""
        excess = self.usage.excess(limit, used, more)
        return None if excess is None else self.refuse(excess)

    def create_topic(self, is_missing: Callable[[], bool]) -> None:
        """Count a topic that may have to be created. Raises LimitExceeded if there are too many."""
        if not self.usage.limits.topics_created or not is_missing():
            return
        if (refusal := self.check("topics_created", self.usage.topics_created)) is not None:
            raise refusal
        self.usage.topics_created += 1

    def check_request(self) -> None:
        """Count a request that begins nothing. Raises LimitExceeded if there are too many."""
        if (excess := self.usage.request(self._quotas.now())) is not None:
            raise self.refuse(excess)

    def refuse(self, excess: Excess) -> LimitExceeded:
        """Count and return a refusal."""
        return self._quotas.count(self._error(excess))

    def take_hold(self) -> float:
        """Seconds for which not to read the connection, because of work above its share since the last call."""
        excess, self._excess_work = self._excess_work, 0.0
        if not excess:
            return 0.0
        bucket, limit = self._contender.bucket, self.usage.limits.requests_per_second
        rate = min(inf if bucket is None else bucket.rate, limit or inf)
        return min(excess / rate * max(self.usage.connections, 1), MAX_HOLD)

    def credits(self, allowed: int) -> int:
        """How many of the bytes that each connection may have unacknowledged this one may."""
        if limit := self.usage.limits.bytes_in_flight:
            allowed = min(allowed, max(limit // max(self.usage.connections, 1), 1))
        if (bucket := self._contender.bucket) is not None:
            allowed = min(allowed, max(int(2 * KIB * bucket.rate * self._quotas.target), SMALLEST_CREDIT))
        return allowed

    def _error(self, excess: Excess) -> LimitExceeded:
        least = OVERLOAD_RETRY if excess.limit == OVERLOAD else 0.0
        retry = min(max(excess.retry_after, least), MAX_RETRY)
        then = f"nothing was done, retry after {retry:.2f} s"
        if excess.limit == OVERLOAD:
            text = f"the service is overloaded, and {self._contends} asks for more than a fair share: {then}"
            return LimitExceeded(text, OVERLOAD, retry)
        kind = CLASSES.get(excess.limit, LimitExceeded)
        if not kind.retryable:
            then = "nothing was done, and the count begins at 0 only when the service starts"
        return kind(f"{_name(excess)} of {self._whose} is {excess.value:g}: {then}", _name(excess), retry)


def _name(excess: Excess) -> str:
    return OVERLOAD if excess.limit == OVERLOAD else f"limits.{excess.limit}"


class Quotas:
    """The quotas of all connections. `refused` counts refusals by limit."""

    def __init__(self, defaults: PrincipalLimits, overload: float, now: Callable[[], float]) -> None:
        """`overload`: the queue delay in seconds above which new work is refused; 0.0: none is."""
        self.now = now
        self.refused: Counter[str] = Counter()
        self._defaults = defaults
        self.limits_any = bool(overload) or defaults != NO_LIMITS
        """Whether there are limits for clients without a principal."""
        self._admission = FairAdmission(overload, now()) if overload else None
        self._usages: dict[str, tuple[PrincipalUsage, Permissions]] = {}

    @property
    def target(self) -> float:
        """The queue delay in seconds that the service aims at."""
        return 0.0 if self._admission is None else self._admission.target

    @property
    def overloaded(self) -> bool:
        return self._admission is not None and self._admission.overloaded

    @property
    def usages(self) -> list[PrincipalUsage]:
        """What each principal uses."""
        return [usage for usage, _ in self._usages.values()]

    def connect(self, permissions: Permissions) -> ClientQuota:
        """The quota of a new connection. Call `disconnect` when it has ended."""
        quota = self.of(permissions)
        quota.usage.connections += 1
        return quota

    def of(self, permissions: Permissions) -> ClientQuota:
        """A quota for a request without a connection of its own."""
        principal, now = permissions.principal, self.now()
        if principal not in self._usages and len(self._usages) >= KEPT:
            self._usages = {name: known for name, known in self._usages.items() if known[0].connections}
        limits = permissions.limits(self._defaults)
        usage = self._usages.setdefault(principal, (PrincipalUsage(principal, limits, now), permissions))[0]
        usage.change(limits, now)
        if permissions.tag:
            return ClientQuota(self, usage, usage.contender, f"principal {principal!r}")
        return ClientQuota(self, usage, Contender(), "all clients together", "this connection")

    def refresh(self) -> None:
        """Use the limits of a policy that has changed."""
        now = self.now()
        for usage, permissions in self._usages.values():
            usage.change(permissions.limits(self._defaults), now)

    def disconnect(self, quota: ClientQuota) -> None:
        quota.usage.connections -= 1

    def count(self, refusal: LimitExceeded) -> LimitExceeded:
        """Count a refusal, and return it."""
        self.refused[refusal.limit] += 1
        return refusal

    def ask(self, contender: Contender, work: float) -> None:
        if self._admission is not None:
            self._admission.ask(contender, work)

    def wait(self, contender: Contender, work: float, now: float) -> float:
        """Ask for work: 0.0 if it is admitted, else seconds."""
        return 0.0 if self._admission is None else self._admission.admit(contender, work, now)

    def served(self, requests: int, size: int) -> None:
        """Count work that is completed."""
        if self._admission is not None:
            self._admission.served += requests + size / KIB

    def adjust(self, delay: float) -> bool:
        """Adjust the shares to the queue delay; return whether shares are or were limited."""
        if self._admission is None:
            return False
        before = self.overloaded
        self._admission.adjust(self.now(), delay)
        return before or self.overloaded
