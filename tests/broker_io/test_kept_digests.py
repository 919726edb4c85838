"""A rewritten ledger that does not have what it must keep is refused; the digests that are stored with a topic."""

from collections.abc import Callable

import numpy as np
import pytest
from compacted_topic import T, Topic

from broker_io.batch import Batch, Blobs
from broker_io.compaction import CompactionRequest, DigestingBroker
from broker_io.errors import Damaged
from broker_io.filelog.log import rewriting
from broker_io.filelog.log.keymap import Mask
from broker_io.filelog.log.rewriting import Rewrite
from broker_io.testing.disk import SimulatedDisk
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility

RIGHT = [True, False, False, False, False, False]
WRONG = {
    "a survivor is dropped": [True, True, False, False, False, False],
    "the older record of a key is kept instead": [False, True, False, False, False, False],
    "nothing is removed": [False] * 6,
    "the next record is emptied, too": [True, False, True, False, False, False],
    "a record without a key is emptied": [True, False, False, True, False, False],
    "a deletion is emptied": [True, False, False, False, True, False],
}


def filled(in_tasks: bool) -> Topic:
    """A closed ledger, of which compaction empties the first record."""
    topic = Topic(in_tasks=in_tasks)
    for key, value in [("a", "old"), ("a", "new"), ("b", "x"), (None, "y"), ("c", None), ("d", "")]:
        topic.write(key, value)
    topic.broker.roll(T)
    return topic


def refused(topic: Topic, patch: pytest.MonkeyPatch) -> None:
    """The compaction names the new file, and leaves the topic as it was; without the bug it is done."""
    disk: SimulatedDisk = topic.world.disk
    read, files = topic.read(), disk.files().keys()
    with pytest.raises(Damaged, match="does not have the records that a compaction must keep") as caught:
        topic.compact(purge=False)
    assert "/1-1" in caught.value.path
    assert (topic.read(), disk.files().keys()) == (read, files)
    assert topic.broker.compaction(T).cleaned == 0
    patch.undo()
    assert topic.compact(purge=False).emptied == 1
    topic.check()


@pytest.mark.parametrize("in_tasks", [False, True])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_another_mask_is_noticed(wrong: list[bool], in_tasks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Callable[[rewriting._Rewriting, Mask], Rewrite] = rewriting._Rewriting.run

    def run_wrong(self: rewriting._Rewriting, removed: Mask) -> Rewrite:
        assert removed.tolist() == RIGHT
        return run(self, np.array(wrong))

    monkeypatch.setattr(rewriting._Rewriting, "run", run_wrong)
    refused(filled(in_tasks), monkeypatch)


def without_values_of_keys(messages: Batch) -> Batch:
    values = Blobs.of([None, None, None, *messages.values.to_list()[3:]])
    return Batch(messages.keys, values, messages.properties, messages.event_times)


def with_keys_in_another_order(messages: Batch) -> Batch:
    keys = Blobs.of([None, b"b", b"a", *messages.keys.to_list()[3:]])
    return Batch(keys, messages.values, messages.properties, messages.event_times)


@pytest.mark.parametrize("in_tasks", [False, True])
@pytest.mark.parametrize("change", [without_values_of_keys, with_keys_in_another_order])
def test_other_columns_are_noticed(
    change: Callable[[Batch], Batch], in_tasks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: Callable[[TransactionRules, Batch, Mask], Batch] = TransactionRules.emptied
    monkeypatch.setattr(TransactionRules, "emptied", lambda *arguments: change(emptied(*arguments)))
    refused(filled(in_tasks), monkeypatch)


def test_digests_stay_valid_when_less_is_compacted_and_ledgers_are_trimmed() -> None:
    topic = filled(False)
    assert topic.broker.key_digests(T) == (0, {})
    topic.write("b", "newer")
    topic.broker.roll(T)
    topic.compact(least_dead=0.9)
    stored = topic.broker.key_digests(T)
    assert stored.cleaned == 2
    assert stored.ledgers.keys() == {1, 2}
    topic.check_digests()
    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))
    topic.broker.compact_records(T, CompactionRequest(1, rules, least_dead=0.9))
    assert topic.broker.key_digests(T) == stored, "in ledger 1 alone another record of b is the newest"
    with topic.world.follow() as follower:
        assert isinstance(follower, DigestingBroker)
        assert follower.key_digests(T) == stored
    topic.broker.trim(T, 2)
    assert topic.broker.key_digests(T) == (2, {2: stored.ledgers[2]})
