"""A topic of an embedded log for audits: all that was written to it, its compaction, and changed copies of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from file_logs import World
from hypothesis import strategies as st
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.compaction import CompactionRequest
from broker_io.filelog.log.broker import FileBroker, FollowingBroker
from broker_io.port import Broker
from broker_io.position import NO_INDEX, Position
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.follow import read_existing
from txnbuffer.model import EARLIEST
from txnbuffer.protocol import REMOVED
from txnbuffer.recordset import BatchSlice, pack_all
from txnbuffer.service.engine.compaction import last_compactable

T = "orders"
Change = Callable[[Position, Message], Message]


class Written(NamedTuple):
    """A record as it was written."""

    position: Position
    key: bytes | None
    value: bytes | None
    txn: int | None


@dataclass
class AuditedTopic:
    """A registered topic on a simulated disk."""

    world: World = field(default_factory=World)
    written: list[Written] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    open: list[int] = field(default_factory=list)
    next_txn: int = 1

    def __post_init__(self) -> None:
        self.broker: FileBroker = self.world.own(compacted_prefix="__txnbuffer")
        self.manager = LogOwner(self.broker)
        self.manager.recover()
        self.manager.register(T)
        self.writer = TopicWriter(self.broker, T)

    def write(self, key: str | None, value: str | None, txn: int | None = None) -> None:
        if txn is None:
            position = self.writer.plain(value, key=key).last
        else:
            position = self.writer.records(txn, value, key=key).last
        row = Message(None if key is None else key.encode(), None if value is None else value.encode())
        self.written.append(Written(position, row.key, row.value, txn))

    def write_set(self, *rows: tuple[str, str | None]) -> None:
        """A record set of ordinary records."""
        records = Batch.of([Message(key.encode(), None if value is None else value.encode()) for key, value in rows])
        position = self.writer._append(pack_all(records, [BatchSlice(None, 0, len(records))])).last
        for index, row in enumerate(records):
            self.written.append(Written(position._replace(batch=index), row.key, row.value, None))

    def begin(self) -> None:
        self.open.append(self.next_txn)
        self.next_txn += 1

    def end(self, index: int, *, commit: bool) -> None:
        txn = self.open.pop(index)
        (self.writer.commit if commit else self.writer.abort)(txn)
        self.committed |= {txn} if commit else set()

    def visible(self) -> list[Written]:
        """The visible records in order: the n-th has the seqno n."""
        first_open = [index for index, one in enumerate(self.written) if one.txn in self.open]
        decided = self.written[: min(first_open, default=len(self.written))]
        return [one for one in decided if one.txn is None or one.txn in self.committed]

    def compact(self) -> None:
        """Compact all closed ledgers that are decided, and purge all deletions that may be purged."""
        self.manager.pump()
        buffer = self.manager.buffer(T)
        upto = last_compactable(self.broker.ledgers(T), buffer.max_read_position, None)
        rules = TransactionRules(PinnedVisibility.of(buffer))
        now = self.world.clock.now_ms() + 1
        self.broker.compact_records(T, CompactionRequest(upto, rules, upto, now))

    def copy(self) -> FollowingBroker:
        """A copy of the directory as it is now."""
        return World(self.world.disk.copy()).follow()


def latest(visible: list[Written]) -> dict[bytes, bytes]:
    """The newest value of each key."""
    state: dict[bytes, bytes] = {}
    for one in visible:
        if one.key is not None and one.value is not None:
            state[one.key] = one.value
        elif one.key is not None:
            state.pop(one.key, None)
    return state


def changed(source: Broker, change: Change) -> FileBroker:
    """Another log with the same messages at the same positions, some of them changed."""
    broker = World().own(compacted_prefix="__txnbuffer")
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register(T)
        ledger = 1
        with broker.writer(T) as writer:
            for placed in read_existing(source, T, EARLIEST, source.last_position(T)):
                for position, _, message in placed:
                    while ledger < position.ledger:
                        broker.roll(T)
                        ledger = broker.ledgers(T)[-1].ledger
                    at = writer.append(Batch.of([change(position, message)])).result(120)
                    assert at.last == position
        manager.pump()
        manager.snapshot(T)
    return broker


def with_value(position: Position, value: bytes) -> Change:
    return lambda at, message: message._replace(value=value) if at == position else message


def without(position: Position) -> Change:
    """As compaction empties a record."""

    def change(at: Position, message: Message) -> Message:
        if at != position:
            return message
        own = {name: text for name, text in message.properties.items() if name.startswith("tb.")}
        return Message(None, None, {"tb.v": "1", **own, REMOVED: "1"})

    return change


KEYS = ["a", "b", "c", "d", "e", None]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*["plain"] * 4, *["record"] * 4, "begin", "commit", "abort", "set", "roll", "snapshot"]),
        st.sampled_from(KEYS),
        st.sampled_from(["x", "y", "", None]),
        st.booleans(),
    ),
    max_size=40,
)
Steps = list[tuple[str, str | None, str | None, bool]]


def written_by(steps: Steps, topic: AuditedTopic | None = None) -> AuditedTopic:
    topic = topic or AuditedTopic()
    for step, key, value, flag in steps:
        if step == "plain":
            topic.write(key, value)
        elif step == "set":
            topic.write_set((key or "a", value), ("b", "set"))
        elif step == "begin":
            topic.begin()
        elif step == "record" and topic.open:
            topic.write(key, value, topic.open[-1])
        elif step in ("commit", "abort") and topic.open:
            topic.end(0 if flag else -1, commit=step == "commit")
        elif step == "roll":
            topic.broker.roll(T)
        elif step == "snapshot":
            topic.manager.pump()
            topic.manager.snapshot(T)
    return topic


def alone(one: Written) -> bool:
    """Whether it is a message of its own."""
    return one.position.batch == NO_INDEX
