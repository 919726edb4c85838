"""The engine of a member of a pair: what it shows, keeps, skips and refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from log_history import DIRECTORY, content_of, open_log
from member_logs import SMALL, STORE, AloneReplicator, open_member, opened_member, promote

from broker_io.batch import Batch, Message
from broker_io.environment import Environment
from broker_io.errors import AppendUnknown, DiskWatermark, Error, NotLive
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import PreparedFile
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.numbers import NumberedOperation
from broker_io.filelog.log.operations import PrepareFiles, WrittenFile, decode_operations, encode_operations
from broker_io.filelog.log.records import FOUNDED_EMPTY, LogRecord, Mark, make_record
from broker_io.position import LEDGERS_OF_A_HISTORY
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced


def environment(disk: SimulatedDisk, seed: int = 0) -> Environment:
    return Environment(SimulatedClock(), disk, SeededRandomness(seed))


def append(broker: FileBroker, topic: str, value: bytes) -> None:
    with broker.writer(topic) as writer:
        writer.append(Batch.of([Message(b"k", value)])).result(0)


def values(disk: SimulatedDisk) -> dict[str, list[bytes | None]]:
    """What a reader of the directory sees."""
    with open_log(disk, read_only=True) as follower:
        return {topic: [row[1].value for row in found.rows] for topic, found in content_of(follower).items()}


class Recorder(AloneReplicator):
    """Keeps the records, and can fail as a pair does: before a record is sent, or after it."""

    def __init__(self, log: FileLog) -> None:
        super().__init__(log, log.journal.end.epoch)
        self.records: list[LogRecord] = []
        self.error: Error | None = None
        self.leased = True

    def commit(self, operations: Sequence[NumberedOperation], *_: object) -> Mark:
        if isinstance(self.error, AppendUnknown):
            super().commit(operations)
        if self.error is not None:
            raise self.error
        mark = super().commit(operations)
        self.records += self.log.journal.read(mark.lsn - 1, mark.lsn)
        return mark

    def may_answer(self) -> bool:
        return self.leased


def recorded(disk: SimulatedDisk) -> tuple[FileBroker, Recorder]:
    broker = open_member(disk)
    broker._log.replicator = recorder = Recorder(broker._log)
    return broker, recorder


def uncommitted(log: FileLog, broker: FileBroker, topic: str, value: bytes) -> LogRecord:
    """A record of an append that is durable here and not known to be committed."""
    made: list[LogRecord] = []

    class Kept(Recorder):
        def commit(self, operations: Sequence[NumberedOperation], *_: object) -> Mark:
            content = b"".join(encode_operations(operations))
            made.append(make_record(log.journal.end, log.journal.end.epoch, log.applied.lsn, content))
            log.journal.write(made, log.journal.end.lsn)
            raise AppendUnknown("the link broke")

    log.replicator, before = Kept(log), log.replicator
    with broker.writer(topic) as writer:
        assert isinstance(writer.append(Batch.of([Message(b"k", value)])).exception(0), AppendUnknown)
    log.replicator = before
    return made[0]


def test_founding_begins_another_log() -> None:
    """So that no other store has a part of it: an empty one gets a copy."""
    disk = SimulatedDisk()
    with open_log(disk) as broker:
        broker.create_topic("a")
        append(broker, "a", b"before")
        end = broker._log.journal.end
    log = opened_member(environment(disk, 5)).log
    assert (log.manifest.pair.store, log.applied, log.journal.base) == (STORE, log.journal.end, log.journal.end)
    assert log.applied.lsn == end.lsn + 1 + FOUNDED_EMPTY
    assert log.applied.chain not in (0, end.chain)
    assert [name for name in disk.list(DIRECTORY) if name.startswith("journal")] == [f"journal-{log.journal.number}"]
    log.close()
    assert values(disk.crash(Unsynced.LOST)) == {"a": [b"before"]}


def test_what_is_not_committed_is_kept_and_not_shown() -> None:
    disk = SimulatedDisk()
    broker = open_member(disk)
    broker.create_topic("a")
    append(broker, "a", b"one")
    record = uncommitted(broker._log, broker, "a", b"two")
    killed = disk.kill()
    assert values(killed) == {"a": [b"one"]}
    opened = opened_member(environment(killed))
    assert opened.log.journal.end == record.mark
    assert opened.found is not None
    assert opened.found.shown(opened.log.manifest) == record.lsn - 1
    opened.log.close()
    assert values(killed) == {"a": [b"one"]}
    with open_member(killed):
        assert values(killed) == {"a": [b"one", b"two"]}


def test_a_cut_drops_what_is_not_committed() -> None:
    disk = SimulatedDisk()
    broker = open_member(disk)
    broker.create_topic("a")
    append(broker, "a", b"one")
    log, mark = broker._log, broker._log.journal.end
    uncommitted(log, broker, "a", b"two")
    first = log.journal.path
    log.checkpoint()
    assert disk.exists(first)
    uncommitted(log, broker, "a", b"three")
    log.cut(mark.lsn)
    assert log.journal.end == log.applied == mark
    append(broker, "a", b"four")
    with open_member(disk.crash(Unsynced.LOST)) as again:
        assert [row[1].value for row in content_of(again)["a"].rows] == [b"one", b"four"]


def test_a_checkpoint_keeps_the_journal_until_it_is_dropped() -> None:
    disk = SimulatedDisk()
    broker = open_member(disk)
    broker.create_topic("a")
    append(broker, "a", b"one")
    log = broker._log
    first, base, applied = log.journal.path, log.journal.base, log.applied
    log.checkpoint()
    assert (log.manifest.mark, log.journal.base, disk.exists(first)) == (applied, base, True)
    log.journal.drop(applied.lsn)
    assert (log.journal.base, disk.exists(first)) == (applied, False)
    with open_member(disk.crash(Unsynced.LOST)) as again:
        assert len(content_of(again)["a"].rows) == 1


def test_a_manifest_knows_that_its_structure_is_committed() -> None:
    """Though the note of that was lost with the power: a forced promotion must not cut it."""
    disk = SimulatedDisk()
    broker = open_member(disk)
    broker.create_topics(["a", "b"])
    crashed = disk.crash(Unsynced.LOST)
    assert values(crashed) == {"a": [], "b": []}
    opened = opened_member(environment(crashed))
    assert opened.found is not None
    assert opened.found.noted == 0
    assert opened.found.shown(opened.log.manifest) == opened.log.journal.end.lsn


def test_operations_that_are_applied_already_are_skipped() -> None:
    """Also if topics are ahead of each other, and of the mark of the manifest."""
    disk, other = SimulatedDisk(), SimulatedDisk()
    opened_member(environment(other)).log.close()
    broker = open_member(disk)
    broker.create_topics(["a", "b", "gone"])
    for number in range(4):
        append(broker, "a", b"a%d" % number)
        append(broker, "b", b"b%d" % number)
        append(broker, "gone", b"x")
        broker.roll("a")
    broker.trim("a", broker.ledgers("a")[2].ledger)
    append(broker, "a", b"last")
    broker.delete_topic("gone")
    broker.create_topic("late")
    append(broker, "late", b"l")
    log, journal = opened_member(environment(other)).log, broker._log.journal
    records = journal.read(journal.base.lsn, journal.end.lsn)
    operations = [(each, record) for record in records for each in decode_operations(record.content)]
    for repeated in range(len(operations)):
        for operation, record in operations[: repeated + 1]:
            log.apply([operation], record.lsn)
    found = {topic.entry.name: topic.entry for topic in log.all_topics()}
    assert found == {topic.entry.name: topic.entry for topic in broker._log.all_topics()}
    for path in disk.files():
        if path.endswith(".log"):
            assert other.content(path) == disk.content(path)


def test_numbers_count_structure_that_the_manifest_has() -> None:
    """Else the next operation of the topic would have a number that was used."""
    disk = SimulatedDisk()
    broker = open_member(disk)
    broker.create_topic("a")
    append(broker, "a", b"v")
    broker.roll("a")
    broker.trim("a", broker.ledgers("a")[1].ledger)
    counted = broker._log.numbers().topics
    opened = opened_member(environment(disk.kill()))
    promote(opened)
    assert opened.log.numbers().topics == counted


@pytest.mark.parametrize("error", [NotLive("not live"), DiskWatermark("full"), AppendUnknown("unknown")])
def test_what_a_pair_refuses_is_not_applied(error: Error) -> None:
    disk = SimulatedDisk()
    broker, recorder = recorded(disk)
    broker.create_topic("a")
    recorder.error = error
    with broker.writer("a") as writer:
        assert writer.append(Batch.of([Message(b"k", b"v")])).exception(0) is error
    with pytest.raises(type(error)):
        broker.create_topic("b")
    assert content_of(broker)["a"].rows == ()
    assert broker.topics() == ["a"]
    recorder.error = None
    if not isinstance(error, AppendUnknown):  # else its records come first
        append(broker, "a", b"v")
        broker.create_topic("b")
        assert broker.topics() == ["a", "b"]


def test_without_its_lease_a_live_does_not_answer() -> None:
    disk = SimulatedDisk()
    broker, recorder = recorded(disk)
    broker.create_topic("a")
    recorder.leased = False
    with broker.writer("a") as writer:
        assert isinstance(writer.append(Batch.of([Message(b"k", b"v")])).exception(0), AppendUnknown)
    with pytest.raises(AppendUnknown):
        broker.create_topic("b")
    assert len(content_of(broker)["a"].rows) == 1, "it is committed"
    assert broker.topics() == ["a", "b"]


def test_a_backup_changes_nothing_by_itself() -> None:
    disk = SimulatedDisk()
    with open_member(disk) as broker:
        broker.create_topic("a")
    opened = opened_member(environment(disk))
    promote(opened)
    opened.log.replicator = None
    backup = FileBroker(environment(disk), DIRECTORY, SMALL, committer=False, opened=opened)
    with backup.writer("a") as writer:
        assert isinstance(writer.append(Batch.of([Message(b"k", b"v")])).exception(0), NotLive)
    with pytest.raises(NotLive, match="backup"):
        backup.create_topic("b")
    backup.create_topic("a")


def test_files_that_nothing_needs_are_reported() -> None:
    disk = SimulatedDisk()
    broker, _ = recorded(disk)
    broker.create_topic("a")
    for _ in range(2):
        append(broker, "a", b"v")
        broker.roll("a")
    reported: list[list[str]] = []
    broker._log.on_replaced = reported.append
    broker.trim("a", broker.ledgers("a")[1].ledger)
    assert reported == [[f"{DIRECTORY}/topics/1/1-0.log"]]
    assert disk.exists(reported[0][0])
    broker._log.remove_files(reported[0])
    assert not disk.exists(reported[0][0])


def test_prepared_files_stay_until_an_epoch_forgets_them() -> None:
    disk = SimulatedDisk()
    broker, _ = recorded(disk)
    broker.create_topic("a")
    append(broker, "a", b"v")
    broker.roll("a")
    path = f"{DIRECTORY}/topics/1/1-1.log"
    disk.open(path, write=True, create=True).close()
    disk.sync_directory(f"{DIRECTORY}/topics/1")
    number = broker._log.prepare(broker._log.topic("a"), PrepareFiles((WrittenFile(1, 1, 0, "0" * 32),)))
    assert broker._log.manifest.pair.prepared == (PreparedFile(number, 1, 1, 1, 0, "0" * 32),)
    killed = disk.kill()
    opened = opened_member(environment(killed))
    assert killed.exists(path)
    promote(opened)
    assert opened.log.manifest.pair.prepared == ()
    assert not killed.exists(path)


def test_a_forced_promotion_rolls_every_topic() -> None:
    disk = SimulatedDisk()
    with open_member(disk) as broker:
        broker.create_topics(["a", "b"])
        append(broker, "a", b"v")
    opened = opened_member(environment(disk))
    promote(opened, jump=3)
    for topic in opened.log.all_topics():
        assert topic.entry.ledgers[-1].ledger == 3 * LEDGERS_OF_A_HISTORY
    broker = FileBroker(environment(disk), DIRECTORY, SMALL, committer=False, opened=opened)
    append(broker, "a", b"w")
    broker.create_topic("c")
    assert broker.ledgers("c")[0].ledger == 3 * LEDGERS_OF_A_HISTORY
    assert values(disk.kill()) == {"a": [b"v", b"w"], "b": [], "c": []}
