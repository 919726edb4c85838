"""Behaviours that replicated brokers check, by the rows of tests/replication/CHECKLIST.md, on two brokers of a pair."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer
from pair.replicated_logs import LEASE, SILENCE, Member, ReplicatedLog, T, message, numbers, switched, unchanged, write

from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown, Error, Fenced, MessageTooLarge, NotLive
from broker_io.port import OWN_PREFIX
from broker_io.position import Positions
from broker_io.testing.contract.base import WAIT_SECONDS, eventually, read_all

Start = Callable[..., ReplicatedLog]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def start(etcd: EtcdServer, tmp_path: Path) -> Iterator[Start]:
    """Begins a replicated log; options of the pair by name, `log` has those of the log."""
    begun: list[ReplicatedLog] = []

    def begin(*, log: dict[str, Any] | None = None, **pair: Any) -> ReplicatedLog:
        begun.append(ReplicatedLog(tmp_path, etcd, pair, log or {}))
        begun[-1].begin()
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def append_all(member: Member, count: int, start: int = 0, size: int = 0) -> list[Future[Positions]]:
    """Append messages one after the other without waiting."""
    with member.broker.writer(T) as writer:
        return [writer.append(message(number, size)) for number in range(start, start + count)]


def wait_all(futures: list[Future[Positions]]) -> None:
    for future in futures:
        future.result(WAIT_SECONDS)


def test_row_01_many_writers_leave_the_same_messages_in_the_same_order_on_both(start: Start) -> None:
    log = start(log={"segment_bytes": 20_000})

    def work(number: int) -> None:
        with log.a.broker.writer(T) as writer:
            wait_all([writer.append(Batch.of([Message(b"%d" % number, b"%d" % index)])) for index in range(200)])

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(work, range(10)))
    found = log.equal()
    for number in range(10):
        own = [int(each.message.value or b"") for each in found if each.message.key == b"%d" % number]
        assert own == [*range(200)]
    assert log.a.segments() == log.b.segments()
    assert len(log.b.segments()) > 2


def test_row_02_readers_of_both_see_the_same_while_it_is_written(start: Start) -> None:
    log = start()

    def read(member: Member) -> list[Any]:
        found: list[Any] = []
        with member.broker.reader(T) as reader:
            while len(found) < 1000:
                batch = reader.read(timeout=WAIT_SECONDS)
                assert batch is not None
                found += batch
        return found

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, member) for member in (log.a, log.b)]
        wait_all(append_all(log.a, 1000))
        live, backup = (reader.result(WAIT_SECONDS) for reader in readers)
    assert live == backup
    assert numbers(live) == [*range(1000)]


def test_row_06_never_do_both_serve(start: Start) -> None:
    log = start()
    write(log.a.broker, 3)
    log.a.isolate()
    b = log.wait_live(log.b)
    assert not log.a.broker.live
    with pytest.raises(NotLive):
        log.a.broker.check_answer()
    with pytest.raises(NotLive):
        log.a.broker.writer(T)
    write(b, 3, 3)
    log.a.heal()
    log.wait_in_sync()
    assert numbers(log.equal()) == [*range(6)]


def test_row_07_waiting_for_a_lost_backup_is_bounded(start: Start) -> None:
    log = start()
    log.b.crash()
    began = time.monotonic()
    write(log.a.broker, 5)
    assert time.monotonic() - began < 10 * SILENCE
    assert log.record().in_sync == (log.a.store,)


def test_row_08_each_kind_of_change_arrives_and_nothing_stays_under_way(start: Start) -> None:
    log = start(log={"segment_bytes": 5_000})
    broker, own = log.a.broker, f"{OWN_PREFIX}keys"
    for topic in (own, "gone", "trimmed"):
        broker.create_topic(topic)
        write(broker, 20, topic=topic)
        write(broker, 20, topic=topic)
        broker.roll(topic)
    broker.compact(own)
    broker.trim("trimmed", broker.ledgers("trimmed")[-1].ledger)
    broker.delete_topic("gone")
    write(broker, 5, size=100_000)
    eventually(lambda: log.b.broker.topics() == broker.topics())
    assert "gone" not in broker.topics()
    for topic in broker.topics():
        log.equal(topic)
        eventually(lambda topic=topic: log.b.broker.ledgers(topic) == broker.ledgers(topic))
    assert len(read_all(log.b.broker, own)) == 20
    eventually(lambda: log.b.segments() == log.a.segments())
    eventually(lambda: broker.status()["window_used"] == 0)
    status = broker.status()
    assert status["end"] == status["commit"] == status["applied"] > 0


def test_row_09_the_live_continues_in_order_without_its_backup(start: Start) -> None:
    log = start()
    write(log.a.broker, 37)
    log.b.crash()
    wait_all(append_all(log.a, 63, 37))
    assert numbers(read_all(log.a.broker, T)) == [*range(100)]
    log.b.open()
    log.wait_in_sync()
    assert numbers(log.equal()) == [*range(100)]


def test_row_10_invalid_messages_are_refused_before_anything_is_sent(start: Start) -> None:
    log = start(log={"max_message_bytes": 1000})
    write(log.a.broker, 1)
    end = log.a.broker.status()["end"]
    with log.a.broker.writer(T) as writer, pytest.raises(MessageTooLarge):
        writer.append(message(1, 2000)).result(WAIT_SECONDS)
    assert log.a.broker.status()["end"] == end
    write(log.a.broker, 1, 1)
    assert numbers(log.equal()) == [0, 1]


def test_row_11_appends_after_the_loss_of_the_role_fail_at_once(start: Start) -> None:
    log = start()
    with log.a.broker.writer(T) as writer:
        writer.append(message(0)).result(WAIT_SECONDS)
        log.a.isolate()
        eventually(lambda: not log.a.broker.live)
        for number in (1, 2):
            with pytest.raises((Fenced, NotLive, AppendUnknown)):
                writer.append(message(number)).result(WAIT_SECONDS)
    log.a.heal()


def test_row_12_appends_that_nobody_waits_for_are_finished(start: Start) -> None:
    log = start()
    append_all(log.a, 200)
    eventually(lambda: len(read_all(log.b.broker, T)) == 200)
    eventually(lambda: log.a.broker.status()["window_used"] == 0)


def test_row_13_a_backup_refuses_changes_and_says_why(start: Start) -> None:
    log = start()
    backup = log.b.broker
    for change in (
        lambda: backup.writer(T),
        lambda: backup.create_topic("new"),
        lambda: backup.delete_topic(T),
        lambda: backup.roll(T),
        lambda: backup.switch(),
    ):
        with pytest.raises(NotLive, match="live"):
            change()
    backup.create_topic(T)
    assert backup.topics() == log.a.broker.topics() == [T]


def test_rows_14_and_22_no_file_stays_open(start: Start) -> None:
    log = start(log={"segment_bytes": 5_000})
    write(log.a.broker, 100, size=200)
    counts = []
    for _ in range(3):
        log.b.close()
        assert log.b.open_files() == []
        log.b.wipe()
        log.b.open()
        log.wait_in_sync()
        log.equal()
        counts.append((len(log.a.open_files()), len(log.b.open_files())))
    assert counts[0] == counts[1] == counts[2]


def test_row_16_no_change_takes_effect_before_the_backup_has_it(start: Start) -> None:
    log = start(lease_seconds=10.0)
    broker = log.a.broker
    broker.create_topic("other")
    write(broker, 3, topic="other")
    broker.roll("other")
    log.equal("other")

    def append() -> None:
        write(broker, 1)

    def state() -> Any:
        return broker.topics(), [
            (topic, broker.ledgers(topic), broker.last_position(topic)) for topic in broker.topics()
        ]

    changes: list[Callable[[], None]] = [
        append,
        lambda: broker.create_topic("new"),
        lambda: broker.roll(T),
        lambda: broker.trim("other", broker.ledgers("other")[-1].ledger),
        lambda: broker.delete_topic("other"),
    ]
    with ThreadPoolExecutor(1) as pool:
        for change in changes:
            before = state()
            log.b.link.held = {"up", "down"}
            log.a.link.held = {"up", "down"}
            done = pool.submit(change)
            assert unchanged(state, 0.3)
            assert not done.done()
            log.a.link.heal()
            log.b.link.heal()
            done.result(WAIT_SECONDS)
            assert state() != before
            log.wait_in_sync()
            eventually(lambda: log.b.broker.topics() == broker.topics())
            log.equal()


def test_row_17_answers_come_in_order_once_both_have_everything(start: Start) -> None:
    log = start(lease_seconds=10.0)
    order: list[int] = []
    for proxy in (log.a.link, log.b.link):
        proxy.held = {"up", "down"}
    futures = append_all_of(log.a, 500, order)
    assert unchanged(lambda: len(order), 0.5)
    assert order == []
    for proxy in (log.a.link, log.b.link):
        proxy.heal()
    wait_all(futures)
    eventually(lambda: len(order) == 500)
    assert order == [*range(500)]
    assert numbers(log.equal()) == [*range(500)]


def append_all_of(member: Member, count: int, order: list[int]) -> list[Future[Positions]]:
    """Append without waiting; each number comes into `order` with its answer."""
    writer, futures = member.broker.writer(T), []
    for number in range(count):
        future = writer.append(message(number))
        future.add_done_callback(lambda _, number=number: order.append(number))
        futures.append(future)
    return futures


def test_row_19_each_append_has_one_truthful_answer_while_roles_change(start: Start) -> None:
    log = start()
    stopping, answers = threading.Event(), dict[int, Exception | None]()

    def work(lane: int) -> None:
        number = lane
        while not stopping.is_set():
            for member in (log.a, log.b):
                try:
                    with member.broker.writer(T) as writer:
                        while True:
                            number += 4
                            answers[number] = AppendUnknown("under way")
                            writer.append(message(number)).result(WAIT_SECONDS)
                            answers[number] = None
                            if stopping.is_set():
                                return
                except Error as error:
                    answers[number] = error
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        lanes = [pool.submit(work, lane) for lane in range(4)]
        for turn in range(6):
            time.sleep(0.3)
            member = (log.a, log.b)[turn % 2]
            eventually(lambda member=member: log.in_sync() and member.broker.live)
            switched(member)
        stopping.set()
        for lane in lanes:
            lane.result(WAIT_SECONDS)
    found = numbers(log.equal())
    acknowledged = {number for number, error in answers.items() if error is None}
    refused = {number for number, error in answers.items() if isinstance(error, Fenced | NotLive)}
    assert len(found) == len({*found})
    assert acknowledged <= {*found}
    assert not refused & {*found}
    assert len(acknowledged) > 100


def test_row_20_a_disk_that_fails_ends_what_waits_with_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    log = start()
    write(log.a.broker, 3)
    real = os.fdatasync

    def failing(number: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").startswith(f"{log.a.directory}/"):
            raise OSError(5, "Input/output error")
        real(number)

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(Error):
        write(log.a.broker, 1, 3)
    eventually(lambda: log.a.broker.failure is not None)
    write(log.wait_live(log.b), 1, 4)
    assert numbers(read_all(log.b.broker, T))[:3] == [0, 1, 2]


def test_row_21_a_slow_backup_delays_appends_and_joins_again(start: Start) -> None:
    log = start()
    for proxy in (log.a.link, log.b.link):
        proxy.held = {"up", "down"}
    began = time.monotonic()
    wait_all(append_all(log.a, 100, size=32 * 1024))
    assert time.monotonic() - began < 30
    assert log.record().in_sync == (log.a.store,)
    for proxy in (log.a.link, log.b.link):
        proxy.heal()
    log.wait_in_sync()
    assert numbers(log.equal()) == [*range(100)]


def test_row_23_a_backup_joins_while_it_is_written_and_has_everything(start: Start) -> None:
    log = start(log={"segment_bytes": 5_000})
    log.b.close()
    log.b.wipe()
    for number in range(5):
        write(log.a.broker, 10, 10 * number)
        log.a.broker.roll(T)
    log.b.open()
    written = 50
    while not log.in_sync():
        write(log.a.broker, 10, written)
        written += 10
    write(log.a.broker, 10, written)
    log.a.crash()
    assert numbers(read_all(log.wait_live(log.b), T)) == [*range(written + 10)]


def test_row_24_a_reader_continues_on_the_other_machine_with_exactly_the_rest(start: Start) -> None:
    log = start()
    log.b.close()
    write(log.a.broker, 40)
    half = read_all(log.a.broker, T)[:20]
    log.b.open()
    log.wait_in_sync()
    log.a.crash()
    rest = read_all(log.wait_live(log.b), T, half[-1].position, inclusive=False)
    assert numbers(half) + numbers(rest) == [*range(40)]


def test_row_25_failover_work_and_failback_keep_everything(start: Start) -> None:
    log = start()
    write(log.a.broker, 10)
    log.a.crash()
    write(log.wait_live(log.b), 10, 10)
    log.a.open()
    log.wait_in_sync()
    assert not log.a.broker.live
    switched(log.b)
    write(log.wait_live(log.a), 10, 20)
    assert numbers(log.equal()) == [*range(30)]
    assert (log.a.broker.status()["role"], log.b.broker.status()["role"]) == ("live", "backup")
    assert [*log.a.directory.glob("aside-*")] == []


def test_row_26_deletes_are_replicated(start: Start) -> None:
    log = start()
    own = f"{OWN_PREFIX}keys"
    log.a.broker.create_topic(own)
    with log.a.broker.writer(own) as writer:
        for key in (b"a", b"b", b"c"):
            writer.append(Batch.of([Message(key, b"1")])).result(WAIT_SECONDS)
        writer.append(Batch.of([Message(b"a", None), Message(b"c", None)])).result(WAIT_SECONDS)
    log.a.broker.compact(own)
    assert [each.message.key for each in log.equal(own)] == [b"b"] or len(log.equal(own)) == 5
    assert [each.message.key for each in read_all(log.b.broker, own, compacted=True)] == [b"b"]
    eventually(lambda: log.b.segments() == log.a.segments())


def test_row_27_topics_that_are_deleted_during_a_copy_are_gone_on_both(start: Start) -> None:
    log = start()
    topics = [f"t{number}" for number in range(10)]
    log.a.broker.create_topics(topics)
    for topic in topics:
        write(log.a.broker, 2, topic=topic, size=100_000)
    log.b.close()
    log.b.wipe()
    log.a.link.rate = log.b.link.rate = 1_000_000
    log.b.open()
    eventually(lambda: log.b.broker.status()["partial"])
    for topic in topics[::2]:
        log.a.broker.delete_topic(topic)
    log.wait_in_sync()
    assert log.a.broker.topics() == sorted([T, *topics[1::2]])
    eventually(lambda: log.b.broker.topics() == log.a.broker.topics())
    eventually(lambda: log.b.segments() == log.a.segments())


def test_row_29_a_backup_that_starts_and_stops_never_fails_the_live(start: Start) -> None:
    log = start()
    write(log.a.broker, 20, size=50_000)
    stopping = threading.Event()

    def work() -> int:
        number = 20
        while not stopping.is_set():
            write(log.a.broker, 1, number)
            number += 1
        return number

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(work)
        for turn in range(5):
            log.b.close()
            if turn % 2:
                log.b.wipe()
            log.b.open()
            if turn % 2:
                time.sleep(0.1)  # within the copy, or after it
            else:
                log.wait_in_sync()
        log.wait_in_sync()
        stopping.set()
        count = written.result(WAIT_SECONDS)
    assert numbers(log.equal()) == [*range(count)]


def test_row_31_a_live_continues_alone_only_with_the_leave_of_the_lock(start: Start) -> None:
    log = start(lease_seconds=8.0)
    log.a.lock.cut()
    for proxy in (log.a.link, log.b.link):
        proxy.cut()
    future = log.a.broker.writer(T).append(message(0, 0))  # to close the writer would wait for it
    assert unchanged(future.done, 8.0 / 5 + 0.5)
    assert not future.done()
    log.a.lock.heal()
    future.result(WAIT_SECONDS)
    assert log.record().in_sync == (log.a.store,)


def test_row_32_a_frozen_link_makes_no_second_live(start: Start) -> None:
    log = start()
    before = log.a.broker.status()["epoch"]
    for proxy in (log.a.link, log.b.link):
        proxy.held = {"up", "down"}
    assert unchanged(lambda: (log.a.broker.live, log.b.broker.live), LEASE)
    assert log.a.broker.live
    write(log.a.broker, 3)
    for proxy in (log.a.link, log.b.link):
        proxy.heal()
    log.wait_in_sync()
    assert log.a.broker.status()["epoch"] == before
    assert numbers(log.equal()) == [*range(3)]


def test_row_33_each_change_of_the_live_begins_the_next_epoch(start: Start) -> None:
    log = start()
    first = log.a.broker.status()["epoch"]
    log.a.crash()
    assert log.wait_live(log.b).status()["epoch"] == first + 1
    log.a.open()
    log.wait_in_sync()
    switched(log.b)
    assert log.wait_live(log.a).status()["epoch"] == first + 2


def test_row_34_a_live_that_loses_the_lock_serves_no_more(start: Start) -> None:
    log = start()
    log.b.close()
    write(log.a.broker, 3)
    log.a.lock.cut()
    eventually(lambda: not log.a.broker.live)
    with pytest.raises(NotLive):
        log.a.broker.writer(T)
    assert numbers(read_all(log.a.broker, T)) == [*range(3)]
    log.a.lock.heal()
    write(log.wait_live(log.a), 1, 3)


def test_row_35_a_store_keeps_its_name_without_the_lock(start: Start) -> None:
    log = start()
    stores = log.a.store, log.b.store
    for member in (log.a, log.b):
        member.lock.cut()
        eventually(lambda: not log.a.broker.live)
        member.close()
        member.open()
        member.lock.heal()
    eventually(lambda: log.a.broker.live or log.b.broker.live)
    assert (log.a.store, log.b.store) == stores
    log.wait_in_sync()


def test_row_39_a_store_whose_copy_was_interrupted_never_serves(start: Start) -> None:
    log = start()
    with log.a.broker.writer(T) as writer:
        writer.append(Batch.of([Message(b"k", b"%d" % number) for number in range(50_000)])).result(WAIT_SECONDS)
    write(log.a.broker, 20, 50_000, size=100_000)
    log.b.close()
    log.b.wipe()
    log.a.link.rate = log.b.link.rate = 1_000_000
    log.b.open()
    eventually(lambda: log.b.broker.status()["partial"])
    log.a.crash()
    assert unchanged(lambda: log.b.broker.live, 3.0)
    assert not log.b.broker.live
    log.a.open()
    log.wait_live(log.a)
    log.wait_in_sync()
    assert numbers(log.equal()) == [*range(50_020)]
