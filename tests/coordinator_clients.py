"""Clients of random coordinator histories: they write, commit, abort, lose answers, reconnect and record answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from coordinator_world import SHARD, Owner, World, position

from broker_io.position import Position
from txnbuffer.coordinator.messages import (
    OUTCOME_OF_STATE,
    Begin,
    Branch,
    Commit,
    ConsumerPosition,
    Joined,
    Leased,
    NameOpened,
    ProducerSequence,
    Result,
    SessionOpened,
    State,
)
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, OutcomeForgotten, TransactionAborted
from txnbuffer.model import Outcome, TxnId

GROUP = "group"
SOURCE = "source"


@dataclass
class Attempt:
    """A transaction as its client knows it. `written`: values with acknowledged sends, by topic.

    `told`: outcomes received from coordinators. `asked`: the request of the client. `broken`: a send failed, so it can
    only abort; `miscounted`: its commit has a wrong count. `lead`: the transaction of which it is a branch; `wins`:
    the branches that the commit names.
    """

    txn: TxnId
    written: dict[str, list[bytes]] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=dict)
    told: set[Outcome] = field(default_factory=set)
    asked: str = ""
    sent: bool = False
    broken: bool = False
    miscounted: bool = False
    lead: Attempt | None = None
    branches: list[Attempt] = field(default_factory=list)
    wins: list[Attempt] = field(default_factory=list)
    sequence: ProducerSequence | None = None
    moves: ConsumerPosition | None = None
    over: bool = False


class Client:
    """A client with the session `name`. It is connected to one owner at a time; answers come over that connection."""

    def __init__(self, world: World, chance: random.Random, name: str, topics: list[str], covered: dict[str, int]):
        self.world = world
        self.chance = chance
        self.name = name
        self.topics = topics
        self.covered = covered
        self.owner: Owner | None = None
        self.dead = False
        self.miscounts = 0.0
        self.ready = False
        self.registered = False
        self.ids: list[int] = []
        self.attempts: list[Attempt] = []
        self.waiting: dict[int, tuple[str, Attempt | None]] = {}
        self.epoch = 0
        self.number = 0
        self.last_number = 0
        self.generation = 0
        self.consumed: Position | None = None

    # Connections

    def connect(self, owner: Owner) -> None:
        """Connect to an owner and claim the open transactions; answers on the old connection are lost."""
        self.owner = owner
        self.waiting = {}
        self.ids = []
        self.ready = self.registered = False
        self.epoch = self.generation = 0
        for attempt in self.attempts:
            attempt.sent = False
        claims = [attempt.txn for attempt in self.attempts if not attempt.over]
        request = owner.request()
        self.waiting[request] = ("open", None)
        owner.coordinator.open_session(self.name, request, claims, self.world.now)

    def disconnect(self) -> None:
        if self.owner is not None:
            self.owner.coordinator.session_disconnected(self.name, self.world.now)
            self.owner = None
            self.waiting = {}

    def die(self) -> None:
        self.disconnect()
        self.dead = True

    # One step

    def act(self) -> None:
        """Make one random step."""
        owner = self.owner
        if self.dead or owner is None:
            return
        self.hear()
        if not self.ready:
            return
        if not self.registered:
            for topic in self.topics:
                owner.coordinator.register_topic(self.name, self.ask("register", None), topic, self.world.now)
            self.registered = True
        elif any(kind == "register" for kind, _ in self.waiting.values()):
            return  # the topics have to be followed before the first write
        elif not self.ids and not any(kind == "lease" for kind, _ in self.waiting.values()):
            count = self.chance.randint(1, 4)
            owner.coordinator.lease(self.name, self.ask("lease", None), count, self.world.now)
        else:
            self.work(owner)

    def work(self, owner: Owner) -> None:
        chance, open_ones = self.chance, [one for one in self.attempts if not one.asked and one.lead is None]
        roll = chance.random()
        if self.ids and (not open_ones or roll < 0.2):
            self.begin(owner)
        elif open_ones and roll < 0.5:
            lead = chance.choice(open_ones)
            self.write(chance.choice([lead, *lead.branches]))
        elif open_ones and roll < 0.88:
            self.finish(chance.choice(open_ones))
        elif roll < 0.94:
            self.join(owner)
        elif roll < 0.96 and self.ids:
            first = self.ids.pop()
            owner.coordinator.return_ids(self.name, owner.request(), [(first, 1)], self.world.now)
            self.covered["given back"] += 1
        self.send_all(owner)

    def send_all(self, owner: Owner) -> None:
        """Send all requests that were not sent on this connection yet."""
        for attempt in self.attempts:
            if attempt.lead is None and attempt.asked and not attempt.sent and not attempt.over:
                self.send(owner, attempt)

    def join(self, owner: Owner) -> None:
        """Open the producer name, or join the group, that all clients share."""
        if self.chance.random() < 0.5:
            owner.coordinator.open_name(self.name, self.ask("name", None), "n", self.world.now)
        else:
            owner.coordinator.join_group(self.name, self.ask("join", None), GROUP, self.world.now)

    def begin(self, owner: Owner) -> None:
        attempt = Attempt(TxnId(SHARD, self.ids.pop(0)))
        sequence = None
        if self.epoch and self.chance.random() < 0.5:
            again = self.last_number > 0 and self.chance.random() < 0.3
            self.last_number += not again
            attempt.sequence = sequence = ProducerSequence("n", self.last_number, self.epoch)
        if self.generation and self.chance.random() < 0.5:
            start = self.consumed or position(0)
            end = position(start.entry + self.chance.randint(1, 3))
            attempt.moves = ConsumerPosition(GROUP, SOURCE, self.generation, start, end)
            self.consumed = end
        self.attempts.append(attempt)
        if self.chance.random() < 0.3:
            begin = Begin(owner.request(), attempt.txn, self.chance.choice([None, 5.0, 40.0]), None, sequence)
            owner.coordinator.begin_many(self.name, [begin], self.world.now)
        if self.ids and self.chance.random() < 0.2:
            branch = Attempt(TxnId(SHARD, self.ids.pop(0)), lead=attempt)
            attempt.branches.append(branch)
            self.attempts.append(branch)
            parent = Begin(owner.request(), branch.txn, None, attempt.txn)
            owner.coordinator.begin_many(self.name, [parent], self.world.now)
            self.write(branch)

    def write(self, attempt: Attempt) -> None:
        """Send records; sometimes a send fails, and its record reaches the log later or never."""
        topic = self.chance.choice(self.topics)
        for _ in range(self.chance.randint(1, 2)):
            seq = attempt.seqs.get(topic, 0) + 1
            attempt.seqs[topic] = seq
            value = f"{attempt.txn}/{topic}/{seq}".encode()
            if self.chance.random() < 0.03:
                attempt.broken = True
                if attempt.lead is not None:
                    attempt.lead.broken = True
                self.world.late.append((topic, attempt.txn, seq, value))
                return
            self.world.record(topic, attempt.txn, seq, value)
            attempt.written.setdefault(topic, []).append(value)

    def finish(self, attempt: Attempt) -> None:
        """Choose the outcome to request; the request is repeated until it is answered."""
        attempt.asked = "abort" if attempt.broken or self.chance.random() < 0.15 else "commit"
        attempt.miscounted = bool(attempt.written) and self.chance.random() < self.miscounts
        attempt.wins = [branch for branch in attempt.branches if self.chance.random() < 0.8]
        for branch in attempt.branches:
            branch.asked = "with its lead"
            branch.sent = True

    def send(self, owner: Owner, attempt: Attempt) -> None:
        attempt.sent = True
        if self.chance.random() < 0.05:
            return  # the request is lost and repeated on the next connection
        request = self.ask(attempt.asked, attempt)
        if attempt.asked == "abort":
            topics = list(attempt.seqs)
            owner.coordinator.abort(self.name, request, attempt.txn, topics, self.world.now)
            return
        moves = () if attempt.moves is None else (attempt.moves,)
        winners = tuple(Branch(one.txn, *counts(one)) for one in attempt.wins)
        losers = tuple(one.txn for one in attempt.branches if one not in attempt.wins)
        visible = self.chance.random() < 0.2
        topics, records = counts(attempt)
        if attempt.miscounted:
            records = (records[0] + 1, *records[1:])
        commit = Commit(request, attempt.txn, topics, records, visible, attempt.sequence, winners, losers, moves)
        owner.coordinator.commit_many(self.name, [commit], self.world.now)

    def query(self, owner: Owner) -> None:
        """Query a random transaction, own or foreign."""
        if self.attempts:
            attempt = self.chance.choice(self.attempts)
            owner.coordinator.query(self.name, self.ask("query", attempt), attempt.txn, self.world.now)

    # Answers

    def ask(self, kind: str, attempt: Attempt | None) -> int:
        assert self.owner is not None
        request = self.owner.request()
        self.waiting[request] = (kind, attempt)
        return request

    def hear(self) -> None:
        owner = self.owner
        if owner is None:
            return
        for request in list(self.waiting):
            result = owner.heard(self.name, request)
            if result is not None:
                kind, attempt = self.waiting.pop(request)
                self.take(kind, attempt, result)

    def take(self, kind: str, attempt: Attempt | None, result: Result) -> None:
        match result:
            case Leased(first=first, size=size):
                self.ids = list(range(first, first + size))
            case SessionOpened(states=states):
                self.ready = True
                known = {one.txn: one for one in self.attempts}
                for txn, state in states:
                    if isinstance(state, State):
                        if state in OUTCOME_OF_STATE:
                            self.tell(known[txn], OUTCOME_OF_STATE[state])
                    else:
                        known[txn].over = True
            case NameOpened(epoch=opening, committed=committed):
                self.epoch, self.last_number = opening, committed
                self.world.names_opened.append((opening, committed))
            case Joined(generation=generation, positions=positions):
                self.generation = generation
                self.consumed = dict(positions).get(SOURCE)
                self.world.joined.append((generation, self.consumed))
            case _ if attempt is not None:
                self.conclude(kind, attempt, result)

    def conclude(self, kind: str, attempt: Attempt, result: Result) -> None:
        match result:
            case Outcome():
                self.tell(attempt, result)
            case TransactionAborted():
                self.tell(attempt, Outcome.ABORT)
            case AlreadyCommitted(number=number):
                self.world.already_committed.append(number)
                self.covered["AlreadyCommitted"] += 1
                self.tell(attempt, Outcome.ABORT)
            case OutcomeForgotten():
                attempt.over = True
                self.covered["forgotten"] += 1
            case InvalidRequest() if kind == "commit":
                attempt.asked, attempt.sent = "abort", False
            case State() | InvalidRequest():
                pass
            case _:
                self.covered[type(result).__name__] += 1
                if kind != "query":
                    attempt.asked, attempt.sent = "abort", kind == "abort"

    def tell(self, attempt: Attempt, outcome: Outcome) -> None:
        attempt.told.add(outcome)
        attempt.over = True
        self.covered[f"told {outcome.name}"] += 1


def counts(attempt: Attempt) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(attempt.written), tuple(len(values) for values in attempt.written.values())
