"""Streams of topics whose history branches: a log that is restored from a copy or repaired, and then continues."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from commands import txnbuf
from service_process import ServiceProcess, kept_port
from service_setup import engine_on
from streamed import Follower, client_of, write
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.memory import MemoryBroker
from txnbuffer import connect
from txnbuffer.errors import LogRestored
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.streams.failover import Version


def recover(directory: Path, topic: str) -> None:
    done = txnbuf("recover", f"file:{directory}", topic, "--write")
    assert done.returncode == 0, done.stderr


async def test_a_log_that_was_set_back_rolls_its_streams_back_to_where_it_ends(tmp_path: Path) -> None:
    log, backup, port = tmp_path / "log", tmp_path / "backup", kept_port()
    async with connect(f"file:{log}") as client:
        for number in range(5):
            await write(client, "t", {f"k{number % 3}": f"old-{number}"})
    shutil.copytree(log, backup)
    service = ServiceProcess(log, port=port).wait_serving()
    try:
        async with connect(f"txnbuf://127.0.0.1:{port}") as client:
            follower = Follower(client.stream("t"))
            await follower.until(5)
            for number in range(5, 9):
                await write(client, "t", {f"k{number % 3}": f"lost-{number}", f"lost-{number}": "x"})
            await follower.until(13)
            service.kill()
            shutil.rmtree(log)
            shutil.copytree(backup, log)
            await asyncio.to_thread(recover, log, "t")
            service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
            with pytest.raises(LogRestored):
                await write(client, "t", {"k0": "refused"})
        async with connect(f"txnbuf://127.0.0.1:{port}") as client:
            follower.stream = client.stream("t", from_=follower.stream.token)
            for number in range(10):
                await write(client, "t", {f"k{number % 4}": f"new-{number}"})
            await follower.until(15)
            assert follower.rollbacks == [5]
            fresh = Follower(client.stream("t", to="now"))
            await fresh.to_end()
            assert follower.table == fresh.table
            assert fresh.table == {b"k0": b"new-8", b"k1": b"new-9", b"k2": b"new-6", b"k3": b"new-7"}
            assert fresh.stream.token is not None
            assert [version.seqno for version in fresh.stream.token.versions] == [5, 0]
    finally:
        service.kill()


def owner(broker: MemoryBroker) -> LogOwner:
    manager = LogOwner(broker)
    manager.recover()
    return manager


def written(ledger_entries: int = 1000) -> tuple[MemoryBroker, LogOwner, TopicWriter]:
    """Seven records in four ledgers, all in the snapshot, with a cursor at the sixth."""
    broker = MemoryBroker(ledger_entries=ledger_entries)
    log, manager = TopicWriter(broker, "t"), owner(broker)
    manager.register("t")
    for txn in range(1, 8):
        log.records(txn, f"v{txn}")
        log.commit(txn)
    manager.pump()
    manager.followed("t").cursors = {"cache": 6, "slow": 1}
    manager.snapshot("t")
    return broker, manager, log


def versions(manager: LogOwner) -> tuple[Version, ...]:
    return manager.followed("t").failover.versions


def test_a_rebuilt_topic_continues_with_its_history() -> None:
    _, manager, log = written()
    before = versions(manager)
    manager.rebuild("t")
    assert versions(manager)[1:] == before
    assert versions(manager)[0].seqno == 7
    assert manager.followed("t").cursors == {"cache": 6, "slow": 1}
    log.records(9, "more")
    log.commit(9)
    manager.pump()
    assert manager.followed("t").numbered.next_seqno == 9


def test_where_a_ledger_is_missing_in_the_middle_history_branches_before_it() -> None:
    broker, manager, _ = written(ledger_entries=4)  # two records and their markers in each
    manager.close()
    ledgers = broker.log.topic("t").ledgers
    del ledgers[2]
    again = owner(broker)
    again.rebuild("t")
    assert [version.seqno for version in versions(again)] == [4, 0]
    assert again.followed("t").cursors == {"cache": 4, "slow": 1}
    assert again.followed("t").numbered.next_seqno == 6


def test_a_log_that_was_cut_branches_where_it_ends() -> None:
    broker, manager, _ = written(ledger_entries=4)
    manager.close()
    topic = broker.log.topic("t")
    del topic.ledgers[2:]
    topic.last = topic.ledgers[-1].batches[-1].positions.last
    topic.roll()
    again = owner(broker)
    again.rebuild("t")
    assert [version.seqno for version in versions(again)] == [4, 0]


def test_a_log_that_has_lost_its_beginning_is_another_history() -> None:
    broker, manager, _ = written(ledger_entries=4)
    before = versions(manager)
    manager.close()
    broker.trim("t", broker.ledgers("t")[1].ledger)
    again = owner(broker)
    again.rebuild("t")
    (only,) = versions(again)
    assert only.seqno == 0
    assert only.uuid != before[0].uuid
    assert again.followed("t").cursors == {}


@pytest.mark.parametrize("seqno", [3, 7])
async def test_streams_of_a_rebuilt_topic_that_lost_nothing_just_continue(seqno: int) -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        for number in range(seqno):
            await write(client, "t", {str(number): "x"})
        reader = Follower(client.stream("t"))
        await reader.until(seqno)
        token = reader.stream.token
    with LogOwner(broker) as manager:
        manager.recover()
        manager.rebuild("t")
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"more": "y"})
        again = Follower(client.stream("t", from_=token))
        again.table = dict(reader.table)
        await again.until(seqno + 1)
        assert (again.rollbacks, again.seqnos) == ([], [seqno + 1])
        assert await ServiceAdmin(engine).methods()["Cursors"]({}) == []
