"""Two brokers of a pair in one process, each with a directory of its own: what their users see in every role."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pair.file_pairs import MS, SETTINGS, BrokerPair, contents, put, segments

from broker_io.batch import Batch, Message
from broker_io.errors import (
    AppendUnknown,
    CallerError,
    DiskFailed,
    Fenced,
    NotLive,
    ServiceUnavailable,
    StillHeld,
    TopicNotFound,
)
from broker_io.filelog.log.numbers import Change, NumberedOperation
from broker_io.filelog.log.operations import AppendBlocks, DeleteTopic, decode_operations
from broker_io.filelog.pair import broker as pair_broker
from broker_io.filelog.pair import store as pair_store
from broker_io.filelog.pair.broker import PairOptions
from broker_io.filelog.pair.store import DirectoryStore
from broker_io.port import AtomicBroker, ReplicatedBroker
from broker_io.position import EARLIEST, Positions
from broker_io.testing.contract.base import eventually as until
from broker_io.testing.contract.together import append_together


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[BrokerPair]:
    made = BrokerPair(tmp_path)
    yield made
    made.a.stop()
    made.b.stop()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    until(lambda: {*threading.enumerate()} <= before)


def test_is_a_replicated_broker(pair: BrokerPair) -> None:
    assert isinstance(pair.a.start(), ReplicatedBroker)


def test_backup_has_what_was_appended_and_takes_over(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    a.create_topic("orders")
    for number in range(50):
        put(a, "orders", f"x{number}")
    until(pair.same)
    assert contents(b, "orders") == [f"x{number}" for number in range(50)]
    assert b.incarnation("orders") == a.incarnation("orders")
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))  # replaced files are removed later
    pair.a.stop()
    pair.b.live()
    put(b, "orders", "y")
    assert contents(b, "orders")[-2:] == ["x49", "y"]
    a = pair.a.start()
    until(pair.same)
    assert contents(a, "orders")[-2:] == ["x49", "y"]


def test_appends_to_several_topics_are_one_record_of_both_members(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    assert isinstance(a, AtomicBroker)
    a.create_topics(["orders", "stock"])
    writers = [a.writer(topic, exclusive=True) for topic in ("orders", "stock")]
    until(pair.same)
    end = a.log.journal.end.lsn
    for outcome in append_together(a, [(writer, Batch.of([Message(None, b"x")])) for writer in writers]).result(60):
        assert isinstance(outcome, Positions)
    until(pair.same)
    (record,) = b.log.journal.read(end, b.log.journal.end.lsn)
    assert [operation.change for operation in decode_operations(record.content)] == [Change.APPEND] * 2
    assert contents(b, "orders") == contents(b, "stock") == ["x"]
    a.switch()
    with pytest.raises(Fenced):
        append_together(a, [(writer, Batch.of([Message()])) for writer in writers]).result(60)


def test_backup_refuses_changes(pair: BrokerPair) -> None:
    pair.begin()
    pair.a.broker.create_topics(["orders", "__txnbuffer_state"])
    until(pair.same)
    b = pair.b.broker
    b.create_topic("orders")
    for change in (
        lambda: b.create_topic("others"),
        lambda: b.writer("orders"),
        lambda: b.writer("orders", exclusive=True),
        lambda: b.delete_topic("orders"),
        lambda: b.trim("orders", 2),
        lambda: b.roll("orders"),
        lambda: b.set_compaction_policy("orders", None),
        lambda: b.compact("__txnbuffer_state"),
        b.check_answer,
        b.switch,
    ):
        with pytest.raises(NotLive):
            change()
    with pytest.raises(StillHeld):
        b.writer("orders", exclusive=True, wait=0.2)
    pair.a.broker.check_answer()


def test_waiting_writer_gets_the_topic_when_its_member_is_live(pair: BrokerPair) -> None:
    pair.begin()
    pair.a.broker.create_topic("orders")
    put(pair.a.broker, "orders", "x")
    roles: list[bool] = []
    pair.b.broker.on_role(lambda: roles.append(pair.b.broker.live))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.b.broker.writer, "orders", exclusive=True, wait=60.0)
        pair.a.broker.switch()
        with waiting.result() as writer:
            writer.append(Batch.of([Message(None, b"y")])).result(60)
    assert not pair.a.broker.live
    until(lambda: roles == [True])
    until(pair.same)
    assert contents(pair.a.broker, "orders") == ["x", "y"]


def test_writers_are_fenced_with_their_term(pair: BrokerPair) -> None:
    pair.begin()
    a = pair.a.broker
    a.create_topic("orders")
    writer = a.writer("orders", exclusive=True)
    writer.append(Batch.of([Message(None, b"x")])).result(60)
    pair.a.broker.switch()
    with pytest.raises(Fenced):
        writer.append(Batch.of([Message(None, b"y")])).result(60)
    until(lambda: pair.b.broker.live and pair.same())
    pair.b.broker.switch()
    pair.a.live()
    with pytest.raises(Fenced):
        writer.append(Batch.of([Message(None, b"y")])).result(60)
    with a.writer("orders", exclusive=True, wait=60.0) as another:
        writer.close()
        another.append(Batch.of([Message(None, b"z")])).result(60)
    assert contents(a, "orders") == ["x", "z"]


def test_appends_under_way_are_unknown_when_the_role_is_lost(tmp_path: Path) -> None:
    pair = BrokerPair(tmp_path, SETTINGS._replace(min_in_sync=2))
    pair.begin()
    a = pair.a.broker
    a.create_topic("orders")
    writer = a.writer("orders")
    pair.net.cut = True
    pair.net.break_links()
    under_way = writer.append(Batch.of([Message(None, b"x")]))
    pair.a.lock.down = True
    with pytest.raises(AppendUnknown):
        under_way.result(60)
    with pytest.raises((Fenced, NotLive)):
        writer.append(Batch.of([Message(None, b"y")])).result(60)
    pair.a.lock.down = pair.net.cut = False
    until(lambda: pair.same() and (pair.a.broker.live or pair.b.broker.live))
    assert contents(pair.a.broker, "orders") == contents(pair.b.broker, "orders")
    pair.a.stop()
    pair.b.stop()


def test_live_that_lacks_its_backup_lets_an_owner_wait(tmp_path: Path) -> None:
    """The first entry of an owner would wait for the backup, and nothing would be served meanwhile."""
    pair = BrokerPair(tmp_path, SETTINGS._replace(min_in_sync=2))
    pair.begin()
    pair.a.broker.create_topic("orders")
    until(pair.same)
    pair.b.stop()
    until(lambda: pair.a.broker.status()["waits_for_backup"])
    with pytest.raises(StillHeld, match="lacks its backup"):
        pair.a.broker.writer("orders", exclusive=True, wait=0.2)
    pair.b.start()
    with pair.a.broker.writer("orders", exclusive=True, wait=60.0) as writer:
        writer.append(Batch.of([Message(None, b"x")])).result(60)
    pair.a.stop()
    pair.b.stop()


def test_structure_is_replicated(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    a.create_topics(["one", "two", "three"])
    for number in range(6):
        put(a, "one", *[f"{number} {row} " + "v" * 500 for row in range(20)])
    put(a, "two", "x")
    a.roll("two")
    a.delete_topic("three")
    a.trim("one", a.ledgers("one")[2].ledger)
    until(pair.same)
    assert a.topics() == b.topics() == ["one", "two"]
    for topic in ("one", "two"):
        assert a.ledgers(topic) == b.ledgers(topic)
        assert contents(a, topic) == contents(b, topic)
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))  # replaced files are removed later


def test_compaction_of_own_and_data_topics(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    for topic in ("__txnbuffer_state", "orders"):
        a.create_topic(topic)
        for _ in range(5):
            put(a, topic, *[f"{row}" for row in range(50)])
        a.roll(topic)
    a.compact("__txnbuffer_state")
    assert contents(a, "__txnbuffer_state") == ["49"]
    until(pair.same)
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))
    assert contents(b, "__txnbuffer_state") == ["49"]
    pair.a.stop()
    pair.b.live()
    assert contents(b, "__txnbuffer_state") == ["49"]


def test_backup_that_was_away_for_long_gets_a_copy(pair: BrokerPair) -> None:
    pair.a.start()
    a = pair.a.live()
    a.create_topic("orders")
    for number in range(10):
        put(a, "orders", *[f"{number} {row} " + "v" * 500 for row in range(20)])
    b = pair.b.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [put(a, "orders", f"y{number}") for number in range(50)])
        until(running.done)
        running.result()
    until(pair.same)
    assert (a.status()["copies"], b.status()["copies"]) == (1, 1)
    assert contents(b, "orders") == contents(a, "orders")
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))  # replaced files are removed later


def test_reader_of_a_log_that_a_copy_replaces_has_to_be_opened_again(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    a.create_topic("orders")
    put(a, "orders", "x")
    until(pair.same)
    copies, reader = b.status()["copies"], b.reader("orders", EARLIEST)
    assert reader.read() is not None
    pair.net.cut = True
    pair.net.break_links()
    for number in range(10):
        put(a, "orders", *[f"{number} {row} " + "v" * 500 for row in range(20)])
    pair.net.cut = False
    until(pair.same)
    assert b.status()["copies"] == copies + 1
    with pytest.raises(ServiceUnavailable):
        reader.read()
    reader.close()
    assert contents(b, "orders") == contents(a, "orders")


def test_nothing_counts_as_damaged_while_a_copy_replaces_the_log(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are moved before the log is another one."""
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    a.create_topic("orders")
    put(a, "orders", "kept")
    until(pair.same)
    pair.net.cut = True
    pair.net.break_links()
    put(a, "orders", "lost")
    pair.a.stop()
    b.promote()
    pair.b.live()
    replace, seen = pair_store.set_aside, list[str]()

    def look() -> None:
        """Read as a standby does."""
        member = pair.a.broker
        for read in (lambda: member.reader("orders").read(), reader.read, lambda: member.position_at("orders", 1)):
            with pytest.raises(NotLive) as caught:
                read()
            seen.append(str(caught.value))

    def set_aside(*arguments: Any) -> None:
        replace(*arguments)
        look()

    monkeypatch.setattr(pair_store, "set_aside", set_aside)
    a = pair.a.start()
    reader = a.reader("orders")
    assert reader.read(limit=1) is not None
    reader._close_stream()
    pair.net.cut = False
    until(pair.same)
    assert len(seen) == 3
    assert contents(a, "orders") == ["kept"]
    reader.close()


