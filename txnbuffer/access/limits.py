"""Limits of principals, and who is refused under overload

A *contender* is what shares are for: a principal, or, without access control, a connection. What it asks for is counted
as *work*: 1 for a request, and 1 for each KiB of its records. While the queue delay stays above a target, each
contender gets at most its *fair share* of what was served lately. The share is max-min: who asks for less than an equal
share gets everything, and what it leaves is divided among the others. What is above the share is refused. One number is
controlled, the capacity: it decreases by a factor while the delay stays above the target, and increases by a constant
while it is below. Once the capacity covers the demand, nothing is refused any more. The target is a multiple of the
usual delay, but at least a configured one.

Times are seconds of a monotonic clock, passed in. Nothing here knows what is refused: that is in
`txnbuffer.service.door.quotas`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

SUSTAINED = 0.3
"""Seconds that the delay must stay above the target before the capacity decreases: a burst passes by itself."""
DECREASE = 0.5, 0.9
"""The capacity decreases by a factor between these: the target divided by the delay."""
LEAST = 0.2
"""The capacity does not decrease below this part of the peak, so a machine that stalls for a while refuses little."""
INCREASE = 0.05
"""Increase of the capacity in a second, as a part of the peak."""
PEAK_SECONDS = 30.0
"""The peak is the most that was served, of which a part is forgotten with this time constant."""
ABOVE_USUAL = 3.0
"""The target is at least this multiple of the usual delay: a slow disk is no overload."""
USUAL_SECONDS = 60
"""The usual delay is the smallest average of a second in so many seconds without overload."""
MEMORY = 1.0
"""Seconds over which demand and served work are averaged."""
IDLE = 0.05
"""Work per second below which a contender counts as idle."""
EXCESS = 1.5
"""If the demand is above this multiple of what is served, the queue grows; otherwise clients wait for their answers."""
ABOVE_EQUAL = 0.8, 1.5
"""What is below this multiple of an equal share of the peak is never refused; the second one while clients wait for
their answers."""
FALLING = 0.9
"""The capacity does not decrease while the delay has fallen to this part since the last decrease: the queue drains."""
BURST = 0.1
"""Seconds of its share that a contender may use at once."""


ROUNDING = 1e-6
"""Tokens that may be missing because of rounding."""


class PrincipalLimits(NamedTuple):
    """Limits of one principal; 0: no limit."""

    sessions: int = 0
    open_transactions: int = 0
    bytes_in_flight: int = 0
    streams: int = 0
    requests_per_second: float = 0.0
    topics_created: int = 0


NO_LIMITS = PrincipalLimits()


class TokenBucket:
    """Tokens arrive at `rate` per second, up to `burst`. Work may begin while there is a whole one, or all of a burst.

    Work may cost more tokens than there are; the next one then waits until the debt is paid.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._at = burst, now

    def change(self, rate: float, burst: float, now: float) -> None:
        """Change the rate from now on."""
        self._tokens = min(self._available(now), burst)
        self.rate, self.burst, self._at = rate, burst, now

    def wait(self, now: float) -> float:
        """Seconds until work may be begun; 0.0: now."""
        missing = min(1.0, self.burst) - self._available(now)
        return missing / self.rate if missing > ROUNDING else 0.0

    def spend(self, tokens: float, now: float) -> None:
        """Pay for work."""
        self._tokens, self._at = self._available(now) - tokens, now

    def _available(self, now: float) -> float:
        return min(self.burst, self._tokens + self.rate * max(now - self._at, 0.0))


def fair_level(demands: Iterable[float], capacity: float) -> float:
    """The largest amount for each contender so that all get together at most the capacity; inf if all get everything.

    Each gets what it demands, or the amount if that is less (max-min fairness).
    """
    rising = sorted(demands)
    left, others = capacity, len(rising)
    for demand in rising:
        if demand * others > left:
            return left / others
        left -= demand
        others -= 1
    return inf


@dataclass(eq=False, slots=True)
class Contender:
    """`asked`: work since the last adjustment; `rate`: work per second that it asked for lately.

    `bucket` is set while its share is limited.
    """

    asked: float = 0.0
    rate: float = 0.0
    bucket: TokenBucket | None = None


