"""A sequence of operations on an embedded log on a simulated disk, and the check of the log after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import settings

from broker_io.batch import Batch, Message
from broker_io.environment import Environment
from broker_io.filelog.log.broker import FileBroker
from broker_io.port import Broker
from broker_io.position import Position
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced

DIRECTORY = "/log"
OPTIONS: dict[str, Any] = {"committer": False, "segment_bytes": 700, "journal_bytes": 2_500, "compacted_prefix": ""}

SHARDS = 8
STRIDE = {"soak": 1, "mutants": 3}.get(settings.get_current_profile_name(), 10)
"""`make soak` tries every operation; otherwise one in `STRIDE` is tried, others in each shard."""

Row = tuple[Position | None, Message]
"""A message and its position; None if it is unknown, because the append was never acknowledged."""


@dataclass(frozen=True)
class Content:
    """The content of one topic; `incarnation` is None if it is unknown."""

    incarnation: str | None
    rows: tuple[Row, ...] = ()


State = dict[str, Content]


def open_log(disk: SimulatedDisk, *, clock: SimulatedClock | None = None, seed: int = 0, **options: Any) -> FileBroker:
    environment = Environment(clock or SimulatedClock(), disk, SeededRandomness(seed))
    return FileBroker.open(DIRECTORY, environment, **{**OPTIONS, **options})


@dataclass
class Life:
    """Operates on a log and tracks its expected content: `state`, or `underway` if that is not None."""

    disk: SimulatedDisk
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    state: State = field(default_factory=dict)
    underway: State | None = None
    opened: int = 0
    count: int = 0
    is_open: bool = False

    def open(self) -> None:
        self.opened += 1
        self.broker = open_log(self.disk, clock=self.clock, seed=self.opened)
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self.broker.close()

    def create(self, topic: str) -> None:
        self._change({**self.state, topic: Content(None)}, lambda: self.broker.create_topic(topic))
        self.state[topic] = Content(self.broker.incarnation(topic))

    def delete(self, topic: str) -> None:
        after = {name: content for name, content in self.state.items() if name != topic}
        self._change(after, lambda: self.broker.delete_topic(topic))

    def append(self, topic: str, keys: str, size: int = 10) -> None:
        """Append a message for each letter of `keys`: `-` is no key, an upper-case letter deletes a key."""
        messages = [self._message(letter, size) for letter in keys]
        before = self.state[topic]
        self.clock.advance(0.01)

        def act() -> None:
            with self.broker.writer(topic) as writer:
                positions = [*writer.append(Batch.of(messages)).result(0)]
            rows = (*before.rows, *zip(positions, messages, strict=True))
            self.underway = {**self.state, topic: Content(before.incarnation, rows)}

        unknown = (*before.rows, *((None, message) for message in messages))
        self._change({**self.state, topic: Content(before.incarnation, unknown)}, act)

    def roll(self, topic: str) -> None:
        self._change(self.state, lambda: self.broker.roll(topic))

    def trim(self, topic: str, ledgers: int) -> None:
        """Drop the first `ledgers` ledgers."""
        first = self.broker.ledgers(topic)[ledgers].ledger
        before = self.state[topic]
        rows = tuple(row for row in before.rows if row[0] is not None and row[0].ledger >= first)
        self._change({**self.state, topic: Content(before.incarnation, rows)}, lambda: self.broker.trim(topic, first))

    def compact(self, topic: str) -> None:
        before = self.state[topic]
        newest = {message.key: row for row in before.rows if (message := row[1]).key is not None}
        kept = {id(row) for row in newest.values() if row[1].value is not None}
        rows = tuple(row for row in before.rows if id(row) in kept)
        self._change({**self.state, topic: Content(before.incarnation, rows)}, lambda: self.broker.compact(topic))

    def _message(self, letter: str, size: int) -> Message:
        self.count += 1
        if letter.isupper():
            return Message(letter.lower().encode(), None, {"n": str(self.count)})
        key = None if letter == "-" else letter.encode()
        return Message(key, (b"%d-" % self.count).ljust(size, b"x"), {"n": str(self.count), "kind": "test"})

    def _change(self, after: State, action: Callable[[], None]) -> None:
        self.underway = after
        action()
        self.state, self.underway = self.underway, None


def live(life: Life) -> None:
    """Create topics, roll, checkpoint, trim, compact, delete, close, open again and continue."""
    life.open()
    life.create("a")
    life.append("a", "xyz-")
    life.create("b")
    for number in range(4):
        life.append("b", "pqr"[number % 3])
        life.append("a", "xyXz"[number:])
    life.roll("a")
    life.append("a", "uv", size=400)
    life.create("doomed")
    life.append("doomed", "klm")
    life.compact("a")
    life.append("a", "xXw")
    life.trim("a", 1)
    life.delete("doomed")
    life.append("b", "ss", size=600)
    life.create("doomed")
    life.append("doomed", "n")
    life.close()
    life.open()
    life.append("doomed", "oo")
    life.append("b", "-pPq")
    life.roll("b")
    life.append("b", "z")


def content_of(broker: Broker) -> State:
    """The content of a log."""
    found: State = {}
    for topic in broker.topics():
        rows: list[Row] = []
        with broker.reader(topic) as reader:
            while (batch := reader.read()) is not None:
                rows += [(placed.position, placed.message) for placed in batch]
        found[topic] = Content(broker.incarnation(topic), tuple(rows))
    return found


def matches(found: State, expected: State) -> bool:
    """Whether a log has the expected content, where that is known."""
    return found.keys() == expected.keys() and all(_same(found[topic], expected[topic]) for topic in found)


def _same(found: Content, expected: Content) -> bool:
    if expected.incarnation not in (None, found.incarnation) or len(found.rows) != len(expected.rows):
        return False
    positions = [row[0] for row in found.rows if row[0] is not None]
    pairs = zip(found.rows, expected.rows, strict=True)
    return all(a < b for a, b in pairwise(positions)) and all(
        message == wanted and place in (None, position) for (position, message), (place, wanted) in pairs
    )


def check_found(broker: Broker, life: Life) -> State:
    """Assert that a log has the expected content after a crash, read from any position; return it."""
    found = content_of(broker)
    allowed = [life.state] if life.underway is None else [life.state, life.underway]
    assert any(matches(found, state) for state in allowed), (found, allowed)
    for topic, content in found.items():
        check_answers(broker, topic, content)
    return found


def check_answers(broker: Broker, topic: str, content: Content) -> None:
    """Assert that all queries about a topic agree with its messages."""
    positions = [position for position, _ in content.rows if position is not None]
    assert broker.first_position(topic) == (positions[0] if positions else None)
    assert broker.position_at(topic, 0) == (positions[0] if positions else None)
    last, ledgers = broker.last_position(topic), broker.ledgers(topic)
    assert [ledger.closed for ledger in ledgers] == [True] * (len(ledgers) - 1) + [False]
    assert {position.ledger for position in positions} <= {ledger.ledger for ledger in ledgers}
    if positions:
        assert last is not None
        assert last >= positions[-1]
    for start in (0, len(positions) // 2, len(positions) - 1):
        if positions:
            with broker.reader(topic, positions[start], compacted=bool(start % 2)) as reader:
                batch = reader.read(limit=1)
            assert batch is not None
            assert batch.positions.first == positions[start]


def check_usable(disk: SimulatedDisk, broker: FileBroker, found: State) -> None:
    """Assert that a log still works: append, roll, compact, create a topic; and that the changes are durable."""
    life = Life(disk, state=dict(found))
    life.broker, life.count, life.opened = broker, 1000, 1000
    for topic in found:
        before = broker.last_position(topic)
        life.append(topic, "xn")
        added = life.state[topic].rows[-2][0]
        assert added is not None
        assert before is None or added > before
    life.create("new")
    life.append("new", "abca")
    life.roll("new")
    life.compact("new")
    life.append("new", "a")
    check_found(broker, life)
    with open_log(disk.crash(Unsynced.LOST)) as after_power_loss:
        check_found(after_power_loss, life)
    life.close()
    life.open()
    check_found(life.broker, life)
    life.close()


def found_disks(disk: SimulatedDisk, seed: int) -> Iterator[SimulatedDisk]:
    """The possible disks after the process or the machine stopped."""
    yield disk.kill()
    yield disk.crash(Unsynced.LOST)
    yield disk.crash(Unsynced.KEPT)
    yield disk.crash(Unsynced.PREFIX, seed)
    yield disk.crash(Unsynced.SECTORS, seed)
    yield disk.crash(Unsynced.SECTORS, seed + 1)
