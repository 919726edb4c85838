"""What every lock of a pair must do, whatever keeps it: `PairLock`, and `accepts` of the core."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker_io.filelog.log.records import Mark, Store
from broker_io.filelog.pair.port import PairLock
from broker_io.filelog.replication.lease import LockLease
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView, Swap, accepts

A, B = b"\x0a" * 16, b"\x0b" * 16
TTL = 60.0
MARKS = (Mark(0, 0, 0), Mark(3, 2**40, 2**64 - 1))
Open = Callable[[], PairLock]


def claim(view: LockView, store: Store, session: int, **changes: Any) -> Swap:
    """The swap that makes a store live after what a lock shows."""
    record = view.record
    wanted = LockRecord(record.version + 1, record.epoch + 1, store, (store,), MARKS[1], None)
    return Swap(wanted._replace(**changes), session, None)


def begin(lock: PairLock, store: Store) -> int:
    session = lock.renew(store, None, TTL)
    assert session is not None
    return session


@dataclass
class NaiveLock:
    """A lock by its definition; sessions are those of the lock that it is compared with."""

    record: LockRecord = NO_RECORD
    lease: tuple[Store, int] | None = None
    owners: dict[int, Store] = field(default_factory=dict)

    def end(self, session: int) -> None:
        self.owners.pop(session, None)
        if self.lease is not None and self.lease[1] == session:
            self.lease = None

    def begin(self, store: Store, session: int) -> None:
        for each in [each for each, owner in self.owners.items() if owner == store]:
            self.end(each)
        self.owners[session] = store

    def swap(self, swap: Swap, seen: LockView) -> bool:
        alive = self.owners.get(swap.session) == swap.record.live
        if not accepts(LockView(self.record, seen.lease), swap, session_alive=alive):
            return False
        self.record, self.lease = swap.record, (swap.record.live, swap.session)
        return True


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from([A, B])),
        st.tuples(st.just("renew"), st.sampled_from([A, B]), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(
            st.just("swap"), st.sampled_from([A, B]), st.integers(0, 3), st.sampled_from([1, 1, 1, 0, 2]),
            st.sampled_from(["none", "none", "now", "first"]), st.sampled_from([(A,), (A, B)]),
            st.sampled_from([None, *MARKS]),
        ),
    ),
    max_size=12,
)  # fmt: skip


class LockContract:
    """Subclasses have a fixture `open_lock`, which opens a new lock, then the same one again for each call."""

    examples = 100

    def test_is_empty_at_first(self, open_lock: Open) -> None:
        assert open_lock().read() == LockView(NO_RECORD, None)

    def test_swap_replaces_record_and_lease(self, open_lock: Open) -> None:
        lock = open_lock()
        session = begin(lock, A)
        swap = claim(lock.read(), A, session, in_sync=(A, B), forced=MARKS[1])
        accepted, view = lock.swap(swap)
        assert accepted
        assert view == open_lock().read()
        assert view.record == swap.record
        assert view.lease is not None
        assert view.lease[:2] == (A, session)

    def test_swap_of_another_version_is_refused(self, open_lock: Open) -> None:
        lock = open_lock()
        session = begin(lock, A)
        late = claim(lock.read(), A, session)
        assert lock.swap(late)[0]
        assert lock.swap(claim(lock.read(), A, session))[0]
        before = lock.read()
        assert lock.swap(late) == (False, before)
        assert lock.swap(claim(before, A, session, version=before.record.version + 2)) == (False, before)
        assert lock.read() == before

    def test_swap_over_the_lease_of_another_store_is_refused(self, open_lock: Open) -> None:
        lock, other = open_lock(), open_lock()
        session, challenger = begin(lock, A), begin(other, B)
        lock.swap(claim(lock.read(), A, session))
        view = other.read()
        assert other.swap(claim(view, B, challenger)) == (False, view)
        assert view.lease is not None
        for lease in (view.lease._replace(session=challenger), view.lease._replace(renewals=99)):
            assert not other.swap(claim(view, B, challenger)._replace(over=lease))[0]
        lock.end_session(session)
        assert other.read() == LockView(view.record, None)
        assert other.swap(claim(view, B, challenger))[0]

    def test_swap_over_a_watched_lease_replaces_it(self, open_lock: Open) -> None:
        lock, other = open_lock(), open_lock()
        session, challenger = begin(lock, A), begin(other, B)
        lock.swap(claim(lock.read(), A, session))
        view = other.read()
        accepted, after = other.swap(claim(view, B, challenger)._replace(over=view.lease))
        assert accepted
        assert after.lease is not None
        assert after.lease[:2] == (B, challenger)
        assert not lock.swap(claim(view, A, session))[0]

    def test_renewal_of_a_lease_without_a_clock_shows(self, open_lock: Open) -> None:
        lock = open_lock()
        session = begin(lock, A)
        lock.swap(claim(lock.read(), A, session))
        before = lock.read().lease
        assert lock.renew(A, session, TTL) == session
        after = lock.read().lease
        assert before is not None
        assert after is not None
        assert after[:2] == before[:2]
        assert lock.clocked or after.renewals == before.renewals + 1

    def test_beginning_a_session_ends_the_former_one_and_its_lease(self, open_lock: Open) -> None:
        lock, again = open_lock(), open_lock()
        session = begin(lock, A)
        lock.swap(claim(lock.read(), A, session))
        late = claim(lock.read(), A, session)
        newer = begin(again, A)
        assert newer != session
        assert lock.read().lease is None
        assert lock.renew(A, session, TTL) is None
        assert not lock.swap(late)[0]
        assert again.renew(A, newer, TTL) == newer
        assert again.swap(claim(again.read(), A, newer))[0]

    def test_ended_session_is_not_renewed_and_makes_no_swap(self, open_lock: Open) -> None:
        lock = open_lock()
        session = begin(lock, A)
        lock.end_session(session)
        lock.end_session(session)
        assert lock.renew(A, session, TTL) is None
        view = lock.read()
        assert lock.swap(claim(view, A, session)) == (False, view)

    def test_sessions_of_two_stores_are_independent(self, open_lock: Open) -> None:
        lock, other = open_lock(), open_lock()
        sessions = {A: begin(lock, A), B: begin(other, B)}
        lock.swap(claim(lock.read(), A, sessions[A]))
        other.end_session(sessions[B])
        lease = lock.read().lease
        assert lease is not None
        assert lease[:2] == (A, sessions[A])
        assert lock.renew(A, sessions[A], TTL) == sessions[A]

    def test_one_of_several_swaps_at_once_succeeds(self, open_lock: Open) -> None:
        stores = [bytes([each]) * 16 for each in range(1, 5)]
        won: list[tuple[int, Store]] = []
        errors: list[BaseException] = []

        def contend(lock: PairLock, store: Store) -> None:
            try:
                session = begin(lock, store)
                for _ in range(10):
                    view = lock.read()
                    if lock.swap(claim(view, store, session)._replace(over=view.lease))[0]:
                        won.append((view.record.version + 1, store))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=contend, args=(open_lock(), store)) for store in stores]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert errors == []
        assert sorted(version for version, _ in won) == list(range(1, len(won) + 1))
        record = open_lock().read().record
        assert (record.version, record.live) == max(won)

    def test_does_as_its_definition(self, open_lock: Open) -> None:
        names = itertools.count()

        @settings(max_examples=self.examples, suppress_health_check=[*HealthCheck])
        @given(STEPS)
        def compare(steps: list[Any]) -> None:
            lock = open_lock.new(f"p{next(names)}")  # type: ignore[attr-defined]  # of the fixtures here
            with contextlib.closing(lock):
                follow_naive(lock, steps)

        compare()


def follow_naive(lock: PairLock, steps: list[Any]) -> None:
    """Do steps with a lock and with its definition."""
    naive = NaiveLock()
    begun: list[int] = []
    leases: list[LockLease] = []
    for kind, *rest in steps:
        if kind == "begin":
            begun.append(begin(lock, rest[0]))
            naive.begin(rest[0], begun[-1])
        elif not begun:
            continue
        elif kind == "renew":
            session = begun[rest[1] % len(begun)]
            expected = session if naive.owners.get(session) == rest[0] else None
            assert lock.renew(rest[0], session, TTL) == expected
        elif kind == "end":
            session = begun[rest[0] % len(begun)]
            lock.end_session(session)
            naive.end(session)
        else:
            store, which, step, over, in_sync, forced = rest
            view = lock.read()
            lease = {"none": None, "now": view.lease, "first": leases[0] if leases else None}[over]
            record = LockRecord(view.record.version + step, view.record.epoch, store, in_sync, MARKS[0], forced)
            swap = Swap(record, begun[which % len(begun)], lease)
            assert lock.swap(swap)[0] == naive.swap(swap, view)
        view = lock.read()
        assert view.record == naive.record
        assert (view.lease and view.lease[:2]) == naive.lease
        if view.lease is not None:
            leases.append(view.lease)


class OpenLocks:
    """Opens locks and closes them all in the end; `make` opens the one of a name."""

    def __init__(self, make: Callable[[str], PairLock]) -> None:
        self._make = make
        self._open: list[PairLock] = []

    def __call__(self) -> PairLock:
        self._open.append(self._make("one"))
        return self._open[-1]

    def new(self, name: str) -> PairLock:
        return self._make(name)

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
def open_lock() -> Open:
    raise NotImplementedError("a contract suite needs a lock")