class UsualDelay:
    """The usual queue delay, in seconds; 0.0 until it is known."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._averages: deque[float] = deque(maxlen=USUAL_SECONDS)
        self._sum = self._time = 0.0

    def add(self, delay: float, seconds: float) -> None:
        """Add a delay that was measured after this many seconds without overload."""
        self._sum += delay * seconds
        self._time += seconds
        if self._time >= 1.0 - ROUNDING:
            self._averages.append(self._sum / self._time)
            self._sum = self._time = 0.0
            self.seconds = min(self._averages)


class FairAdmission:
    """Decides what is refused under overload. `least_target`: the queue delay in seconds below which there is none.

    `capacity`: work per second that all contenders get together; `level`: what each of them gets at most. Both are
    inf while there is no overload. `served` counts the work that was completed since the last adjustment.
    """

    def __init__(self, least_target: float, now: float) -> None:
        self.usual = UsualDelay()
        self._least_target = least_target
        self.capacity = self.level = inf
        self.served = 0.0
        self._served_rate = self._peak = 0.0
        self._above = 0.0
        self._decreased_at = 0.0
        """The delay when the capacity was decreased last."""
        self._at = now
        self._active: dict[Contender, None] = {}

    @property
    def overloaded(self) -> bool:
        return self.capacity < inf

    @property
    def target(self) -> float:
        """The queue delay in seconds above which there is too much work."""
        return max(self._least_target, ABOVE_USUAL * self.usual.seconds)

    def ask(self, contender: Contender, work: float) -> None:
        """Count work that a contender asks for, whether it is admitted or not."""
        if not contender.asked:
            self._active[contender] = None
        contender.asked += work

    def admit(self, contender: Contender, work: float, now: float) -> float:
        """Ask for new work: 0.0 if it is admitted, else the seconds after which it may be."""
        self.ask(contender, work)
        if contender.bucket is None:
            return 0.0
        wait = contender.bucket.wait(now)
        if not wait:
            contender.bucket.spend(work, now)
        return wait

    def adjust(self, now: float, delay: float) -> None:
        """Adjust the shares to what happened since the last call, and to the current queue delay."""
        seconds = now - self._at
        if seconds <= 0:
            return
        self._at = now
        weight = min(seconds / MEMORY, 1.0)
        self._served_rate += (self.served / seconds - self._served_rate) * weight
        self.served = 0.0
        self._peak = max(self._peak * (1.0 - min(seconds / PEAK_SECONDS, 1.0)), self._served_rate, 1.0)
        for contender in [*self._active]:
            contender.rate += (contender.asked / seconds - contender.rate) * weight
            contender.asked = 0.0
            if contender.rate < IDLE:
                contender.rate, contender.bucket = 0.0, None
                del self._active[contender]
        self._control(seconds, delay)
        self._divide(now)

    def _control(self, seconds: float, delay: float) -> None:
        target, (least, most) = self.target, DECREASE
        if not self.overloaded:
            self.usual.add(delay, seconds)
        self._above = self._above + seconds if delay > target else 0.0
        if delay <= target:
            self._decreased_at = 0.0
        if self._above >= SUSTAINED:
            falling, self._decreased_at = delay < FALLING * self._decreased_at, delay
            self._above = 0.0
            if falling:
                return
            decreased = min(self.capacity, self._served_rate) * min(max(target / delay, least), most)
            self.capacity = max(decreased, LEAST * self._peak)
        elif delay <= target:
            self.capacity += seconds * INCREASE * self._peak

    def _divide(self, now: float) -> None:
        demand = sum(contender.rate for contender in self._active)
        alone = len(self._active) < 2  # who is alone delays nobody else
        if alone or demand <= self.capacity:
            self.capacity = inf if demand <= self.capacity else self.capacity
            self.level = inf
        else:
            self.level = fair_level((contender.rate for contender in self._active), self.capacity)
            multiple = ABOVE_EQUAL[demand <= EXCESS * self._served_rate]
            self.level = max(self.level, multiple * self._peak / len(self._active))
        for contender in self._active:
            if contender.rate <= self.level:
                contender.bucket = None
            elif contender.bucket is None:
                contender.bucket = TokenBucket(self.level, max(self.level * BURST, 1.0), now)
            else:
                contender.bucket.change(self.level, max(self.level * BURST, 1.0), now)


class Excess(NamedTuple):
    """A limit that a request would exceed: its name and value, and the seconds after which a retry can help."""

    limit: str
    value: float
    retry_after: float


FREED = 1.0
"""Seconds after which to retry what is refused because something of the principal is still open."""


class PrincipalUsage:
    """What a principal uses of its limits."""

    def __init__(self, principal: str, limits: PrincipalLimits, now: float) -> None:
        self.principal = principal
        self.limits = limits
        self.contender = Contender()
        self.sessions = 0
        self.connections = 0
        self.bytes_in_flight = 0
        self.topics_created = 0
        self._requests: TokenBucket | None = None
        self.change(limits, now)

    def change(self, limits: PrincipalLimits, now: float) -> None:
        """Set other limits; what is already used stays."""
        self.limits, rate = limits, limits.requests_per_second
        if not rate:
            self._requests = None
        elif self._requests is None:
            self._requests = TokenBucket(rate, max(rate, 1.0), now)
        elif rate != self._requests.rate:
            self._requests.change(rate, max(rate, 1.0), now)

    @property
    def limits_requests(self) -> bool:
        return self._requests is not None

    def excess(self, limit: str, used: int, more: int = 1) -> Excess | None:
        """The limit if there is one, and `more` in addition to what is used would exceed it."""
        value = getattr(self.limits, limit)
        return Excess(limit, value, FREED) if value and used + more > value else None

    def request(self, now: float) -> Excess | None:
        """Count a request; why it must be refused, if it must, which costs nothing."""
        if self._requests is None:
            return None
        wait = self._requests.wait(now)
        if wait:
            return Excess("requests_per_second", self.limits.requests_per_second, wait)
        self._requests.spend(1.0, now)
        return None

    @property
    def too_many_bytes(self) -> bool:
        """Whether its clients have to wait before they send more."""
        return 0 < self.limits.bytes_in_flight < self.bytes_in_flight
