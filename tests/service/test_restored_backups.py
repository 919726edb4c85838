"""An embedded log restored from a backup, seen by all that have read what came after the backup."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from commands import txnbuf
from restored_logs import back_up, grow, put_back, relay
from service_process import ServiceProcess, kept_port
from streamed import Follower, write

from broker_io import open_broker
from broker_io.memory import MemoryBroker
from broker_io.position import LEDGERS_OF_A_HISTORY
from txnbuffer import connect
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.history import History
from txnbuffer.errors import AlreadyCommitted, LogRestored, RelayBranched, UnknownTransaction


def history(log: Path) -> History:
    with open_broker(f"file:{log}", read_only=True) as broker, broker.reader(DECISIONS) as reader:
        found = History()
        while (batch := reader.read()) is not None:
            for row in batch:
                found.apply(row.message)
        return found


@pytest.mark.parametrize("new", [1, 40])
async def test_a_stream_is_rolled_back_to_the_backup(tmp_path: Path, new: int) -> None:
    log, file = tmp_path / "log", tmp_path / "file"
    await grow(log, range(5), "old")
    back_up(log, file)
    await grow(log, range(5, 9), "lost")
    async with connect(f"file:{log}") as client:
        follower = Follower(client.stream("t"))
        await follower.until(9)
    token = follower.stream.token
    put_back(file, log)
    await grow(log, range(5, 5 + new), "new")
    async with connect(f"file:{log}") as client:
        follower.stream = client.stream("t", from_=token)
        await follower.until(5 + new)
        fresh = Follower(client.stream("t", to="now"))
        await fresh.to_end()
    assert follower.rollbacks == [5]
    assert follower.table == fresh.table


async def test_a_stream_of_what_the_backup_has_continues(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "file"
    await grow(log, range(5), "old")
    async with connect(f"file:{log}") as client:
        follower = Follower(client.stream("t"))
        await follower.until(5)
    token = follower.stream.token
    back_up(log, file)
    put_back(file, log)
    await grow(log, range(5, 8), "new")
    async with connect(f"file:{log}") as client:
        follower.stream = client.stream("t", from_=token)
        await follower.until(8)
    assert follower.rollbacks == []


async def test_a_client_is_refused_and_no_epoch_comes_back(tmp_path: Path) -> None:
    """The same backup is restored twice: the second time, the client has seen an owner of the first restored log."""
    log, file, port = tmp_path / "log", tmp_path / "file", kept_port()
    await grow(log, range(5), "old")
    back_up(log, file)
    epochs = [history(log).epoch]
    service = ServiceProcess(log, port=port).wait_serving()
    try:
        for _ in range(2):
            async with connect(f"txnbuf://127.0.0.1:{port}") as client:
                await write(client, "t", {"a": "lost"})
                epochs.append(history(log).epoch)
                service.kill()
                put_back(file, log)
                service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
                with pytest.raises(LogRestored, match="it never had epoch"):
                    await write(client, "t", {"a": "new"})
        epochs.append(history(log).epoch)
    finally:
        service.kill()
    assert epochs[1] == epochs[0] + 1
    assert all(epoch >= LEDGERS_OF_A_HISTORY for epoch in epochs[2:])
    assert len({*epochs}) == 4


async def test_a_client_of_the_service_that_wrote_the_backup_is_refused(tmp_path: Path) -> None:
    """The backup has the owner that the client was connected to, but not all that it wrote."""
    log, file, port = tmp_path / "log", tmp_path / "file", kept_port()
    address = f"txnbuf://127.0.0.1:{port}"
    service = ServiceProcess(log, port=port).wait_serving()
    try:
        async with connect(address) as client:
            await write(client, "t", {"a": "kept"})
            done = await asyncio.to_thread(txnbuf, "backup", address, str(file))
            assert done.returncode == 0, done.stderr
            await write(client, "t", {"a": "lost"})
            service.kill()
            put_back(file, log)
            service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
            with pytest.raises(LogRestored, match="it lacks the end of epoch"):
                await write(client, "t", {"a": "new"})
        async with connect(address) as client:
            await write(client, "t", {"a": "new"})
            service.kill()
            service = await asyncio.to_thread(ServiceProcess(log, port=port).wait_serving)
            await write(client, "t", {"a": "newer"})
    finally:
        service.kill()


async def test_a_relay_of_a_restored_log_is_refused(tmp_path: Path) -> None:
    log, file, far = tmp_path / "log", tmp_path / "file", MemoryBroker()
    await grow(log, range(5), "old")
    back_up(log, file)
    await grow(log, range(5, 9), "lost")
    assert relay(log, far).run(follow=False).seqno == 9
    put_back(file, log)
    await grow(log, range(5, 20), "new")
    with pytest.raises(RelayBranched, match="branched after"):
        relay(log, far).run(follow=False)


async def test_no_transaction_id_comes_back(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "file"
    await grow(log, range(5), "old")
    back_up(log, file)
    async with connect(f"file:{log}") as client:
        lost = {await write(client, "t", {"a": "lost"}) for _ in range(5)}
    used = set(lost)
    for _ in range(2):
        put_back(file, log)
        async with connect(f"file:{log}") as client:
            new = {await write(client, "t", {"a": "new"}) for _ in range(5)}
            assert not new & used
            used |= new
            for txn in lost:
                with pytest.raises(UnknownTransaction):
                    await client.outcome(txn)


async def test_a_backup_from_before_the_first_owner(tmp_path: Path) -> None:
    """As after a forced promotion that drops all owners: no id comes back, and streams are rolled back."""
    log, file = tmp_path / "log", tmp_path / "file"
    open_broker(f"file:{log}").close()
    back_up(log, file)
    async with connect(f"file:{log}") as client:
        lost = {await write(client, "t", {"a": f"lost-{number}"}) for number in range(5)}
        follower = Follower(client.stream("t"))
        await follower.until(5)
    token = follower.stream.token
    for _ in range(2):
        put_back(file, log)
        async with connect(f"file:{log}") as client:
            used = {await write(client, "t", {"a": f"new-{number}"}) for number in range(6)}
            for txn in lost:
                with pytest.raises(UnknownTransaction, match="or a promotion of a pair forced"):
                    await client.outcome(txn)
            follower.stream = client.stream("t", from_=token)
            await follower.until(6)
            token = follower.stream.token
        assert not used & lost
        lost |= used
    assert follower.rollbacks == [0, 0]
    assert follower.table == {b"a": b"new-5"}


def test_groups_and_named_producers_continue_where_the_backup_has_them(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "file"

    def load(*numbers: int, name: str) -> None:
        for number in numbers:
            with client.transaction(name="loader", number=number) as txn:
                txn.send("t", f"{name}-{number}")

    def consumed() -> list[str]:
        found: list[str] = []
        client.process("t", "readers", lambda txn, record: found.append(record.value.decode()), idle_timeout=0.2)
        return found

    with connect(f"file:{log}") as client:
        load(1, 2, name="old")
        assert consumed() == ["old-1", "old-2"]
        load(3, name="old")
    back_up(log, file)
    with connect(f"file:{log}") as client:
        load(4, 5, name="lost")
        assert consumed() == ["old-3", "lost-4", "lost-5"]
    put_back(file, log)
    with connect(f"file:{log}") as client:
        with pytest.raises(AlreadyCommitted):
            load(3, name="again")
        load(4, name="new")
        assert consumed() == ["old-3", "new-4"]
    with connect(f"file:{log}") as client:
        assert consumed() == []


def test_a_restored_log_is_sound_and_is_compacted(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "file"

    def send(numbers: range, *topics: str) -> None:
        for number in numbers:
            with client.transaction() as txn:
                for topic in topics:
                    txn.send(topic, f"v{number}", key=f"k{number % 4}")
                txn.commit(wait_visible=True)  # no marker is left for the next owner

    with connect(f"file:{log}") as client:
        send(range(30), "t", "u")
    assert txnbuf("compact", f"file:{log}", "t").returncode == 0
    with open_broker(f"file:{log}") as broker:
        assert not broker.ledgers("t")[-1].entries, "the open ledger is empty"
    back_up(log, file)
    put_back(file, log)
    assert txnbuf("verify", f"file:{log}").returncode == 0
    for new in (range(0), range(30, 33), range(33, 40)):
        with connect(f"file:{log}") as client:
            send(new, "t")
        for topic in "tu":
            done = txnbuf("compact", f"file:{log}", topic)
            assert done.returncode == 0, done.stderr
        assert txnbuf("verify", f"file:{log}").returncode == 0
    shown = txnbuf("tail", f"file:{log}", "t").stdout.splitlines()
    assert [line.split("\t")[-1] for line in shown] == ["v36", "v37", "v38", "v39"]
