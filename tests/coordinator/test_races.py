"""The race table: an owner takes over while its predecessor ends a transaction. Each cell is a test."""

from __future__ import annotations

import itertools

import pytest
from coordinator.coordinator_races import CLIENTS, POINTS, PREDECESSORS, expected
from coordinator_world import SHARD, Owner, World

from txnbuffer.coordinator.messages import Commit, CoordinatorConfig
from txnbuffer.errors import TransactionAborted
from txnbuffer.model import Outcome, TxnId

S = "session"


class Race:
    def __init__(self, way: str, intent: Outcome) -> None:
        self.world = World()
        self.way = way
        self.intent = intent
        self.config = CoordinatorConfig(one_phase=way == "one-phase", verify_counts=way == "one-phase")
        self.topics = ("a",) if way == "one-phase" else ("a", "b")
        self.first = self.world.take_over(self.config)
        self.txn = TxnId(SHARD, self.first.client(S, ids=1))
        for topic in self.topics:
            self.world.record(topic, self.txn, 1, b"x")

    def ask(self, owner: Owner, intent: Outcome) -> int:
        request = owner.request()
        if intent is Outcome.COMMIT:
            commit = Commit(request, self.txn, self.topics, (1,) * len(self.topics))
            owner.coordinator.commit_many(S, [commit], self.world.now)
        else:
            owner.coordinator.abort(S, request, self.txn, self.topics, self.world.now)
        owner.take()
        return request

    def play(self, point: str) -> None:
        """Bring the predecessor to a point."""
        steps = POINTS[self.way].index(point)
        self.ask(self.first, self.intent)
        if self.way == "one-phase":
            self.one_phase_steps(steps)
        else:
            self.decided_steps(steps)

    def one_phase_steps(self, steps: int) -> None:
        owner = self.first
        if steps >= 1 and owner.checks:
            owner.count()
        if steps >= 2:
            owner.land_marker()
        if steps >= 3:
            owner.pump("a")
        if steps >= 4:
            owner.age(3)

    def decided_steps(self, steps: int) -> None:
        owner = self.first
        if steps >= 1:
            owner.land_append()
        if steps >= 2:
            owner.acknowledge_append()
        if steps >= 3:
            owner.land_marker()
        if steps >= 4:
            owner.land_marker()
        if steps >= 5:
            owner.settle()
            owner.age(3)

    def take_over(self, predecessor: str) -> Owner:
        """Start the next owner until it serves older ids; the predecessor's last appends come at the given point."""
        old = self.first
        if predecessor == "is slow" and self.way == "decided":
            while old.appends:
                old.land_append()
        owner = self.world.take_over(self.config)
        if predecessor == "is slow":
            self.let_land(old)
        owner.settle()
        assert owner.coordinator.ready
        if predecessor == "is a zombie":
            self.let_land(old)
        return owner

    def let_land(self, old: Owner) -> None:
        while not old.stopped and (old.appends or old.acks or old.markers or old.checks):
            if old.checks:
                old.count()
            while old.appends and not old.stopped:
                old.land_append()
            while old.acks and not old.stopped:
                old.acknowledge_append()
            while old.markers:
                old.land_marker()


CELLS = [
    (way, point, predecessor, intent, client)
    for way, points in POINTS.items()
    for point, predecessor, intent, client in itertools.product(points, PREDECESSORS, Outcome, CLIENTS)
    if not (intent is Outcome.ABORT and point == "asked")  # an abort needs no counting: it is written at once
]


@pytest.mark.parametrize(("way", "point", "predecessor", "intent", "client"), CELLS)
def test_cell(way: str, point: str, predecessor: str, intent: Outcome, client: str) -> None:
    race = Race(way, intent)
    race.play(point)
    owner = race.take_over(predecessor)
    outcome = expected(way, point, predecessor, intent, client)
    if client != "stays away":
        owner.open(S, race.txn)
        owner.settle()
        asked = Outcome.COMMIT if client == "commits again" else Outcome.ABORT
        request = race.ask(owner, asked)
        owner.settle()
        told = owner.heard(S, request)
        if outcome is Outcome.ABORT and asked is Outcome.COMMIT:
            assert isinstance(told, TransactionAborted)
        else:
            assert told is outcome
    owner.age(35)
    for topic in race.topics:
        owner.pump(topic)
        owner.query_outcomes(topic)
    owner.settle()
    race.first.settle()
    for topic in race.topics:
        reading = race.world.read(topic)
        assert reading.values == ([b"x"] if outcome is Outcome.COMMIT else [])
        assert not reading.ongoing
        assert not reading.damage
    truths = {told for (session, _), told in race.first.answers.items() if session == S and isinstance(told, Outcome)}
    assert truths <= {outcome}
    assert owner.stopped is None
