"""A cluster replaces the empty ledger of a topic whenever it loads the topic: one without messages survives that."""

from __future__ import annotations

import dataclasses

import pytest
from snapshot_driver import keeper
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from snapshots.loading import load
from snapshots.verify import Level, verify

T = "t"


class Cluster(MemoryBroker):
    """Tells of ledgers as a cluster does."""

    def ledgers(self, topic: str) -> list[Ledger]:
        found = super().ledgers(topic)
        if topic != T:
            return found
        return [dataclasses.replace(ledger, lasting=ledger.entries > 0) for ledger in found]

    def load(self) -> None:
        """The empty ledger goes, another one comes."""
        with self.log.changed:
            self._topic(T).ledgers[-1].number += 10


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("open_first", [False, True])
def test_a_topic_without_messages_goes_on_in_whichever_ledger_gets_the_first(restarts: int, open_first: bool) -> None:
    broker = Cluster()
    owner = keeper(broker)
    owner.register(T)
    broker.load()
    for _ in range(restarts):
        owner.close()
        owner = keeper(broker)
        assert owner.problems == {}
        owner.snapshot(T)
        broker.load()
    assert load(broker, T).registered
    writer = TopicWriter(broker, T)
    if open_first:
        writer.records(1, "a")
    else:
        writer.plain("a")
    for turn in range(3):
        if turn:
            owner.pump()
            owner.snapshot(T)
        owner.close()
        owner = keeper(broker)
        assert owner.problems == {}
        assert owner.notes == []
        assert {finding.level for finding in verify(broker, T)} == {Level.OK}
    if open_first:
        writer.commit(1)
        owner.pump()
    assert owner.sequencer(T).next_seqno == 2
    assert owner.tail(T).state().origin_ledger == broker.ledgers(T)[0].ledger
    owner.close()
