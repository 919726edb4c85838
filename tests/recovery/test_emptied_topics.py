"""A topic whose ledgers were all trimmed by retention, the last one too, continues as any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshot_driver import manager_on
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.filelog.log import FileBroker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.position import Position
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.model import TxnId
from txnbuffer.recovery.restore import load
from txnbuffer.recovery.verify import Level, verify

T = "t"


@pytest.fixture(params=["memory", "file"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    made: Broker = MemoryBroker() if request.param == "memory" else FileBroker.open(str(tmp_path / "log"))
    with made:
        yield made


def emptied(broker: Broker) -> tuple[LogOwner, TopicWriter]:
    """A topic whose four visible records are trimmed; its only ledger is empty."""
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("a", "b")
    writer.records(1, "c", "d")
    writer.commit(1)
    owner.pump()
    broker.roll(T)
    for _ in range(2):  # the older snapshot still needs the ledger that was open
        owner.snapshot(T)
    owner.trim(T, broker.ledgers(T)[-1].ledger)
    assert [ledger.entries for ledger in broker.ledgers(T)] == [0]
    return owner, writer


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_snapshot_of_nothing_but_an_open_transaction(broker: Broker, restarts: int) -> None:
    owner, writer = emptied(broker)
    for _ in range(restarts):
        owner.close()
        owner = manager_on(broker)
    writer.records(2, "e", "f")
    for _ in range(2):
        owner.pump()
        owner.snapshot(T)
        broker.compact(SNAPSHOT_TOPIC)  # so there is no older one to fall back to
        owner.close()
        owner = manager_on(broker)
        assert owner.problems == {}
        assert owner.notes == []
        assert {finding.level for finding in verify(broker, T)} == {Level.OK}
    assert TxnId(0, 2) in load(broker, T).buffer.ongoing
    with CommittedReader(broker, T) as reader:
        assert reader.read() is None
        writer.commit(2)
        batch = reader.read(timeout=60.0)
        assert batch is not None
        assert [(record.seqno, record.value) for record in batch] == [(5, b"e"), (6, b"f")]
    owner.pump()
    owner.snapshot(T)
    assert owner.followed(T).numbered.next_seqno == 7
    assert load(broker, T).sequencer.next_seqno == 7
    owner.close()


def test_what_outgrows_memory_is_read_again_from_the_ledger_that_is_left(broker: Broker) -> None:
    owner, writer = emptied(broker)
    owner.followed(T).held_limit = 0
    writer.records(2, "e", "f")
    owner.pump()
    assert owner.followed(T).lagging
    writer.commit(2)
    owner.pump()
    assert owner.problems == {}
    assert owner.followed(T).numbered.next_seqno == 7
    owner.close()


def test_a_snapshot_of_nothing_but_numbers_begins_with_the_ledger_that_is_left(broker: Broker) -> None:
    owner, _ = emptied(broker)
    owner.snapshot(T)
    state = owner.followed(T).state()
    left = broker.ledgers(T)[0].ledger
    assert state.sequencer.position == Position(left, -1)
    assert state.resume_ledger == left
    owner.close()
