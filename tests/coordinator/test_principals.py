"""Principals share the ids of a coordinator, and do not learn how the transactions of others ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from coordinator.coordinator_stage import S, Stage, txn
from coordinator_world import Owner, World

from txnbuffer.coordinator.messages import CoordinatorConfig, Leased, SessionOpened
from txnbuffer.errors import ForeignTransaction, OutcomeForgotten, TooManyTransactions
from txnbuffer.model import Outcome, TxnId

ONE, TWO, THREE = ("p" + digit * 31 for digit in "123")
"""Sessions of three principals."""


def principals(config: CoordinatorConfig | None = None, ids: int = 2) -> tuple[World, Owner, int]:
    """An owner, with topic a, where ONE and TWO each have leased ids; the first one of ONE."""
    world = World()
    owner = world.take_over(config)
    first = owner.client(ONE, ids=ids)
    owner.client(TWO, ids=ids)
    return world, owner, first


def ask(owner: Owner, session: str, kind: str, least: int) -> object:
    request, coordinator, now = owner.request(), owner.coordinator, owner.world.now
    if kind == "query":
        coordinator.query(session, request, txn(least), now)
    elif kind == "abort":
        coordinator.abort(session, request, txn(least), (), now)
    else:
        coordinator.open_session(session, request, [txn(least)], now)
    owner.take()
    owner.settle()
    found = owner.heard(session, request)
    return found.states[0][1] if isinstance(found, SessionOpened) else found


@pytest.mark.parametrize("kind", ["query", "abort", "claim"])
@pytest.mark.parametrize("again", [False, True], ids=["same owner", "next owner"])
def test_how_a_transaction_of_another_principal_ended_is_not_shown(kind: str, again: bool) -> None:
    world, owner, first = principals(CoordinatorConfig(remember=3600.0, low_water_mark_interval=1.0))
    assert ask(owner, ONE, "abort", first) is Outcome.ABORT
    owner.age(20)
    assert owner.coordinator.low_water_mark >= first
    if again:
        owner = world.take_over(CoordinatorConfig(remember=3600.0), compact=True)
        owner.settle()
        owner.coordinator.open_session(ONE, owner.request(), (), world.now)
        owner.coordinator.open_session(TWO, owner.request(), (), world.now)
        owner.settle()
    assert isinstance(ask(owner, TWO, kind, first), ForeignTransaction)
    assert ask(owner, ONE, "query", first) is Outcome.ABORT


def test_leases_of_known_principals_are_deleted_with_the_outcomes() -> None:
    _, owner, first = principals(CoordinatorConfig(remember=60.0, low_water_mark_interval=1.0))
    for at in range(4):
        ask(owner, (ONE, TWO)[at // 2], "abort", first + at)
    owner.age(30)
    assert {b"lease-%d" % first, b"lease-%d" % (first + 2)} <= {message.key for message in owner.world.compacted()}
    owner.age(60)
    assert not any((message.key or b"").startswith(b"lease-") for message in owner.world.compacted())
    assert isinstance(ask(owner, TWO, "query", first), OutcomeForgotten)


def lease(owner: Owner, session: str, count: int) -> object:
    request = owner.request()
    owner.coordinator.lease(session, request, count, owner.world.now)
    owner.take()
    owner.settle()
    return owner.heard(session, request)


def test_a_principal_gets_at_most_half_of_the_ids_that_the_others_leave() -> None:
    _, owner, _ = principals(CoordinatorConfig(max_open=100, max_open_session=100), ids=1)
    owner.client(THREE, ids=1)
    assert isinstance(lease(owner, ONE, 50), TooManyTransactions)
    assert isinstance(lease(owner, ONE, 48), Leased)
    assert isinstance(lease(owner, ONE, 1), TooManyTransactions)
    assert isinstance(lease(owner, TWO, 24), Leased)
    assert isinstance(lease(owner, TWO, 1), TooManyTransactions)
    assert isinstance(lease(owner, THREE, 11), Leased)


def test_clients_without_a_principal_have_no_share() -> None:
    stage = Stage(CoordinatorConfig(max_open=100, max_open_session=100), ids=10)
    assert isinstance(stage.lease(90), Leased)
    assert isinstance(stage.lease(1), TooManyTransactions)


def test_ids_of_a_closed_session_are_free_as_soon_as_its_end_is_durable() -> None:
    _, owner, _ = principals(CoordinatorConfig(max_open=100, max_open_session=100), ids=1)
    assert isinstance(lease(owner, ONE, 48), Leased)
    owner.coordinator.close_session(ONE, owner.request(), owner.world.now)
    owner.take()
    owner.settle()
    assert owner.coordinator.outstanding_of[ONE[:16]] == 0
    assert isinstance(lease(owner, TWO, 48), Leased)


def calls(work: Callable[[], None]) -> int:
    """How many functions a piece of work calls."""
    count = 0

    def counting(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("what", ["return", "return all again and again", "close", "expire"])
def test_work_for_ids_that_were_leased_one_by_one_grows_with_their_number(what: str) -> None:
    """A frame that returned such ids stopped the service for the square of their number."""

    def cost(count: int) -> int:
        stage = Stage(CoordinatorConfig(max_open_session=10_000, lease_timeout=60.0))
        coordinator, world = stage.owner.coordinator, stage.world
        leases = [stage.lease(1) for _ in range(count)]
        ids = [(one.first, 1) for one in leases if isinstance(one, Leased)]
        assert len(ids) == count
        if what == "return":
            return calls(lambda: coordinator.return_ids(S, 0, ids[::2], world.now))
        if what == "return all again and again":
            return calls(lambda: coordinator.return_ids(S, 0, [(1, 2**40)] * count, world.now))
        if what == "close":
            return calls(lambda: coordinator.close_session(S, 0, world.now))
        world.now += 61.0
        return calls(lambda: coordinator.tick(world.now))

    assert cost(400) < 3 * cost(200)


def test_a_query_about_an_id_that_is_being_retired_is_answered_once_it_is() -> None:
    stage = Stage(ids=10)
    ids: list[TxnId] = [stage.txn(at) for at in range(10)]
    stage.owner.coordinator.return_ids(S, 99, [(ids[0].least, 5)], stage.world.now)
    requests = [
        stage.send(lambda request, one=one: stage.owner.coordinator.abort(S, request, one, (), stage.world.now))
        for one in ids
    ]
    stage.owner.settle()
    assert [stage.owner.heard(S, request) for request in requests] == [Outcome.ABORT] * 10
