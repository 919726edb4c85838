"""A forced promotion on two processes: what clients, streams, groups and named producers see of what it drops."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from commands import txnbuf
from pair_machines import Machine, PairOfMachines
from reading import read_values
from stress.processes import wait_until

from txnbuffer import CommittedReader, Outcome, Record, Rollback, SyncClient, SyncTransaction, connect
from txnbuffer.errors import LogRestored, UnknownTransaction
from txnbuffer.model import TxnId
from txnbuffer.streams.failover import ResumeToken

KEPT, LOST, NEW = range(1, 6), range(6, 11), range(6, 9)
PATIENCE = 120.0


def load(client: SyncClient, numbers: Iterable[int], name: str) -> list[TxnId]:
    """Commit numbers of a named producer; the ids of the transactions."""
    ids = []
    for number in numbers:
        with client.transaction(name="loader", number=number) as txn:
            txn.send("a", f"{name}-{number}")
            ids.append(txn.id)
    return ids


def copied(client: SyncClient) -> list[str]:
    """What a consumer group handles that copies a topic."""
    found = []

    def copy(txn: SyncTransaction, record: Record) -> None:
        txn.send("b", record.value)
        found.append((record.value or b"").decode())

    client.process("a", "copies", copy, idle_timeout=1.0)
    return found


def texts(numbers: Iterable[int], name: str) -> list[str]:
    return [f"{name}-{number}" for number in numbers]


class Table:
    """The values of a topic by seqno, as its change stream shows them."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.rollbacks: list[int] = []
        self.token: ResumeToken | str = "beginning"

    def follow(self, client: SyncClient, seqno: int) -> None:
        """Continue at the token, up to a seqno, with what is new."""
        with client.stream("a", from_=self.token) as stream:
            while len(self.values) != seqno:
                item = stream.next(timeout=PATIENCE)
                assert item is not None
                if isinstance(item, Rollback):
                    self.rollbacks.append(item.seqno)
                    del self.values[item.seqno :]
                else:
                    self.values += [(change.value or b"").decode() for change in item]
                self.token = item.token


def read(client: SyncClient, topic: str, count: int) -> list[str]:
    return [(value or b"").decode() for value in read_values(client, topic, count)]


def take(reader: CommittedReader, count: int) -> list[str]:
    """The next records of a reader."""
    found: list[str] = []
    while len(found) < count:
        batch = reader.read(timeout=PATIENCE)
        assert batch is not None
        found += [(record.value or b"").decode() for record in batch]
    return found


def force(machine: Machine) -> None:
    done = txnbuf("replication", "promote", "--force", f"txnbuf://{machine.address.address}")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: machine.serves, "the promoted machine does not serve")


@pytest.mark.timeout(600)
def test_what_a_forced_promotion_drops_is_gone_for_all_and_nothing_else(tmp_path: Path) -> None:
    pair, table = PairOfMachines(tmp_path), Table()
    try:
        wait_until(pair.in_sync, "the machines are not in sync")
        live = pair.live()
        backup = pair.other(live)
        with connect(pair.address, max_unavailable=PATIENCE) as client:
            kept = load(client, KEPT, "kept")
            assert copied(client) == texts(KEPT, "kept")
            table.follow(client, 5)
            for machine in pair.machines:
                machine.link.cut()
            wait_until(lambda: len(pair.record().in_sync) == 1, "the primary waits for its backup")
            lost = load(client, LOST, "lost")
            with connect(pair.address, max_unavailable=PATIENCE) as other:  # its ids are leased in the lost part
                with other.transaction() as txn:
                    txn.send("c", "lost")
                unknown = txn.id
            assert copied(client) == texts(LOST, "lost")
            table.follow(client, 10)
            reader = client.reader("a")
            shown = take(reader, 10)
            assert shown == texts(KEPT, "kept") + texts(LOST, "lost")
            live.kill()
            force(backup)
            with reader, pytest.raises(LogRestored, match="topic 'a' lacks messages before"):
                reader.read(timeout=PATIENCE)
            with pytest.raises(
                LogRestored, match=r"a forced promotion of a pair has cut it: it lacks the end of epoch"
            ):
                load(client, (11,), "old")
        with connect(pair.address, max_unavailable=PATIENCE) as client:
            check_new_history(client, table, kept, lost, unknown)
        for machine in pair.machines:
            machine.link.heal()
        live.service.finish()
        live.start()
        wait_until(pair.in_sync, "the former primary does not join")
        assert [*live.log.glob("aside-*")]
        backup.kill()
        wait_until(lambda: live.serves, "the former primary does not take over")
        with connect(pair.address, max_unavailable=PATIENCE) as client:
            expected = texts(KEPT, "kept") + texts(NEW, "new")
            assert read(client, "b", len(expected)) == expected
            assert client.committed_number("loader") == NEW[-1]
    finally:
        pair.close()


def check_new_history(client: SyncClient, table: Table, kept: list[TxnId], lost: list[TxnId], unknown: TxnId) -> None:
    """The first five numbers are there; the lost ones are written again."""
    assert client.committed_number("loader") == KEPT[-1]
    new = load(client, NEW, "new")
    assert not {*new} & {*kept, *lost, unknown}
    assert [client.outcome(txn) for txn in (*kept, *new)] == [Outcome.COMMIT] * (len(kept) + len(new))
    with pytest.raises(UnknownTransaction, match="or a promotion of a pair forced, the records"):
        client.outcome(unknown)
    assert copied(client) == texts(NEW, "new")
    table.follow(client, 5 + len(NEW))
    assert table.rollbacks == [5]
    assert table.values == texts(KEPT, "kept") + texts(NEW, "new")
    assert read(client, "a", len(table.values)) == table.values
    for txn in lost:  # leased before the cut: they are open until their session times out
        wait_until(lambda txn=txn: client.outcome(txn) is not None, f"{txn} is open", PATIENCE)
        assert client.outcome(txn) is Outcome.ABORT