def test_topic_that_an_incomplete_copy_lacks_may_be_at_the_live(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.a.start()
    a = pair.a.live()
    a.create_topic("orders")
    put(a, "orders", *["v" * 500] * 100)
    finish, held, seen = DirectoryStore.finish_copy, threading.Event(), threading.Event()

    def hold(store: DirectoryStore, *arguments: Any) -> None:
        seen.set()
        held.wait()
        finish(store, *arguments)

    monkeypatch.setattr(DirectoryStore, "finish_copy", hold)
    b = pair.b.start()
    seen.wait()
    with pytest.raises(NotLive, match="gets a copy of the log"):
        b.reader("orders")
    held.set()
    until(pair.same)
    assert len(contents(b, "orders")) == 100
    with pytest.raises(TopicNotFound):
        b.reader("none")


def test_promotion_by_force_drops_what_only_the_other_one_has(pair: BrokerPair) -> None:
    pair.begin()
    a, b = pair.a.broker, pair.b.broker
    a.create_topic("orders")
    put(a, "orders", "kept")
    until(pair.same)
    before = b.last_position("orders")
    pair.net.cut = True
    pair.net.break_links()
    put(a, "orders", "lost")
    pair.a.stop()
    until(lambda: "can't become live: it is not in sync" in b.status()["problem"])
    b.promote()
    pair.b.live()
    put(b, "orders", "new")
    assert contents(b, "orders") == ["kept", "new"]
    last = b.last_position("orders")
    assert before is not None
    assert last is not None
    assert last.ledger >= before.ledger + 2**20
    with pytest.raises(CallerError):
        b.promote()
    pair.net.cut = False
    a = pair.a.start()
    until(pair.same)
    assert contents(a, "orders") == ["kept", "new"]
    assert [path for path in Path(pair.a.directory).iterdir() if path.name.startswith("aside")]


def test_load_over_failovers(pair: BrokerPair) -> None:
    """Threads append all the time; a switch and a lost lease in between lose nothing that was acknowledged."""
    pair.begin()
    pair.a.broker.create_topic("orders")
    until(pair.same)
    acknowledged: list[str] = []
    stopped = threading.Event()

    def work(name: str) -> None:
        number = 0
        while not stopped.is_set():
            for member in (pair.a, pair.b):
                value = f"{name} {number}"
                try:
                    put(member.broker, "orders", value)
                except (NotLive, AppendUnknown, Fenced):
                    number += 1
                    continue
                acknowledged.append(value)
                number += 1

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, name) for name in "wxyz"]
        for turn in range(4):
            before = len(acknowledged)
            until(lambda before=before: len(acknowledged) > before + 50)  # type: ignore[misc]  # mypy does not infer it
            live = pair.a if pair.a.broker.live else pair.b
            if turn % 2:
                live.lock.down = True
                until(lambda live=live: not live.broker.live)  # type: ignore[misc]  # mypy does not infer it
                live.lock.down = False
            else:
                live.broker.switch()
            until(lambda: pair.in_sync() and (pair.a.broker.live or pair.b.broker.live))
        stopped.set()
        for one in running:
            one.result()
    until(pair.same)
    for member in (pair.a, pair.b):
        found = contents(member.broker, "orders")
        assert len(found) == len(set(found))
        assert set(acknowledged) <= set(found)
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))  # replaced files are removed later


