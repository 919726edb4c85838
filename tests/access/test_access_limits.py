"""Limits of principals: token buckets, fair shares, and admission under overload, against naive models."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from txnbuffer.access.limits import (
    LEAST,
    NO_LIMITS,
    Contender,
    FairAdmission,
    PrincipalLimits,
    PrincipalUsage,
    TokenBucket,
    UsualDelay,
    fair_level,
)

STEPS = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 20)), max_size=60)
"""Milliseconds between requests, and their costs in tenths."""


# --- token buckets ---


@given(st.sampled_from([0.5, 1.0, 7.0, 100.0]), st.sampled_from([1.0, 3.0, 100.0]), STEPS)
def test_bucket_admits_no_more_than_its_rate_and_a_burst(
    rate: float, burst: float, steps: list[tuple[int, int]]
) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    spent: list[tuple[float, float]] = []
    for pause, tenths in steps:
        now += pause / 1000
        wait = bucket.wait(now)
        if wait:
            assert bucket.wait(now + wait) == 0.0
            assert bucket.wait(now + 0.9 * wait) > 0.0
        else:
            bucket.spend(tenths / 10, now)
            spent.append((now, tenths / 10))
    for at, (begin, _) in enumerate(spent):
        total = 0.0
        for end, cost in spent[at:]:
            assert total <= burst - min(1.0, burst) + rate * (end - begin) + 1e-3  # a whole token was left
            total += cost


def test_bucket_keeps_its_debt_when_the_rate_changes() -> None:
    bucket = TokenBucket(10.0, 1.0, 0.0)
    bucket.spend(6.0, 0.0)
    assert bucket.wait(0.0) == pytest.approx(0.6)
    bucket.change(1.0, 1.0, 0.1)
    assert bucket.wait(0.1) == pytest.approx(5.0)


# --- fair shares ---


@given(st.lists(st.integers(0, 50).map(float), max_size=12), st.integers(1, 200).map(float))
def test_level_is_max_min_fair(demands: list[float], capacity: float) -> None:
    level = fair_level(demands, capacity)
    if sum(demands) <= capacity:
        assert level == inf
        return
    given_out = [0.0] * len(demands)
    left = capacity
    while left > 1e-9:  # naive: divide what is left equally among those that want more
        wanting = [at for at, demand in enumerate(demands) if demand - given_out[at] > 1e-12]
        part = min(left / len(wanting), min(demands[at] - given_out[at] for at in wanting))
        for at in wanting:
            given_out[at] += part
        left -= part * len(wanting)
    assert [min(demand, level) for demand in demands] == pytest.approx(given_out)


# --- admission ---


class Server:
    """A service that does `capacity` work per second in order; each step is 0.1 s."""

    def __init__(self, capacity: float, target: float = 0.05, usual: float = 0.0) -> None:
        self.capacity, self.usual = capacity, usual
        self.admission = FairAdmission(target, 0.0)
        self.now = 0.0
        self.queued = 0.0
        self.arrived: deque[tuple[float, float]] = deque()
        self.delay = usual

    def offer(self, contender: Contender, requests: int, work: float = 1.0) -> int:
        """Ask for requests within this step; how many were refused."""
        refused = 0
        for _ in range(requests):
            if self.admission.admit(contender, work, self.now):
                refused += 1
            else:
                self.arrived.append((self.now, work))
        return refused

    def step(self) -> int:
        """Work for 0.1 s; how many requests were completed."""
        self.now += 0.1
        left, done = self.capacity * 0.1, 0
        while self.arrived and left >= self.arrived[0][1]:
            work = self.arrived.popleft()[1]
            left -= work
            self.admission.served += work
            done += 1
        self.delay = self.usual + (self.now - self.arrived[0][0] if self.arrived else 0.0)
        self.admission.adjust(self.now, self.delay)
        return done


@settings(max_examples=20, phases=[Phase.generate])
@given(st.integers(3, 10), st.integers(250, 400), st.integers(3, 10), st.sampled_from([0.0, 0.03]))
def test_who_floods_is_refused_and_the_others_are_not(others: int, capacity: int, times: int, usual: float) -> None:
    server = Server(float(capacity), usual=usual)
    light = [Contender() for _ in range(others)]
    each = max(int(capacity * 0.04 / others), 1)  # of the step: together less than half of the capacity
    flood, refused, late = Contender(), [0, 0], list[float]()
    for step in range(400):
        for one in light:
            found = server.offer(one, each)
            refused[0] += found if step >= 100 else 0  # until then the service learns what it can do
        if 50 <= step < 300:
            refused[1] += server.offer(flood, int(capacity * 0.1 * times))
        server.step()
        if 150 <= step < 300:
            late.append(server.delay)
    assert refused[0] == 0
    assert refused[1] > 0.5 * 250 * capacity * 0.1 * (times - 2)
    assert sorted(late)[len(late) // 2] <= 4 * max(0.05, 3 * usual)
    assert not server.admission.overloaded
    assert server.admission.level == inf
    assert not server.arrived


def test_capacity_is_used_while_one_is_refused() -> None:
    server, light, flood = Server(1000.0), Contender(), Contender()
    done = 0
    for step in range(600):
        server.offer(light, 10)
        server.offer(flood, 1000)
        completed = server.step()
        done += completed if step >= 100 else 0
    assert done >= 0.6 * 50 * 1000


def test_who_is_alone_is_never_refused() -> None:
    server, alone = Server(100.0), Contender()
    assert sum(server.offer(alone, 100) for _ in range(100) if server.step() or True) == 0
    assert server.delay > 1.0


@settings(max_examples=20, phases=[Phase.generate])
@given(st.integers(2, 20), st.integers(5, 50))
def test_equal_clients_that_wait_for_their_answers_are_not_refused(clients: int, window: int) -> None:
    server = Server(500.0)
    contenders = [Contender() for _ in range(clients)]
    waiting: deque[int] = deque()
    free = [window] * clients
    refused = done = 0
    later = deque[tuple[int, int, int]]()
    for step in range(300):
        for number, contender in enumerate(contenders[: step // 5]):  # one begins after the other
            kept = server.offer(contender, free[number])
            waiting.extend([number] * (free[number] - kept))
            later.append((step + 5, number, kept))
            free[number], refused = 0, refused + kept
        while later and later[0][0] <= step:
            _, number, kept = later.popleft()
            free[number] += kept
        for _ in range(server.step()):
            free[waiting.popleft()] += 1
            done += 1
    assert refused <= 0.05 * done  # some clients begin while others have all of the service
    assert server.delay > 0.05 or clients * window <= 50


def test_stalled_machine_does_not_refuse_light_contenders() -> None:
    server, contenders = Server(1000.0), [Contender() for _ in range(10)]
    refused = 0
    for step in range(600):
        server.usual = 0.3 if step % 100 > 50 else 0.0  # something else needs the machine
        refused += sum(server.offer(one, 1 if step % 3 else 2) for one in contenders)
        refused += server.offer(contenders[0], 0)
        server.step()
    assert refused == 0
    assert server.admission.capacity >= LEAST


def test_usual_delay_is_the_least_of_a_minute() -> None:
    usual = UsualDelay()
    for second in range(100):
        for _ in range(10):
            usual.add(0.01 if second == 20 else 0.05, 0.1)
        assert usual.seconds == pytest.approx(0.01 if 20 <= second < 80 else 0.05)


# --- limits of a principal ---


@given(st.integers(0, 5), st.integers(0, 8), st.integers(1, 3))
def test_limit_is_exceeded_by_what_is_more(value: int, used: int, more: int) -> None:
    usage = PrincipalUsage("p", PrincipalLimits(sessions=value), 0.0)
    excess = usage.excess("sessions", used, more)
    assert (excess is not None) == (value > 0 and used + more > value)
    if excess is not None:
        assert (excess.limit, excess.value) == ("sessions", value)
    assert usage.excess("streams", used, more) is None


def test_requests_per_second_are_limited_and_change_with_the_policy() -> None:
    usage = PrincipalUsage("p", NO_LIMITS, 0.0)
    assert not usage.limits_requests
    assert all(usage.request(0.0) is None for _ in range(1000))
    usage.change(PrincipalLimits(requests_per_second=5), 0.0)
    assert usage.limits_requests
    assert [usage.request(0.0) is None for _ in range(7)] == [True] * 5 + [False] * 2
    excess = usage.request(0.0)
    assert excess is not None
    assert excess.limit == "requests_per_second"
    assert excess.retry_after == pytest.approx(0.2)
    assert usage.request(excess.retry_after) is None
    usage.change(NO_LIMITS, 0.0)
    assert usage.request(0.2) is None


def test_bytes_in_flight_make_clients_wait() -> None:
    usage = PrincipalUsage("p", PrincipalLimits(bytes_in_flight=100), 0.0)
    usage.bytes_in_flight = 100
    assert not usage.too_many_bytes
    usage.bytes_in_flight = 101
    assert usage.too_many_bytes
    usage.change(NO_LIMITS, 0.0)
    assert not usage.too_many_bytes
