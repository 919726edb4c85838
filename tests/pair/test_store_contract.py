"""The contract of `PairStore`: of the directory, and of the store in memory with which nodes are tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from pair.pair_stores import Events, Member
from pair_parts import MemoryDisk, MemoryStore

from broker_io.errors import Damaged
from broker_io.filelog.log.records import START, Fork, Kind, LogRecord, StoreLog, follows, make_record
from broker_io.filelog.pair.port import PairStore
from broker_io.filelog.replication.messages import BuildEpoch


class Kept:
    """A store whose process can end and begin again."""

    def __init__(self, begin: Callable[[], PairStore]) -> None:
        self._begin = begin
        self.open()

    def open(self) -> StoreLog:
        self.store, self.events = self._begin(), Events()
        self.log = self.store.open_log(self.events)
        return self.log

    def restart(self) -> StoreLog:
        self.store.close()
        return self.open()

    def write(self, count: int = 1, kind: Kind = Kind.EPOCH, epoch: int = 1, commit: int = 0) -> list[LogRecord]:
        """Write records that begin epochs, and apply them: the only content that stores of all kinds have."""
        made = []
        for _ in range(count):
            end = self.log.index.end
            content = self.store.epoch_content(BuildEpoch(epoch, end, kind is Kind.FORCED))
            record = make_record(end, epoch, commit or end.lsn, content, kind)
            self.store.write([record], self.log.durable)
            self.log.append(record)
            self.log.durable = record.lsn
            self.store.apply(record.lsn)
            made.append(record)
        return made

    def take(self, other: Kept) -> None:
        self.store.mark_partial(True)
        with closing(other.store.begin_copy()) as copy, closing(self.store.receive()) as receiver:
            for chunk in copy:
                receiver.add(chunk)
            receiver.finish(copy.mark, copy.forks)


def memory(name: bytes) -> Callable[[], PairStore]:
    disk = MemoryDisk(name)
    return lambda: MemoryStore(disk)


def directory(name: bytes) -> Callable[[], PairStore]:
    member = Member(seed=name[0])

    def begin() -> PairStore:
        return Member(member.disk, seed=name[0]).store

    return begin


@pytest.fixture(params=[memory, directory])
def stores(request: pytest.FixtureRequest) -> Iterator[tuple[Kept, Kept]]:
    kept = Kept(request.param(b"a1")), Kept(request.param(b"b1"))
    yield kept
    for each in kept:
        each.store.close()


def test_store_begins_empty_and_keeps_its_id(stores: tuple[Kept, Kept]) -> None:
    a, b = stores
    assert (a.log.index.end, a.log.manifest, a.log.partial, a.log.forks) == (START, START, False, ())
    assert a.log.store != b.log.store
    store = a.log.store
    assert a.restart().store == store


def test_records_are_there_after_a_restart(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    written = a.write(5)
    assert [*a.store.read(1, 4)] == written[1:4]
    log = a.restart()
    assert (log.index.end, log.durable) == (written[-1].mark, 5)
    assert log.commit >= written[-1].commit
    assert follows(log.index.end, make_record(log.index.end, 1, 5, b""))


def test_commit_index_that_was_noted_is_known(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    a.write(3)
    a.store.note_commit(3)
    assert a.restart().commit == 3


def test_cut_removes_records_for_good(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    written = a.write(3)
    content = a.store.epoch_content(BuildEpoch(2, a.log.index.end, False))
    a.store.write([make_record(a.log.index.end, 2, 3, content, Kind.EPOCH)], 3)
    a.store.cut(3)
    a.store.write([other := make_record(written[-1].mark, 3, 3, content, Kind.EPOCH)], 3)
    assert [*a.store.read(3, 4)] == [other]
    assert a.restart().index.end == other.mark


def test_mark_that_a_store_is_partial_stays(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    a.write(1)
    for partial in (True, False):
        a.store.mark_partial(partial)
        assert a.restart().partial is partial


def test_replaced_store_is_another_one_that_is_empty_and_partial(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    a.write(2)
    before = a.log.store
    store = a.store.replace()
    log = a.restart()
    assert log.store == store != before
    assert (log.index.end, log.partial) == (START, True)


def test_copy_is_the_log_of_its_live_in_a_store_that_stays_partial(stores: tuple[Kept, Kept]) -> None:
    a, b = stores
    a.write(3)
    forced = a.write(1, Kind.FORCED, epoch=2)[0]
    b.write(2, epoch=7)
    store = b.log.store
    b.take(a)
    log = b.restart()
    assert (log.store, log.partial, log.index.end, log.manifest) == (store, True, forced.mark, forced.mark)
    assert log.commit == log.applied == forced.lsn
    assert log.forks == (Fork(2, a.log.mark_at(3)),)
    b.store.mark_partial(False)
    b.log = log
    b.write(1, epoch=2)


def test_copy_without_its_end_leaves_a_partial_store(stores: tuple[Kept, Kept]) -> None:
    a, b = stores
    a.write(3)
    b.write(2, epoch=7)
    b.store.mark_partial(True)
    with closing(a.store.begin_copy()) as copy, closing(b.store.receive()) as receiver:
        for chunk in [*copy][:-1]:
            receiver.add(chunk)
        with pytest.raises(Damaged):
            receiver.finish(copy.mark, copy.forks)
    log = b.restart()
    assert (log.index.end, log.partial) == (START, True)


def test_journal_before_a_checkpoint_can_be_dropped(stores: tuple[Kept, Kept]) -> None:
    a, _ = stores
    a.write(4)
    a.store.begin_copy().close()
    assert a.events.checkpoints == [a.log.index.end]
    a.store.drop_journal(4)
    log = a.restart()
    assert (log.index.base, log.index.end, log.manifest) == (a.log.index.end,) * 3
    assert log.applied == 4
