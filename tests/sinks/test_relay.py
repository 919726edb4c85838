"""A relay: its target has the records of the source, once and in order, despite failures."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshot_driver import forget_origins
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown, Fenced, PositionTrimmed
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST
from txnbuffer import connect
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import MutationsTrimmed, RelayBranched, RelayTargetTaken, SeqnoGap
from txnbuffer.protocol import REMOVED
from txnbuffer.recordset import pack
from txnbuffer.sinks import relay as relaying
from txnbuffer.sinks import relay_targets
from txnbuffer.sinks.relay import Relay, RelayProgress
from txnbuffer.sinks.relay_targets import MARK_PROPERTIES, OwnedTarget, RelayMark, ServiceTarget

T, CLEAN = "orders", "clean"


class Source:
    """A topic with an owner, in its own cluster."""

    def __init__(self, *, registered: bool = True, ledger_entries: int = 1000) -> None:
        self.cluster = MemoryBroker(ledger_entries=ledger_entries)
        self.log = TopicWriter(self.cluster, T)
        self.manager = LogOwner(self.cluster.connect())
        self.manager.recover()
        if registered:
            self.manager.register(T)
        self.numbers = itertools.count(1)

    def commit(self, *values: str | None, key: str | None = None) -> None:
        txn = next(self.numbers)
        self.log.records(txn, *values, key=key)
        self.log.commit(txn)
        self.manager.pump()

    def abort(self, *values: str) -> None:
        txn = next(self.numbers)
        self.log.records(txn, *values)
        self.log.abort(txn)
        self.manager.pump()

    def values(self) -> list[bytes | None]:
        with CommittedReader(self.cluster, T) as reader:
            return [value for batch in iter(reader.read, None) for value in batch.messages.values]

    def relay(self, target: Any, **options: Any) -> Relay:
        return Relay(self.cluster.connect, T, target, max_unavailable=options.pop("max_unavailable", 20.0), **options)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def far() -> MemoryBroker:
    return MemoryBroker()


def owned(far: MemoryBroker) -> OwnedTarget:
    return OwnedTarget(far.connect, CLEAN)


def messages(far: MemoryBroker) -> list[Message]:
    with far.connect() as broker, broker.reader(CLEAN, EARLIEST) as reader:
        return [row.message for placed in iter(reader.read, None) for row in placed]


def values(far: MemoryBroker) -> list[bytes | None]:
    return [message.value for message in messages(far)]


def test_committed_records_are_copied_once_as_messages(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b", key="k")
    source.abort("never")
    source.commit(None, key="k")
    source.log.plain("ordinary")
    source.manager.pump()
    assert source.relay(owned(far)).run(follow=False).records == 4
    found = messages(far)
    assert [(one.key, one.value) for one in found] == [
        (b"k", b"a"),
        (b"k", b"b"),
        (b"k", None),
        (None, b"ordinary"),
    ]
    assert all(set(one.properties) <= set(MARK_PROPERTIES) for one in found)
    assert [one.properties["relay.seqno"] for one in found] == ["1", "2", "3", "4"]
    assert json.loads(found[0].properties["relay.source"])["topic"] == T


def latest(far: MemoryBroker) -> OwnedTarget:
    """A target that keeps the latest value of each key."""
    far.log.compacted_prefix = CLEAN
    return OwnedTarget(far.connect, CLEAN, compacts=True)


def compacted(far: MemoryBroker) -> list[tuple[bytes | None, bytes | None]]:
    with far.connect() as broker, broker.reader(CLEAN, EARLIEST, compacted=True) as reader:
        return [(row.message.key, row.message.value) for placed in iter(reader.read, None) for row in placed]


def test_a_target_of_latest_values_is_compacted_and_has_no_records_without_a_key(
    source: Source, far: MemoryBroker
) -> None:
    source.commit("a", "b", key="k")
    source.commit("keyless")
    source.commit("c", key="other")
    source.commit(None, key="other")
    assert source.relay(latest(far), keyed=True).run(follow=False).records == 4
    assert compacted(far) == [(b"k", b"b")]
    source.commit("keyless")
    source.commit("d", key="k")
    assert source.relay(latest(far), keyed=True).run(follow=False).records == 1
    assert compacted(far) == [(b"k", b"d")]


def test_a_target_of_latest_values_is_compacted_after_many_bytes(
    source: Source, far: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    target = latest(far)
    monkeypatch.setattr(relay_targets, "COMPACT_BYTES", 1)
    monkeypatch.setattr(relay_targets, "COMPACT_SECONDS", math.inf)
    monkeypatch.setattr(MemoryBroker, "compact", lambda self, topic: calls.append(topic))
    source.commit("a", key="k")
    source.relay(target, keyed=True).run(follow=False)
    assert calls == [CLEAN]
    monkeypatch.setattr(relay_targets, "COMPACT_SECONDS", 0.0)
    source.relay(target, keyed=True).run(follow=False)
    assert calls == [CLEAN], "nothing new"


def test_properties_and_times_are_kept_and_marks_of_an_earlier_relay_replaced(far: MemoryBroker) -> None:
    source = Source(registered=False)
    row = Message(b"k", b"v", {"colour": "red", "relay.seqno": "99", "relay.rollback": "5"}, 1234)
    with source.cluster.writer(T) as writer:
        writer.append(Batch.of([row])).result(120)
    done = source.relay(owned(far)).run(follow=False)
    (found,) = messages(far)
    assert found.event_time == 1234
    assert {name: text for name, text in found.properties.items() if name not in MARK_PROPERTIES} == {"colour": "red"}
    assert (found.properties["relay.seqno"], "relay.rollback" in found.properties) == ("1", False)
    assert done == RelayProgress(1, 1, done.position, None)


def test_another_run_continues_after_the_last(source: Source, far: MemoryBroker) -> None:
    source.commit("a")
    first = source.relay(owned(far)).run(follow=False)
    again = source.relay(owned(far)).run(follow=False)
    assert (again.records, again.resumed) == (0, first.position)
    source.commit("b", "c")
    assert source.relay(owned(far)).run(follow=False).records == 2
    assert values(far) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("aware", [True, False])
def test_records_have_seqnos_from_the_first_transaction_on(
    far: MemoryBroker, monkeypatch: pytest.MonkeyPatch, aware: bool
) -> None:
    """A log that knows that it was never trimmed has them earlier."""
    if not aware:
        forget_origins(monkeypatch)
    source = Source(registered=False)
    source.log.plain("a")
    source.relay(owned(far)).run(follow=False)
    source.manager.register(T)
    source.commit("b")
    source.relay(owned(far)).run(follow=False)
    source.commit("c")
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b", b"c"]
    assert [one.properties.get("relay.seqno") for one in messages(far)] == ["1" if aware else None, "2", "3"]


def test_record_sets_are_split(far: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "RECORDS", 2)
    source = Source(registered=False)
    with source.cluster.writer(T) as writer:
        members = Batch.of([Message(None, b"%d" % number) for number in range(5)])
        writer.append(Batch.of([pack(members)])).result(120)
    stopped = source.relay(Cut(far, [3]), max_unavailable=0.0)
    with pytest.raises(AppendUnknown):
        stopped.run(follow=False)
    assert values(far) == [b"0", b"1", b"2"]
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"0", b"1", b"2", b"3", b"4"]


class Cut(OwnedTarget):
    """A target whose appends fail after some messages, which are stored without an acknowledgement."""

    def __init__(self, far: MemoryBroker, cuts: list[int]) -> None:
        super().__init__(far.connect, CLEAN)
        self._cuts: Iterator[int] = iter(cuts)
        self._broken = False

    def open(self) -> RelayMark | None:
        self._left = next(self._cuts, None)
        self._broken = False
        return super().open()

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        if not self._broken and (self._left is None or len(batch) <= self._left):
            self._left = None if self._left is None else self._left - len(batch)
            return super().append(batch, seqno)
        if not self._broken and self._left:
            super().append(batch.take(slice(self._left)), seqno).result(120)
        self._broken = True  # later appends fail
        lost: Future[Any] = Future()
        lost.set_exception(AppendUnknown("the connection broke: open another writer"))
        return lost


@given(
    batches=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 9), max_size=8),
    size=st.integers(1, 4),
    later=st.integers(0, 3),
)
def test_the_target_equals_the_source_despite_failures(
    batches: list[int], cuts: list[int], size: int, later: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaying, "RECORDS", size)
        patch.setattr(relaying, "FIRST_PAUSE", 0.0)
        patch.setattr(relaying, "LONGEST_PAUSE", 0.0)
        source, far = Source(), MemoryBroker()
        for number, count in enumerate(batches):
            source.abort("never") if number % 3 == 2 else source.commit(*[f"{number}-{at}" for at in range(count)])
        relay = source.relay(Cut(far, cuts))
        relay.run(follow=False)
        source.commit(*[f"later-{at}" for at in range(later)])
        source.relay(owned(far)).run(follow=False)
        assert values(far) == source.values()


def test_the_later_of_two_relays_continues(source: Source, far: MemoryBroker) -> None:
    source.commit("a")
    older = source.relay(target := owned(far))
    seen: list[int] = []

    def stop() -> bool:
        """Start another relay while this one waits for records."""
        seen.append(older.progress.records)
        if len(seen) == 3:
            source.relay(owned(far)).run(follow=False)
            source.commit("b")
        return len(seen) > 20

    with pytest.raises(Fenced):
        older.run(stop=stop)
    target.close()
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b"]


def test_a_relay_stops_on_request_with_everything_acknowledged(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b")
    reported: list[int] = []
    relay = source.relay(owned(far), on_progress=lambda relayed: reported.append(relayed.records))
    done = relay.run(stop=lambda: CLEAN in far.topics() and far.last_position(CLEAN) is not None)
    assert (done.records, reported, values(far)) == (2, [2], [b"a", b"b"])


def test_a_target_with_other_records_is_rejected(source: Source, far: MemoryBroker) -> None:
    source.commit("a")
    with TopicWriter(far, CLEAN)._writer as writer:
        writer.append(Batch.of([Message(None, b"mine")])).result(120)
    with pytest.raises(RelayTargetTaken, match="not written by a relay"):
        source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"mine"]
    far.delete_topic(CLEAN)
    source.relay(owned(far)).run(follow=False)
    TopicWriter(source.cluster, "other").plain("b")
    with pytest.raises(RelayTargetTaken, match="'orders', not 'other'"):
        Relay(source.cluster.connect, "other", owned(far)).run(follow=False)
    assert values(far) == [b"a"]


def test_a_target_without_its_last_message_is_rejected(source: Source, far: MemoryBroker) -> None:
    source.commit("a")
    source.relay(owned(far)).run(follow=False)
    far.roll(CLEAN)
    far.trim(CLEAN, far.ledgers(CLEAN)[-1].ledger)
    with pytest.raises(RelayTargetTaken, match="no longer has its last message"):
        source.relay(owned(far)).run(follow=False)


def test_a_gap_in_the_source_is_an_error_unless_the_log_begins_with_the_next_record(far: MemoryBroker) -> None:
    source = Source(ledger_entries=4)
    source.commit("a", "b", "c")  # with its marker a ledger
    source.relay(owned(far)).run(follow=False)
    source.commit("d", "e", "f")
    source.manager.snapshot(T)
    source.manager.snapshot(T)
    source.manager.trim(T, source.cluster.ledgers(T)[1].ledger)
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    for _ in range(3):
        source.commit("x", "y", "z")
    source.manager.snapshot(T)
    source.manager.snapshot(T)
    source.manager.trim(T, source.cluster.ledgers(T)[-1].ledger)
    with pytest.raises((MutationsTrimmed, PositionTrimmed)):
        source.relay(owned(far)).run(follow=False)
    assert len(values(far)) == 6


def test_records_that_compaction_has_emptied_are_no_gap(source: Source, far: MemoryBroker) -> None:
    source.commit("a")
    source.relay(owned(far)).run(follow=False)
    with source.cluster.writer(T) as writer:
        writer.append(Batch.of([Message(None, None, {REMOVED: "1"})] * 3)).result(60)
    source.manager.pump()
    source.commit("b")
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b"]
    assert [one.properties["relay.seqno"] for one in messages(far)] == ["1", "5"]


def test_a_branch_of_the_source_stops_it_and_can_be_resent(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b")
    source.relay(owned(far)).run(follow=False)
    source.manager.close()
    source.cluster.delete_topic(T)
    source.log = TopicWriter(source.cluster, T)
    source.manager = LogOwner(source.cluster.connect())
    source.manager.recover()
    source.manager.register(T)
    source.commit("other")
    with pytest.raises(RelayBranched, match="after seqno 0"):
        source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b"]
    source.relay(owned(far), resend=True).run(follow=False)
    source.commit("more")
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b", b"other", b"more"]
    assert [one.properties.get("relay.rollback") for one in messages(far)] == [None, None, "0", None]


def test_a_branch_is_resent_to_a_service_too(source: Source) -> None:
    opening = connect("memory:relay-resend")
    source.commit("a", "b", "c")
    source.relay(ServiceTarget(opening.open_sync, CLEAN)).run(follow=False)
    source.manager.close()
    source.cluster.delete_topic(T)
    source.log = TopicWriter(source.cluster, T)
    source.manager = LogOwner(source.cluster.connect())
    source.manager.recover()
    source.manager.register(T)
    for value in ("other", "more"):
        source.commit(value)
        source.relay(ServiceTarget(opening.open_sync, CLEAN), resend=value == "other").run(follow=False)
    with opening as client, client.reader(CLEAN) as reader:
        found = [value for batch in iter(reader.read, None) for value in batch.messages.values]
    assert found == [b"a", b"b", b"c", b"other", b"more"]


def test_a_recreated_topic_without_transactions_is_a_branch(far: MemoryBroker) -> None:
    source = Source(registered=False)
    source.log.plain("a")
    source.relay(owned(far)).run(follow=False)
    source.cluster.delete_topic(T)
    TopicWriter(source.cluster, T).plain("b", "c", "d")
    with pytest.raises(RelayBranched, match="after seqno 0"):
        source.relay(owned(far)).run(follow=False)
    source.relay(owned(far), resend=True).run(follow=False)
    assert values(far) == [b"a", b"b", b"c", b"d"]


def test_a_truncated_log_is_a_branch(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b")
    done = source.relay(owned(far)).run(follow=False)
    last, at = messages(far)[-1], done.position
    assert at is not None
    beyond = str(at._replace(entry=at.entry + 100))
    with far.writer(CLEAN) as writer:
        writer.append(Batch.of([last._replace(properties={**last.properties, "relay.position": beyond})])).result(120)
    with pytest.raises(RelayBranched, match="after seqno 0"):
        source.relay(owned(far)).run(follow=False)


def test_owners_that_write_nothing_are_no_branch(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b")
    for count in (2, 0, 0):  # the first relay starts when the newest version has no mutations
        source.manager.close()
        source.manager = LogOwner(source.cluster.connect())
        source.manager.recover(f"owner {next(source.numbers)}")
        assert source.relay(owned(far)).run(follow=False).records == count
    source.commit("c")
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b", b"c"]
    versions = [json.loads(one.properties["relay.source"])["version"] for one in messages(far)]
    assert versions[0] == versions[1] != versions[2]


def test_an_owner_that_takes_over_while_a_relay_opens_is_no_branch(
    source: Source, far: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay looks at the versions before its reader opens, and so did not know the one of the new records."""

    def take_over() -> None:
        source.manager.close()
        source.manager = LogOwner(source.cluster.connect())
        source.manager.recover(f"owner {next(source.numbers)}")
        source.log.epoch += 1

    def take_over_after(*arguments: Any) -> Any:
        monkeypatch.undo()
        found = loaded(*arguments)
        take_over()
        source.commit("b")
        source.manager.snapshot(T)
        return found

    source.commit("a")
    loaded = relaying.load
    monkeypatch.setattr(relaying, "load", take_over_after)
    source.relay(owned(far)).run(follow=False)
    take_over()
    source.commit("c")
    source.relay(owned(far)).run(follow=False)
    assert values(far) == [b"a", b"b", b"c"]


def test_seqnos_that_do_not_ascend_are_an_error(source: Source, far: MemoryBroker) -> None:
    source.commit("a", "b")
    source.relay(owned(far)).run(follow=False)
    last = messages(far)[-1]
    with far.writer(CLEAN) as writer:
        writer.append(Batch.of([last._replace(properties={**last.properties, "relay.seqno": "7"})])).result(120)
    source.commit("c")
    with pytest.raises(SeqnoGap, match="seqno 3 follows seqno 7"):
        source.relay(owned(far)).run(follow=False)