def test_operations_that_were_made_before_others_are_refused(pair: BrokerPair) -> None:
    """As when the role was lost, and won again after what the primary did not know to be committed was applied."""
    pair.a.start()
    a = pair.a.live()
    a.create_topic("orders")
    put(a, "orders", "x")
    log = a.log
    entry, replicator = log.topic("orders").entry, log.replicator
    assert replicator is not None
    for late in (
        NumberedOperation(Change.APPEND, entry.number, entry.operations, 0, AppendBlocks(1, 0, 0, 0, [])),
        NumberedOperation(Change.DELETE, entry.number, entry.operations + 1, log.pair.structures, DeleteTopic(2)),
    ):
        with pytest.raises(NotLive, match="for a while"):
            replicator.commit([late])
    put(a, "orders", "y")
    assert contents(a, "orders") == ["x", "y"]


def test_close_does_not_wait_for_ever_for_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_broker, "CLOSE_SECONDS", 0.3)
    pair = BrokerPair(tmp_path, SETTINGS._replace(min_in_sync=2))
    pair.begin()
    pair.a.broker.create_topic("orders")
    until(pair.same)
    writer = pair.a.broker.writer("orders")
    pair.b.stop()
    under_way = writer.append(Batch.of([Message(None, b"x")]))
    pair.a.stop()
    with pytest.raises(AppendUnknown):
        under_way.result(0)


def test_member_whose_disk_fails_stops_and_the_other_one_takes_over(pair: BrokerPair) -> None:
    pair.begin()
    a = pair.a.broker
    a.create_topic("orders")
    until(pair.same)
    a.log.stop(DiskFailed("the disk fails: repair it"))
    pair.b.live()
    assert isinstance(a.failure, DiskFailed)
    with pytest.raises((DiskFailed, Fenced)):
        put(a, "orders", "x")
    put(pair.b.broker, "orders", "y")


def test_options_give_members_and_locks_a_share_of_the_lease() -> None:
    settings = PairOptions("file:lock", "localhost:1", "localhost:2", found=True, lease_seconds=10).settings()
    assert settings.terms.ttl == 10_000 * MS
    assert (settings.member_timeout, settings.answer_timeout) == (2000 * MS, 1000 * MS)
    assert settings.founder
