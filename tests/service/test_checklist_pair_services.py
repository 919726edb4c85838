"""Behaviours of replicated services, by the rows of tests/replication/CHECKLIST.md, on two processes and an etcd."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair_machines import LEASE, Machine, PairOfMachines
from pair_soak import soak
from soak_check import TOPICS, values
from stress.processes import Children, Writers, wait_until

from broker_io import open_broker
from txnbuffer import SyncClient, connect


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairOfMachines]:
    running = PairOfMachines(tmp_path_factory.mktemp("pair"))
    yield running
    running.close()


@pytest.fixture
def client(pair: PairOfMachines) -> Iterator[SyncClient]:
    in_sync(pair)
    with connect(pair.address, max_unavailable=120.0) as connected:
        yield connected


def in_sync(pair: PairOfMachines) -> Machine:
    """Start what has ended, and wait until both have everything; the primary."""
    for machine in pair.machines:
        if machine.service.process.poll() is not None:
            machine.service.finish()
            machine.start()
    wait_until(pair.in_sync, "the machines are not in sync")
    return pair.live()


def read(machine: Machine, topic: str, isolation: str = "read_committed") -> list[bytes]:
    """What the directory of a machine has."""
    with open_broker(f"file:{machine.log}", read_only=True) as broker:
        return list(values(broker, topic, isolation)) if topic in broker.topics() else []


@pytest.mark.usefixtures("early_sends")
def test_row_03_transactions_leave_the_same_on_both(pair: PairOfMachines, client: SyncClient) -> None:
    for number in range(30):
        txn = client.transaction().begin()
        txn.send("rows", b"%d" % number)
        if number % 3 == 0:
            txn.commit()
        elif number % 3 == 1:
            txn.abort()
    wanted = [b"%d" % number for number in range(0, 30, 3)]
    live = pair.live()
    for machine in (live, pair.other(live)):
        wait_until(lambda machine=machine: len(read(machine, "rows", "read_uncommitted")) == 30, "records are missing")
    assert read(live, "rows", "read_uncommitted") == read(pair.other(live), "rows", "read_uncommitted")
    live.kill()
    assert pair.live() is pair.other(live)
    with client.reader("rows") as reader:
        found = [record.value for record in reader.read(timeout=60.0) or ()]
    assert found == wanted[: len(found)]


def test_row_04_what_is_read_again_comes_in_the_same_order(pair: PairOfMachines, client: SyncClient) -> None:
    for number in range(50):
        client.send("again", b"%d" % number)
    first = read_through(client, "again", 50)
    in_sync(pair).kill()
    assert read_through(client, "again", 50) == first
    assert [value for _, value in first] == [b"%d" % number for number in range(50)]


def read_through(client: SyncClient, topic: str, count: int) -> list[tuple[object, bytes | None]]:
    """Positions and values of so many records of a reader of the client."""
    found: list[tuple[object, bytes | None]] = []
    with client.reader(topic) as reader:
        until = time.monotonic() + 120
        while len(found) < count:
            assert time.monotonic() < until, f"{len(found)} of {count} records are read"
            found += [(record.position, record.value) for record in reader.read(timeout=60.0) or ()]
    return found


def test_row_05_a_client_keeps_its_order_over_a_failover(pair: PairOfMachines, client: SyncClient) -> None:
    for number in range(60):
        if number == 20:
            in_sync(pair).kill()
        with client.transaction() as txn:
            txn.send("order", b"%d" % number)
    assert [value for _, value in read_through(client, "order", 60)] == [b"%d" % number for number in range(60)]


def test_row_28_a_copy_that_begins_within_a_transaction(pair: PairOfMachines, client: SyncClient) -> None:
    live = in_sync(pair)
    backup = pair.other(live)
    with client.transaction(timeout=300.0) as txn:
        txn.send("open", b"before")
        backup.kill()
        backup.delete()
        in_sync(pair)
        txn.send("open", b"after")
        live.kill()
    assert [value for _, value in read_through(client, "open", 2)] == [b"before", b"after"]


def test_row_36_a_live_that_was_paused_serves_no_more(pair: PairOfMachines, client: SyncClient) -> None:
    live = in_sync(pair)
    client.send("paused", b"0")
    live.signal(signal.SIGSTOP)
    time.sleep(LEASE + 0.5)
    other = pair.live()
    assert other is not live
    client.send("paused", b"1")
    live.signal(signal.SIGCONT)
    for _ in range(20):
        assert not live.serves
        time.sleep(0.05)
    client.send("paused", b"2")
    assert in_sync(pair) is other
    assert [value for _, value in read_through(client, "paused", 3)] == [b"0", b"1", b"2"]


def test_row_37_a_kill_among_many_transactions(pair: PairOfMachines, tmp_path: Path) -> None:
    in_sync(pair)
    children = Children()
    try:
        writers = Writers(children, tmp_path, pair.address, 2)
        writers.wait_for_commits(100)
        pair.live().kill()
        writers.wait_for_commits(100)
        writers.stop()
    finally:
        children.close()
    live = in_sync(pair)
    with open_broker(f"file:{live.log}", read_only=True) as broker:
        assert set(TOPICS) <= set(broker.topics())
        found = writers.judge(broker)
    assert found.good
    assert found.committed >= 200


def test_soak_of_a_pair(tmp_path: Path) -> None:
    report = soak(tmp_path, faults=1, seed=1, writers=1, mount=False)
    assert report.good, report
    assert report.committed > 0
