"""A random history of coordinators from a seed: owners, zombies, clients, lost acknowledgements, resent batches.

At the end all pending appends are written, a last owner takes over, time passes, and the logs are checked: nothing is
lost, doubled, half committed or visible without a commit, and all answers were correct.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

from coordinator_clients import GROUP, SOURCE, Attempt, Client
from coordinator_world import Owner, Reading, World

from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.model import Outcome, TxnId

TOPICS = ["a", "b", "c"]


class Wrong(AssertionError):
    """A history that violates a guarantee."""


def config_of(chance: random.Random) -> CoordinatorConfig:
    one_phase = chance.random() < 0.6
    return CoordinatorConfig(
        one_phase=one_phase,
        verify_counts=one_phase or chance.random() < 0.3,
        transaction_timeout=20.0,
        max_transaction_timeout=60.0,
        session_timeout=chance.choice([4.0, 15.0]),
        lease_timeout=60.0,
        remember=chance.choice([3.0, 60.0]),
        low_water_mark_interval=0.0,
        ended_interval=0.0,
        max_group=chance.choice([8, 10_000]),
    )


class Exploration:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.covered: Counter[str] = Counter()
        self.world = World()
        self.config = config_of(self.chance)
        self.topics = TOPICS[: self.chance.choice([1, 2, 2, 3])]
        self.owners: list[Owner] = []
        self.new_owner()
        count = self.chance.choice([1, 2, 2, 3])
        self.clients = [
            Client(self.world, self.chance, f"s{number}", self.topics, self.covered) for number in range(count)
        ]
        for client in self.clients:
            client.miscounts = 0.03 if self.config.verify_counts else 0.0

    def run(self) -> Counter[str]:
        """Run the history. Raises Wrong, or the exception of a bug."""
        if self.chance.random() < 0.85:
            self.warm_up()
        for _ in range(self.chance.randint(40, 130)):
            self.step()
        self.finish()
        Judge(self).judge()
        return self.covered

    def warm_up(self) -> None:
        """Connect all clients and let them begin, so that most random steps interleave transactions."""
        for client in self.clients:
            client.connect(self.owner)
            for _ in range(4):
                self.owner.settle()
                client.act()
        self.owner.settle()

    @property
    def owner(self) -> Owner:
        return self.owners[-1]

    def new_owner(self) -> None:
        if self.owners:
            self.covered["take-over"] += 1
            if self.chance.random() < 0.5:
                self.owner.crash()
        self.owners.append(self.world.take_over(self.config, compact=self.chance.random() < 0.5))

    def step(self) -> None:
        chance = self.chance
        roll = chance.random()
        if roll < 0.54:
            self.client_step(chance.choice(self.clients))
        elif roll < 0.85:
            owner = self.owner if chance.random() < 0.7 else chance.choice(self.owners)
            self.owner_step(owner)
        elif roll < 0.94:
            self.owner.settle()
        elif roll < 0.96:
            self.world.now += chance.choice([0.5, 2.0, 6.0, 25.0])
            chance.choice(self.owners).tick()
        elif roll < 0.975:
            self.resend()
        elif roll < 0.985 and self.world.late:
            self.late_record()
        elif len(self.owners) < 4:
            self.new_owner()

    def client_step(self, client: Client) -> None:
        chance, roll = self.chance, self.chance.random()
        if client.dead:
            return
        if client.owner is None or client.owner.stopped or roll < 0.02:
            # A client may connect to a zombie too.
            client.connect(self.owner if chance.random() < 0.8 else chance.choice(self.owners))
        elif roll < 0.03:
            client.disconnect()
        elif roll < 0.035:
            client.die()
            self.covered["client died"] += 1
        elif roll < 0.08:
            client.hear()
            client.query(client.owner)
        else:
            client.act()
        if client.owner is not None:
            client.owner.take()

    def owner_step(self, owner: Owner) -> None:
        chance = self.chance
        if owner.stopped:
            return
        steps = []
        if owner.appends:
            steps += [owner.land_append] * 3
        if owner.acks:
            steps += [owner.acknowledge_append] * 3
        if owner.markers:
            steps += [lambda: owner.land_marker(chance.randrange(len(owner.markers)))] * 3
            steps += [lambda: owner.lose_marker(chance.randrange(len(owner.markers)))]
        if owner.marker_acks:
            which = chance.randrange(len(owner.marker_acks))
            steps += [lambda: owner.acknowledge_marker(which, lost=chance.random() < 0.1)] * 2
        if owner.checks:
            steps += [lambda: owner.count(chance.randrange(len(owner.checks)))] * 2
        if owner.registrations:
            steps += [owner.snapshot] * 3
        if owner.epoch_markers:
            steps += [lambda: owner.land_epoch_marker(chance.randrange(len(owner.epoch_markers)))] * 2
        steps.append(owner.tick)
        for topic in owner.buffers:
            steps.append(lambda topic=topic: owner.pump(topic, chance.choice([None, 1, 3])))
            steps.append(lambda topic=topic: owner.query_outcomes(topic))
        if steps:
            chance.choice(steps)()

    def resend(self) -> None:
        """A crashed broker appends records and markers of a topic again, after newer messages."""
        log = self.world.topic(self.chance.choice(self.topics))
        if log.messages:
            first = self.chance.randrange(len(log.messages))
            log.messages += log.messages[first : first + self.chance.randint(1, 5)]
            self.covered["resent run"] += 1

    def late_record(self) -> None:
        """A record whose send had failed is written after all."""
        topic, txn, seq, value = self.world.late.pop(0)
        self.world.record(topic, txn, seq, value)
        self.covered["late record"] += 1

    def finish(self) -> None:
        """Write all pending appends; a last owner takes over, clients reconnect, time passes."""
        chance = self.chance
        for owner in self.owners[:]:
            if chance.random() < 0.5:
                for _ in range(4):
                    self.owner_step(owner)
        self.new_owner()
        for owner in chance.sample(self.owners, len(self.owners)):
            owner.settle()
        while self.world.late:
            self.late_record()
        for client in self.clients:
            if not client.dead and chance.random() < 0.7:
                client.connect(self.owner)
        self.last_words()
        for _ in range(20):
            self.owner.tick(5.0)
            for topic in self.owner.buffers:
                self.owner.query_outcomes(topic)
            self.owner.settle()

    def last_words(self) -> None:
        """Reconnected clients repeat their requests, get answers and leave."""
        for _ in range(6):
            for client in self.clients:
                client.hear()
                if client.owner is self.owner and client.ready:
                    client.send_all(self.owner)
            self.owner.settle()
        for client in self.clients:
            client.hear()
            client.disconnect()


class Judge:
    """Compares every topic, read from its start, with the records and answers of the clients."""

    def __init__(self, history: Exploration) -> None:
        self.history = history
        self.readings = {topic: Reading(history.world.topic(topic)) for topic in history.topics}
        self.visible: dict[TxnId, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        for topic, reading in self.readings.items():
            for value in reading.values:
                self.visible[TxnId.parse(value.decode().split("/")[0])][topic].append(value)

    def judge(self) -> None:
        history = self.history
        self.check(history.owner.stopped is None, f"the last owner stopped: {history.owner.stopped}")
        self.check(history.owner.coordinator.ready, "the takeover never ended")
        for topic, reading in self.readings.items():
            self.check(not reading.ongoing, f"{topic}: {reading.ongoing} block all readers for ever")
            self.check(not reading.damage, f"{topic}: {reading.damage}")
        attempts = [attempt for client in history.clients for attempt in client.attempts]
        for attempt in attempts:
            if attempt.lead is None:
                self.check_attempt(attempt)
        self.check_names(attempts)
        self.check_positions(attempts)
        self.check_mark()

    def check(self, good: bool, what: str) -> None:
        if not good:
            raise Wrong(f"seed {self.history.seed}: {what}")

    def check_attempt(self, attempt: Attempt) -> None:
        members = [attempt, *attempt.branches]
        seen = {member.txn: dict(self.visible.get(member.txn, {})) for member in members}
        whole = {member.txn: member.written if member in (attempt, *attempt.wins) else {} for member in members}
        committed = any(seen.values())
        text = f"{attempt.txn} asked {attempt.asked}, told {attempt.told}, wrote {whole}, seen {seen}"
        if committed:
            self.check(seen == whole, f"half or doubled: {text}")
            self.check(Outcome.ABORT not in attempt.told, f"told aborted, but visible: {text}")
            self.check(not attempt.miscounted, f"committed without a record: {text}")
            self.history.covered["committed"] += 1
            self.history.covered["committed on several topics"] += len(whole[attempt.txn]) > 1
            self.history.covered["committed branches"] += bool(attempt.wins)
        elif any(whole.values()):
            self.history.covered["miscounted"] += attempt.miscounted
            self.check(Outcome.COMMIT not in attempt.told, f"told committed, but lost: {text}")
        self.check(len(attempt.told) < 2, f"two answers: {text}")
        for branch in attempt.branches:
            if branch in attempt.wins and committed:
                self.check(Outcome.ABORT not in branch.told, f"branch {branch.txn} told aborted: {text}")
            elif branch not in attempt.wins or any(whole.values()):
                self.check(Outcome.COMMIT not in branch.told, f"branch {branch.txn} told committed: {text}")

    def committed(self, attempt: Attempt) -> bool:
        """Whether it committed, by its visible records, or by its answers if it wrote none."""
        members = [attempt, *attempt.wins]
        if any(member.written for member in members):
            return any(self.visible.get(member.txn) for member in members)
        return Outcome.COMMIT in attempt.told

    def check_names(self, attempts: list[Attempt]) -> None:
        """A sequence commits at most once, and does if its client got COMMIT."""
        named = [one for one in attempts if one.sequence is not None]
        numbers = Counter(one.sequence.number for one in named if one.sequence and self.committed(one))
        self.check(max(numbers.values(), default=0) <= 1, f"a number was committed twice: {numbers}")
        silent = {one.sequence.number for one in named if one.sequence and not any(m.written for m in (one, *one.wins))}
        state = History.read(self.history.world.compacted()).names.get("n")
        for number in self.history.world.already_committed:
            self.check(state is not None and number <= state.committed, f"{number} is not committed, as was told")
        for number in numbers:
            self.check(state is not None and number <= state.committed, f"number {number} was forgotten")
        if state is not None and state.committed:
            good = state.committed in numbers or state.committed in silent
            self.check(good, f"the log says {state.committed} of {sorted(numbers)}")
        for opening, committed in self.history.world.names_opened:
            for one in named:
                older = one.sequence is not None and one.sequence.epoch < opening and one.sequence.number > committed
                self.check(not (older and self.committed(one)), f"{one.txn} committed after opening {opening}")
        self.history.covered["committed under a name"] += sum(numbers.values())

    def check_positions(self, attempts: list[Attempt]) -> None:
        """The ranges that committed transactions consumed are consecutive, and the log has the last end."""
        moves = [(one, one.moves) for one in attempts if one.moves is not None]
        unsure = any(not one.told and not any(m.written for m in (one, *one.wins)) for one, _ in moves)
        moved = sorted((move.start, move.end) for one, move in moves if self.committed(one))
        self.history.covered["committed with positions"] += len(moved)
        for (_, end), (start, _) in itertools.pairwise(moved):
            self.check(end == start or (unsure and end < start), f"{GROUP} consumed {SOURCE} twice or not: {moved}")
        state = History.read(self.history.world.compacted()).consumers.get(GROUP)
        if moved:
            known = state.positions.get(SOURCE) if state is not None else None
            self.check(known == moved[-1][1] or unsure, f"the log says {known}, consumed was {moved}")
        for generation, start in self.history.world.joined:
            for one, move in moves:
                late = move.generation < generation and (start is None or move.end > start)
                self.check(not (late and self.committed(one)), f"{one.txn} committed after generation {generation}")

    def check_mark(self) -> None:
        """All clients are gone: the low-water mark has passed every leased id."""
        history = History.read(self.history.world.compacted())
        mark = self.history.owner.coordinator.low_water_mark
        self.check(mark >= history.highest_lease, f"the low-water mark stays at {mark} of {history.highest_lease}")
        self.history.covered["raised the low-water mark"] += mark > 0


def explore(first: int, count: int) -> Counter[str]:
    """Run `count` histories with seeds from `first` on; counts of what they covered. Raises Wrong at the first bug."""
    covered: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found = Exploration(seed).run()
        except Exception as error:  # an exception counts as a violation too
            raise Wrong(f"history {seed}: {type(error).__name__}: {error}") from error
        covered += found
        covered["histories"] += 1
        covered["histories with a commit"] += found["committed"] > 0
    return covered
