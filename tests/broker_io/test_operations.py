"""Operations: their form, what they change, and the redo of those that follow a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.block import BadBlock, encode_block
from broker_io.compaction import CompactionPolicy, CompactionState
from broker_io.errors import StorageError
from broker_io.filelog.log.layout import LedgerEntry, Manifest, PairEntry, PreparedFile, TopicEntry
from broker_io.filelog.log.numbers import Change, NumberedOperation, ObjectNumbers
from broker_io.filelog.log.operations import (
    AppendBlocks,
    BeginEpoch,
    DeleteTopic,
    MakeTopic,
    PrepareFiles,
    RollTopic,
    SetPolicy,
    SwapFiles,
    TrimTopic,
    WrittenFile,
    continued,
    decode_operations,
    encode_operations,
    epoch_operations,
)
from broker_io.filelog.log.redo import changed_topic, planned, redo
from broker_io.position import LEDGERS_OF_A_HISTORY

EMPTY = Manifest("0" * 32, "0" * 16, 1, 1, (), pair=PairEntry(b"store"))
DIGEST = "00112233445566778899aabbccddeeff"


def incarnation(topic: int) -> str:
    return f"{topic:032x}"


def changed(manifest: Manifest, operations: Sequence[NumberedOperation]) -> Manifest:
    return redo(manifest, operations)[0]


def append(topic: TopicEntry, messages: int = 1, time: int = 5) -> AppendBlocks:
    """Blocks of one message each for the end of a topic."""
    ledger = topic.ledgers[-1]
    blocks = [
        encode_block(
            Batch.of([Message(b"k", b"v%d" % number)]),
            first_entry=ledger.entries + number,
            publish_time=time,
            place=topic.place(ledger),
        )
        for number in range(messages)
    ]
    chunks = [chunk for block in blocks for chunk in block.chunks]
    return AppendBlocks(ledger.ledger, ledger.generation, ledger.bytes, sum(map(len, chunks)), chunks)


class History:
    """Operations as an owner makes them, and the manifest after each."""

    def __init__(self) -> None:
        self.numbers = ObjectNumbers()
        self.operations: list[NumberedOperation] = []
        self.manifests = [EMPTY]

    @property
    def manifest(self) -> Manifest:
        return self.manifests[-1]

    def topic(self, number: int) -> TopicEntry:
        return next(topic for topic in self.manifest.topics if topic.number == number)

    def draw(self, change: Change, topic: int, body: object) -> None:
        self.add([self.numbers.draw(change, topic, body)])

    def add(self, operations: Sequence[NumberedOperation]) -> None:
        for operation in operations:
            self.operations.append(operation)
            self.manifests.append(changed(self.manifest, [operation]))

    def do(self, kind: str, choice: int) -> None:
        """Do something to one of the topics, if it can be done."""
        if kind == "make":
            topic = self.manifest.next_topic
            self.draw(Change.MAKE, topic, MakeTopic(f"topic {topic}", incarnation(topic), self.manifest.next_ledger))
        elif kind == "epoch":
            self.add(epoch_operations(self.manifest, self.numbers, choice % 2))
        elif self.manifest.topics:
            entry = self.manifest.topics[choice % len(self.manifest.topics)]
            change, body = getattr(self, f"_{kind}")(entry)
            if body is not None:
                self.draw(change, entry.number, body)

    def _append(self, entry: TopicEntry) -> tuple[Change, Any]:
        return Change.APPEND, append(entry, 2, time=len(self.operations))

    def _delete(self, entry: TopicEntry) -> tuple[Change, Any]:
        return Change.DELETE, DeleteTopic(entry.ledgers[-1].ledger + 1)

    def _roll(self, entry: TopicEntry) -> tuple[Change, Any]:
        return Change.ROLL, RollTopic(entry.ledgers[-1].ledger + 1, entry.ledgers[-1].last_time)

    def _trim(self, entry: TopicEntry) -> tuple[Change, Any]:
        first = entry.ledgers[0]
        return Change.TRIM, TrimTopic(first.ledger, first.entries) if len(entry.ledgers) > 1 else None

    def _policy(self, entry: TopicEntry) -> tuple[Change, Any]:
        policy = entry.compaction.policy
        return Change.POLICY, SetPolicy(CompactionPolicy(grace_ms=7) if policy is None else None)

    def _prepare(self, entry: TopicEntry) -> tuple[Change, Any]:
        files = tuple(WrittenFile(old.ledger, old.generation + 1, 7, DIGEST) for old in entry.ledgers[:-1])
        return Change.PREPARE, PrepareFiles(files) if files else None

    def _swap(self, entry: TopicEntry) -> tuple[Change, Any]:
        found = [file for file in self.manifest.pair.prepared if file.topic == entry.number]
        if not found:
            return Change.SWAP, None
        old = {ledger.ledger: ledger for ledger in entry.ledgers}
        files = [file for file in found if file.ledger in old and file.number == found[0].number]
        news = tuple(old[each.ledger]._replace(generation=each.generation, bytes=each.bytes) for each in files)
        return Change.SWAP, SwapFiles(
            found[0].number, news, entry.ledgers[-2].ledger if len(entry.ledgers) > 1 else 0, 0
        )


KINDS = ("make", "append", "append", "delete", "roll", "trim", "policy", "prepare", "swap", "epoch")
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=40)


def history(done: Sequence[tuple[str, int]]) -> History:
    made = History()
    for kind, choice in done:
        made.do(kind, choice)
    return made


ALL = [(kind, 0) for kind in ("make", "append", "roll", "policy", "prepare", "swap", "trim", "make", "append")]


def joined(operation: NumberedOperation) -> NumberedOperation:
    """An operation whose body can be compared."""
    body = operation.body
    return (
        operation._replace(body=body._replace(chunks=b"".join(body.chunks)))
        if isinstance(body, AppendBlocks)
        else operation
    )


def test_golden() -> None:
    made = history([*ALL, ("prepare", 0), ("epoch", 1), ("delete", 1)])
    assert {operation.change for operation in made.operations} == set(Change)
    data = committed("broker_io/operations.bin", b"".join(encode_operations(made.operations)))
    assert list(map(joined, decode_operations(data))) == list(map(joined, made.operations))


@given(steps)
def test_operations_survive_encoding(done: list[tuple[str, int]]) -> None:
    operations = history(done).operations
    data = b"".join(encode_operations(operations))
    assert list(map(joined, decode_operations(data))) == list(map(joined, operations))


def test_blocks_of_an_append_are_not_copied() -> None:
    made = history(ALL)
    chunk = b"a chunk of a block"
    operation = NumberedOperation(Change.APPEND, 1, 3, 0, AppendBlocks(1, 0, 0, len(chunk), [chunk]))
    assert any(each is chunk for each in encode_operations([*made.operations, operation]))


def test_any_cut_content_is_refused() -> None:
    data = b"".join(encode_operations(history(ALL).operations))
    for size in range(len(data)):
        with pytest.raises(BadBlock):
            decode_operations(data[:size])
    with pytest.raises(BadBlock, match="1 bytes after"):
        decode_operations(data + b"\0")


@pytest.mark.parametrize(
    "operation",
    [
        NumberedOperation(Change.ROLL, 1, 2, 0, RollTopic(3, 0)),
        NumberedOperation(Change.ROLL, 0, 0, 4, RollTopic(3, 0)),
        NumberedOperation(Change.EPOCH, 1, 1, 4, BeginEpoch(1)),
        NumberedOperation(Change.ROLL, 1, 2, 4, RollTopic(-3, 0)),
        NumberedOperation(Change.MAKE, 1, 1, 4, MakeTopic("t", "xyz", 1)),
        NumberedOperation(Change.MAKE, 1, 1, 4, BeginEpoch(1)),
    ],
)
def test_impossible_operations_are_refused(operation: NumberedOperation) -> None:
    with pytest.raises(BadBlock, match=operation.change.name):
        decode_operations(b"".join(encode_operations([operation])))


def test_what_each_operation_does() -> None:
    made = history(ALL)
    first, second = made.manifest.topics
    assert (made.manifest.next_topic, made.manifest.pair) == (3, PairEntry(b"store", structures=7))
    assert first == TopicEntry(
        1,
        "topic 1",
        incarnation(1),
        (1, 2),
        (LedgerEntry(2, 0, 2, first.ledgers[0].bytes, 8, 8),),
        CompactionState(1, 0, CompactionPolicy(grace_ms=7)),
        8,
    )
    assert second == TopicEntry(2, "topic 2", incarnation(2), (0, 0), (LedgerEntry(1),), operations=1)


def test_files_that_an_operation_opens_and_drops() -> None:
    made = history([("make", 0), ("append", 0), ("roll", 0), ("prepare", 0), ("swap", 0), ("trim", 0), ("delete", 0)])
    plans = [
        planned(manifest, {topic.number: topic for topic in manifest.topics}.get, [operation])
        for manifest, operation in zip(made.manifests, made.operations, strict=False)
    ]
    assert [[ledger.ledger for _, ledger in plan.opened] for plan in plans] == [[1], [], [2], [], [], [], []]
    assert [[ledger[:2] for _, ledger in plan.dropped] for plan in plans] == [
        [], [], [], [], [(1, 0)], [(1, 1)], [(2, 0)]
    ]  # fmt: skip


def test_forced_epoch_continues_each_topic_in_another_history() -> None:
    made = history([*ALL, ("prepare", 1), ("delete", 0)])
    before = made.manifest
    made.add(epoch_operations(before, made.numbers, 3))
    for old, new in zip(before.topics, made.manifest.topics, strict=True):
        assert new.ledgers == (*old.ledgers, LedgerEntry(3 * LEDGERS_OF_A_HISTORY, first_time=0, last_time=0))
    assert made.manifest.next_ledger == 3 * LEDGERS_OF_A_HISTORY
    assert continued(3 * LEDGERS_OF_A_HISTORY + 17, 1) == 4 * LEDGERS_OF_A_HISTORY


def test_h13_epoch_forgets_what_is_prepared() -> None:
    made = history([("make", 0), ("append", 0), ("roll", 0), ("prepare", 0)])
    file = PreparedFile(3, 1, 1, 1, 7, DIGEST)
    assert made.manifest.pair == PairEntry(b"store", structures=3, prepared=(file,))
    made.do("epoch", 0)
    assert made.manifest.pair == PairEntry(b"store", structures=4)


@given(steps, st.data())
def test_h12_redo_of_what_follows_any_manifest_leads_to_one_state(
    done: list[tuple[str, int]], data: st.DataObject
) -> None:
    """The manifest has everything up to a mark, and the structure of some operations after it."""
    made = history(done)
    mark = data.draw(st.integers(0, len(made.operations)))
    ahead = data.draw(st.integers(mark, len(made.operations)))
    assert changed(_ahead(made, mark, ahead), made.operations[mark:]) == made.manifest


def _ahead(made: History, mark: int, ahead: int) -> Manifest:
    """The manifest at a mark with the structure of a later operation; a topic is as of its last roll."""
    manifest, last = made.manifests[mark], made.manifests[ahead]
    entries = {topic.number: topic for topic in manifest.topics}
    for at in range(mark, ahead):
        operation, after = made.operations[at], made.manifests[at + 1]
        now = {topic.number: topic for topic in after.topics}.get(operation.topic)
        old = entries.get(operation.topic)
        if operation.change is Change.MAKE and now is not None:
            entries[operation.topic] = now._replace(operations=0)
        elif operation.change is Change.DELETE:
            del entries[operation.topic]
        elif operation.change is Change.ROLL and now is not None:
            entries[operation.topic] = now
        elif operation.manifest and old is not None and now is not None:
            entries[operation.topic] = now.with_open(old.ledgers[-1])._replace(operations=old.operations)
    return last._replace(topics=tuple(entries.values()))


def test_operations_that_do_not_follow_are_refused() -> None:
    entry = history([("make", 0), ("append", 0)]).topic(1)
    stale = append(entry._replace(ledgers=(LedgerEntry(1),)))
    for change, body, what in (
        (Change.APPEND, stale, "does not follow"),
        (Change.ROLL, RollTopic(1, 0), "ledger 1 follows 1"),
        (Change.TRIM, TrimTopic(1, 2), "open ledger is trimmed"),
        (Change.SWAP, SwapFiles(1, (LedgerEntry(1, 1),), 1, 0), "not all closed"),
        (Change.MAKE, MakeTopic("again", incarnation(1), 1), "created twice"),
    ):
        with pytest.raises(StorageError, match=what):
            changed_topic(entry, NumberedOperation(change, 1, 3, 2, body))
    with pytest.raises(StorageError, match="topic 7 was never made"):
        changed(EMPTY, [NumberedOperation(Change.APPEND, 7, 1, 0, append(entry))])
