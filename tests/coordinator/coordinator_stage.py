"""One owner with one client, for tests of the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from coordinator_world import SHARD, Owner, World

from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import Begin, Commit, CoordinatorConfig, Result
from txnbuffer.errors import TransactionAborted
from txnbuffer.model import TxnId

S = "session"
DECIDED = CoordinatorConfig(one_phase=False, verify_counts=False)


def txn(least: int) -> TxnId:
    return TxnId(SHARD, least)


def ask_commit(owner: Owner, least: int, *topics: str, session: str = S, **more: object) -> int:
    """Commit with one record in each topic; returns the request."""
    request = owner.request()
    commit = Commit(request, txn(least), topics, (1,) * len(topics), **more)  # type: ignore[arg-type]  # by keyword
    owner.coordinator.commit_many(session, [commit], owner.world.now)
    owner.take()
    return request


def ask_abort(owner: Owner, least: int, *topics: str) -> int:
    request = owner.request()
    owner.coordinator.abort(S, request, txn(least), topics, owner.world.now)
    owner.take()
    return request


def query(owner: Owner, least: int) -> Result | None:
    request = owner.request()
    owner.coordinator.query(S, request, txn(least), owner.world.now)
    owner.take()
    return owner.heard(S, request)


def aborted(result: Result | None) -> bool:
    return isinstance(result, TransactionAborted)


class Stage:
    """One owner, and one client with ids from `first` on and topics a and b."""

    def __init__(self, config: CoordinatorConfig | None = None, ids: int = 10) -> None:
        self.world = World()
        self.owner = self.world.take_over(config)
        self.first = self.owner.client(S, ids=ids)

    def txn(self, at: int) -> TxnId:
        return txn(self.first + at)

    def write(self, at: int, topic: str, count: int = 1) -> None:
        for seq in range(1, count + 1):
            self.world.record(topic, self.txn(at), seq, f"{at}/{topic}/{seq}".encode())

    def send(self, ask: Callable[[int], None]) -> int:
        request = self.owner.request()
        ask(request)
        self.owner.take()
        return request

    def call(self, ask: Callable[[int], None], session: str = S) -> Result | None:
        request = self.send(ask)
        self.owner.settle()
        return self.owner.heard(session, request)

    def commit(self, at: int, *topics: str, session: str = S, records: int = 1, **more: object) -> Result | None:
        return self.call(
            lambda request: self.ask_commit(request, at, *topics, session=session, records=records, **more)
        )

    def ask_commit(
        self, request: int, at: int, *topics: str, session: str = S, records: int = 1, **more: object
    ) -> None:
        commit = Commit(request, self.txn(at), topics, (records,) * len(topics), **more)  # type: ignore[arg-type]  # by keyword
        self.owner.coordinator.commit_many(session, [commit], self.world.now)

    def abort(self, at: int, *topics: str, session: str = S, operator: bool = False) -> Result | None:
        return self.call(
            lambda request: self.owner.coordinator.abort(
                session, request, self.txn(at), topics, self.world.now, operator=operator
            ),
            session,
        )

    def query(self, at: int) -> Result | None:
        return self.call(lambda request: self.owner.coordinator.query(S, request, self.txn(at), self.world.now))

    def begin(self, at: int, **more: object) -> int:
        return self.send(
            lambda request: self.owner.coordinator.begin_many(
                S,
                [Begin(request, self.txn(at), **more)],
                self.world.now,  # type: ignore[arg-type]  # by keyword
            )
        )

    def decided(self) -> set[int]:
        """The ids decided by single entries in groups of the decision log."""
        groups = History.read(self.world.decisions).groups.values()
        return {row.least for group in groups for row in group.rows}

    def lease(self, count: int, session: str = S) -> Result | None:
        return self.call(lambda request: self.owner.coordinator.lease(session, request, count, self.world.now), session)
