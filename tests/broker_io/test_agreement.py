"""The embedded log on a crashing disk agrees with the broker in memory after every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_history import open_log

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.errors import PositionTrimmed
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.position import Position
from broker_io.testing import Crash, SimulatedClock, SimulatedDisk, Unsynced

TOPICS = st.sampled_from(["a", "b"])
MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from([b"k1", b"k2", b"k3", b"", None]),
        st.sampled_from([b"v", b"", b"w" * 300, None]),
        st.sampled_from([{}, {"p": "1"}, {"p": "x", "q": "é"}]),
        st.sampled_from([0, 5]),
    ),
    min_size=1,
    max_size=6,
)
Action = Callable[[Broker], object]
Answer = dict[str, Any]


def answers(broker: Broker, topic: str) -> Answer:
    """The results of all queries about a topic, with ledgers by rank instead of number."""
    ledgers = broker.ledgers(topic)
    rank = {ledger.ledger: number for number, ledger in enumerate(ledgers)}

    def placed(position: Position | None) -> tuple[int, int] | None:
        if position is None or position.ledger not in rank:
            return None
        return rank[position.ledger], position.entry

    rows = []
    with broker.reader(topic, compacted=True) as reader:
        while (batch := reader.read(limit=4)) is not None:
            rows += [(placed(row.position), row.publish_time, row.message) for row in batch]
    rows = [row for row in rows if row[0] is not None]  # the one in memory keeps survivors of what was trimmed
    return {
        "ledgers": [(ledger.entries, ledger.closed) for ledger in ledgers],
        "rows": rows,
        "last": placed(broker.last_position(topic)),
    }


class Agreement(RuleBasedStateMachine):
    """`memory` has made all certain steps; of the steps `underway` a crash may have made any number."""

    @initialize(segment_bytes=st.just(1 << 20), journal_bytes=st.sampled_from([600, 5_000, 1 << 20]))
    def begin(self, segment_bytes: int, journal_bytes: int) -> None:
        self.options = {"segment_bytes": segment_bytes, "journal_bytes": journal_bytes}
        self.clock = SimulatedClock()
        self.disk = SimulatedDisk()
        self.memory = MemoryBroker(clock=self.clock, compacted_prefix="")
        self.positions: dict[tuple[str, str], list[tuple[Position, Message]]] = {}
        self.tokens = 0
        self.open()
        self.create("a")

    def open(self) -> None:
        self.tokens += 1
        try:
            self.file = open_log(self.disk, clock=self.clock, seed=self.tokens, **self.options)
        except Crash:
            self.disk = self.disk.crash(self.loss, self.tokens)
            self.open()

    def both(self, action: Action, *steps: Action) -> None:
        """Apply an action to the file log and, step by step, to the one in memory."""
        try:
            action(self.file)
        except Crash:
            self.recover(self.disk.crash(self.loss, self.tokens), steps or (action,))
            return
        for step in steps or (action,):
            step(self.memory)

    def recover(self, disk: SimulatedDisk, underway: tuple[Action, ...] = ()) -> None:
        """Open the log after a crash, and apply the same number of pending steps to the one in memory."""
        self.disk = disk
        self.open()
        for step in underway:
            if self.agrees():
                return
            step(self.memory)

    def agrees(self) -> bool:
        return self.file.topics() == self.memory.topics() and all(
            answers(self.file, topic) == answers(self.memory, topic) for topic in self.file.topics()
        )

    def has(self, topic: str) -> bool:
        return topic in self.memory.topics()

    @rule(topic=TOPICS)
    def create(self, topic: str) -> None:
        self.both(lambda broker: broker.create_topic(topic))

    @rule(topic=TOPICS)
    def delete(self, topic: str) -> None:
        if self.has(topic) and topic == "b":
            self.both(lambda broker: broker.delete_topic(topic))

    @rule(topic=TOPICS, messages=MESSAGES, seconds=st.sampled_from([0, 0.5]))
    def append(self, topic: str, messages: list[Message], seconds: float) -> None:
        if not self.has(topic):
            return
        self.clock.advance(seconds)

        def write(broker: Broker) -> None:
            with broker.writer(topic) as writer:
                found = [*writer.append(Batch.of(messages)).result(0)]
            if broker is self.file:
                known = self.positions.setdefault((topic, broker.incarnation(topic)), [])
                known += zip(found, messages, strict=True)

        self.both(write)

    @rule(topic=TOPICS)
    def roll(self, topic: str) -> None:
        if self.has(topic):
            self.both(lambda broker: broker.roll(topic))

    @rule(topic=TOPICS)
    def compact(self, topic: str) -> None:
        if self.has(topic):
            self.both(
                lambda broker: broker.compact(topic),
                lambda broker: broker.roll(topic),
                lambda broker: broker.compact(topic),
            )

    @rule(topic=TOPICS, count=st.integers(0, 3))
    def trim(self, topic: str, count: int) -> None:
        if self.has(topic):

            def act(broker: Broker) -> None:
                ledgers = broker.ledgers(topic)
                broker.trim(topic, ledgers[min(count, len(ledgers) - 1)].ledger)

            self.both(act)

    @rule()
    def reopen(self) -> None:
        disk = self.disk
        self.both(lambda _: self.file.close(), lambda _: None)
        if self.disk is disk:
            self.open()

    @rule(unsynced=st.sampled_from(Unsynced))
    def lose_power(self, unsynced: Unsynced) -> None:
        self.recover(self.disk.crash(unsynced, self.tokens))

    @rule()
    def kill(self) -> None:
        self.recover(self.disk.kill())

    @rule(operation=st.integers(1, 25), written=st.integers(0, 200), unsynced=st.sampled_from(Unsynced))
    def plan_a_crash(self, operation: int, written: int, unsynced: Unsynced) -> None:
        self.loss = unsynced
        self.disk.stop_at(operation, written=written)

    loss = Unsynced.LOST

    @precondition(lambda self: self.positions)
    @rule(choice=st.integers(0, 10_000), inclusive=st.booleans())
    def read_from_what_was_acknowledged(self, choice: int, inclusive: bool) -> None:
        known = [(topic, index) for topic, rows in self.positions.items() for index in range(len(rows))]
        (topic, incarnation), index = known[choice % len(known)]
        if not self.has(topic) or self.file.incarnation(topic) != incarnation:
            return
        rows = self.positions[topic, incarnation]
        start = rows[index][0]
        if start.ledger < self.file.ledgers(topic)[0].ledger:
            last_gone = max(row[0] for row in rows if row[0].ledger < self.file.ledgers(topic)[0].ledger)
            if inclusive or start < last_gone:
                with pytest.raises(PositionTrimmed), self.file.reader(topic, start, inclusive=inclusive) as reader:
                    reader.read()
            return
        behind = [row for row in read_rows(self.file, topic) if row[0] > start or (inclusive and row[0] == start)]
        with self.file.reader(topic, start, inclusive=inclusive) as reader:
            assert [row for batch in iter(lambda: reader.read(limit=3), None) for row in rows_of(batch)] == behind

    @invariant()
    def both_agree(self) -> None:
        assert self.file.topics() == self.memory.topics()
        for topic in self.file.topics():
            assert answers(self.file, topic) == answers(self.memory, topic)

    @invariant()
    def times_name_what_is_read(self) -> None:
        for topic in self.file.topics():
            with self.file.reader(topic) as reader:
                rows = [(row.publish_time, row.position) for batch in iter(reader.read, None) for row in batch]
            for time in {rows[0][0], rows[len(rows) // 2][0], rows[-1][0] + 1} if rows else {0}:
                expected = next((position for found, position in rows if found >= time), None)
                assert self.file.position_at(topic, time) == expected

    @invariant()
    def what_is_read_stands_where_it_was_acknowledged(self) -> None:
        for topic in self.file.topics():
            known = dict(self.positions.get((topic, self.file.incarnation(topic)), []))
            for position, message in read_rows(self.file, topic):
                assert known.get(position, message) == message


def rows_of(batch: PlacedBatch) -> list[tuple[Position, Message]]:
    return [*zip(batch.positions, batch.messages, strict=True)]


def read_rows(broker: Broker, topic: str) -> list[tuple[Position, Message]]:
    with broker.reader(topic) as reader:
        return [row for batch in iter(reader.read, None) for row in rows_of(batch)]


TestAgreement = Agreement.TestCase
TestAgreement.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
