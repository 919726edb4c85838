"""Readers that stay open while the log of their service is restored from a backup."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from commands import txnbuf
from restored_logs import put_back
from service_process import ServiceProcess, kept_port
from stress.processes import wait_until

from broker_io import open_broker
from broker_io.memory import MemoryBroker
from txnbuffer import CommittedReader, Record, SyncClient, SyncTransaction, connect
from txnbuffer.errors import LogRestored, RelayBranched
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget

PATIENCE = 120.0


class Restored:
    """A service whose log is restored from a backup at the same address."""

    def __init__(self, directory: Path) -> None:
        self.log, self.file, self.port = directory / "log", directory / "file", kept_port()
        self.address = f"txnbuf://127.0.0.1:{self.port}"
        self.service = ServiceProcess(self.log, port=self.port).wait_serving()

    def back_up(self) -> None:
        done = txnbuf("backup", self.address, str(self.file))
        assert done.returncode == 0, done.stderr

    def put_back(self) -> None:
        """Restore the log and write what a reader could take for the next records of the lost one."""
        self.service.kill()
        put_back(self.file, self.log)
        self.service = ServiceProcess(self.log, port=self.port).wait_serving()
        with connect(self.address, max_unavailable=PATIENCE) as client:
            write(client, "new", 5)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    one = Restored(tmp_path)
    try:
        yield one
    finally:
        one.service.kill()


def write(client: SyncClient, name: str, count: int) -> None:
    for number in range(count):
        with client.transaction() as txn:
            txn.send("t", f"{name}-{number}", key=f"k{number}")


def read(reader: CommittedReader, count: int) -> list[str]:
    """The next records of a sync client's reader, or of a reader of a broker."""
    found: list[str] = []
    while len(found) < count:
        batch = reader.read(timeout=PATIENCE)
        assert batch is not None
        found += [(record.value or b"").decode() for record in batch]
    return found


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("open_transaction", [False, True])
def test_no_reader_of_the_lost_log_shows_a_record_of_the_new_one(
    restored: Restored, isolation: str, open_transaction: bool
) -> None:
    """A raw reader of the broker, a reader of a client, and one of a broker with transactions, as `txnbuf tail` has."""
    with (
        connect(restored.address, max_unavailable=PATIENCE) as client,
        open_broker(restored.address, max_unavailable=PATIENCE) as broker,
    ):
        write(client, "kept", 1)
        restored.back_up()
        write(client, "lost", 2)
        with (
            client.reader("t", isolation=isolation) as reader,
            CommittedReader(broker, "t", isolation=isolation) as tail,
            broker.reader("t") as raw,
        ):
            for one in (reader, tail):
                assert read(one, 3) == ["kept-0", "lost-0", "lost-1"]
            values: list[bytes | None] = []
            if open_transaction:
                lasting = client.transaction()
                lasting.begin()
                lasting.send("t", "open")
            while (b"open" if open_transaction else b"lost-1") not in values:
                batch = raw.read(timeout=PATIENCE)
                assert batch is not None
                values += [row.message.value for row in batch]
            for one in (reader, tail):
                while one.read(timeout=0.5) is not None:
                    pass
            restored.put_back()
            for _ in range(2):
                with pytest.raises(LogRestored, match="open a new reader"):
                    reader.read(timeout=PATIENCE)
                with pytest.raises(LogRestored, match="open a new reader"):
                    tail.read(timeout=PATIENCE)
                with pytest.raises(LogRestored, match="open a new reader"):
                    raw.read(timeout=PATIENCE)
        with CommittedReader(broker, "t") as fresh:
            assert read(fresh, 6) == ["kept-0", *(f"new-{number}" for number in range(5))]


def test_a_reader_that_has_read_only_what_the_backup_has_continues(restored: Restored) -> None:
    with connect(restored.address, max_unavailable=PATIENCE) as client:
        write(client, "kept", 3)
    with open_broker(restored.address, max_unavailable=PATIENCE) as broker, CommittedReader(broker, "t") as reader:
        assert read(reader, 3) == ["kept-0", "kept-1", "kept-2"]
        assert reader.read(timeout=1.0) is None
        restored.back_up()
        restored.put_back()
        found: list[Record] = []
        while len(found) < 5:
            found += reader.read(timeout=PATIENCE) or ()
        assert [record.seqno for record in found] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("resend", [False, True])
def test_a_relay_that_runs_meanwhile_follows_its_own_rules(restored: Restored, resend: bool) -> None:
    """It is refused as one that starts later, or appends the new history from the branch on."""
    with connect(restored.address, max_unavailable=PATIENCE) as client:
        write(client, "kept", 1)
        restored.back_up()
        write(client, "lost", 2)
    far, stopping, outcome = MemoryBroker(), threading.Event(), Future[object]()
    source = partial(open_broker, restored.address, max_unavailable=PATIENCE)
    relay = Relay(source, "t", OwnedTarget(far.connect, "clean"), resend=resend, max_unavailable=PATIENCE)

    def run() -> None:
        try:
            outcome.set_result(relay.run(stop=stopping.is_set))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    wait_until(lambda: relay.progress.records == 3, "the relay copies nothing", PATIENCE)
    restored.put_back()
    if resend:
        wait_until(lambda: relay.progress.records == 8, "the relay does not continue", PATIENCE)
        stopping.set()
        outcome.result(PATIENCE)
    else:
        with pytest.raises(RelayBranched, match="branched after"):
            outcome.result(PATIENCE)


def test_a_group_that_handles_records_is_told_before_it_handles_one_of_the_new_log(restored: Restored) -> None:
    handled: list[str] = []
    ready = threading.Event()

    def handle(txn: SyncTransaction, record: Record) -> None:
        del txn
        handled.append((record.value or b"").decode())
        if len(handled) == 3:
            ready.set()

    failed: list[BaseException] = []

    def process() -> None:
        try:
            with connect(restored.address, max_unavailable=PATIENCE) as client:
                client.process("t", "group", handle)
        except BaseException as error:
            failed.append(error)

    with connect(restored.address, max_unavailable=PATIENCE) as client:
        write(client, "kept", 1)
        restored.back_up()
        write(client, "lost", 2)
    thread = threading.Thread(target=process, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    restored.put_back()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [type(error) for error in failed] == [LogRestored]
    assert handled == ["kept-0", "lost-0", "lost-1"]
