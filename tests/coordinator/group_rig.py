"""A coordinator of consumer groups for tests, with a log whose appends are acknowledged on request."""

from __future__ import annotations

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import Owner, encode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    AppendDecisions,
    Commit,
    ConsumerPosition,
    CoordinatorConfig,
    GroupHeartbeat,
    Leased,
    MemberAssignments,
    Result,
    SessionResults,
)
from txnbuffer.model import TxnId

CONFIG = CoordinatorConfig(one_phase=False, verify_counts=False)
GROUP = "g"
MEMBERS = [f"m{number}" for number in range(4)]


class Rig:
    """A coordinator, its log, and the answers to its clients."""

    def __init__(self, members: list[str] | None = None) -> None:
        self.members = members or MEMBERS
        self.log: list[Message] = []
        self.now = 0.0
        self.under_way: list[AppendDecisions] = []
        self.answers: dict[int, Result] = {}
        self.requests = 0
        self.ids: dict[str, list[int]] = {}
        self.epoch = 0
        self.coordinator: Coordinator
        self.take_over(0)

    def request(self) -> int:
        self.requests += 1
        return self.requests

    def take_over(self, landed: int) -> None:
        """Another owner takes over after `landed` of the pending appends were written."""
        for append in self.under_way[:landed]:
            self.log += append.messages
        self.under_way = []
        self.epoch += 1
        self.log.append(encode(Owner(self.epoch, "owner")))
        self.coordinator = Coordinator(0, self.epoch, CONFIG, History.read(self.log), self.now)
        self.ids = {}
        for member in self.members:
            self.coordinator.open_session(member, 0, (), self.now)
            asked = self.request()
            self.coordinator.lease(member, asked, 100, self.now)
            self.settle()
            leased = self.answers[asked]
            assert isinstance(leased, Leased)
            self.ids[member] = list(range(leased.first, leased.first + leased.size))

    def take(self) -> None:
        for effect in self.coordinator.take_effects():
            if isinstance(effect, AppendDecisions):
                self.under_way.append(effect)
            elif isinstance(effect, SessionResults):
                self.answers |= dict(effect.answers)

    def land(self, count: int) -> None:
        """Acknowledge `count` of the pending appends."""
        for append in self.under_way[:count]:
            self.log += append.messages
            self.coordinator.decisions_durable(append.token, self.now)
        del self.under_way[:count]
        self.take()

    def settle(self) -> None:
        self.take()
        while self.under_way:
            self.land(len(self.under_way))

    def say(self, member: str, partitions: int, ends: tuple[Position, ...] = (), *, leaves: bool = False) -> int:
        """Send the heartbeat of a member."""
        names = () if leaves else tuple(f"t-{number}" for number in range(partitions))
        asked = self.request()
        part = GroupHeartbeat(asked, GROUP, member, ("t",) * len(names), names, ends, leaves)
        self.coordinator.heartbeat(member, part, self.now)
        self.take()
        return asked

    def commit(self, member: str, move: ConsumerPosition) -> int:
        asked = self.request()
        commit = Commit(asked, TxnId(0, self.ids[member].pop(0)), (), (), positions=(move,))
        self.coordinator.commit_many(member, [commit], self.now)
        self.take()
        return asked

    def shares(self, asked: int) -> MemberAssignments:
        found = self.answers[asked]
        assert isinstance(found, MemberAssignments)
        return found

    def held(self, asked: int) -> list[str]:
        return sorted(share.partition for share in self.shares(asked).assignments)
