"""The client without asyncio, on an embedded log and on a service in another process; forks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import read_values

from broker_io.errors import InvalidMessage, Locked, MessageTooLarge
from txnbuffer import (
    AlreadyCommitted,
    Fenced,
    JsonSerializer,
    Outcome,
    ServiceUnavailable,
    StaleGeneration,
    SyncClient,
    TransactionAborted,
    connect,
    dead_letter,
)
from txnbuffer.errors import InvalidRequest
from txnbuffer.testing import ServiceProcess


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncClient]:
    with connect(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def test_transactions(client: SyncClient) -> None:
    with client.transaction() as txn:
        txn.send("orders", "one", key="a", properties={"p": "1"})
        txn.send_many("orders", [b"two", b"three"])
        txn.delete("stock", "k", properties={"p": "2"})
    assert client.outcome(txn.id) is Outcome.COMMIT
    with pytest.raises(ZeroDivisionError), client.transaction() as aborted:
        aborted.send("orders", b"never")
        assert aborted.id
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), client.transaction() as untouched:
        untouched.send("orders", b"never")
        raise ZeroDivisionError
    assert read_values(client, "orders", 3) == [b"one", b"two", b"three"]
    assert read_values(client, "stock", 1) == [None]
    with client.reader("stock") as reader:
        batch = reader.read(timeout=120)
        assert batch is not None
        assert [record.properties for record in batch] == [{"p": "2"}]


def test_a_block_may_end_its_transaction_itself(client: SyncClient) -> None:
    with client.transaction() as txn:
        txn.send("log", b"one")
        txn.commit(wait_visible=True)
        with pytest.raises(InvalidRequest, match="has ended"):
            txn.send("log", b"two")
    with client.transaction() as other:
        assert other.id
        other.send("log", b"never")
        other.abort()
    with client.transaction() as at_once:
        at_once.send("log", b"never")
        at_once.abort()
        at_once.abort()
    with pytest.raises(InvalidRequest, match="has not begun"):
        client.transaction().send("log", b"never")
    assert client.outcome(other.id) is Outcome.ABORT
    assert read_values(client, "log", 1) == [b"one"]


def test_many_records_in_single_sends_keep_their_order(client: SyncClient) -> None:
    count = 3007
    with client.transaction() as txn:
        for index in range(count):
            txn.send("log", b"%d" % index)
    assert read_values(client, "log", count) == [b"%d" % index for index in range(count)]


def test_sync_client_raises_the_errors_of_the_asyncio_client(client: SyncClient) -> None:
    with client.transaction() as txn:
        with pytest.raises(InvalidMessage):
            txn.send("log", 1)
        with pytest.raises(MessageTooLarge):
            txn.send("log", bytes(6_000_000))
        txn.send("log", b"v")
    assert client.committed_number("sink") == 0
    with client.transaction(name="sink", number=1) as named:
        named.send("log", b"w")
    with pytest.raises(AlreadyCommitted), client.transaction(name="sink", number=1):
        raise AssertionError
    client.delete_name("sink")
    with pytest.raises(TransactionAborted), client.transaction(timeout=0.01) as slow:
        slow.send("log", b"never")
        while client.outcome(slow.id) is None:
            time.sleep(0.05)
    assert read_values(client, "log", 2) == [b"v", b"w"]


def test_run_and_ordinary_sends(client: SyncClient) -> None:
    calls = []

    def work(txn: object) -> int:
        calls.append(txn.id)  # type: ignore[attr-defined]  # a SyncTransaction
        txn.send("log", b"in a transaction")  # type: ignore[attr-defined]  # a SyncTransaction
        if len(calls) == 1:
            raise TransactionAborted(calls[0], "once")
        return 7

    assert client.run(work) == 7
    client.send("log", b"ordinary", key="k")
    client.send_many("log", [b"a", b"b"])
    client.delete("log", "k")
    assert read_values(client, "log", 5) == [b"in a transaction", b"ordinary", b"a", b"b", None]


def test_threads_share_a_client(client: SyncClient) -> None:
    def write(name: str) -> None:
        for index in range(20):
            with client.transaction() as txn:
                txn.send("log", f"{name}{index}")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_values(client, "log", 80)) == sorted(
        f"{name}{index}".encode() for name in "abcd" for index in range(20)
    )


def test_handler_runs_in_the_calling_thread(client: SyncClient) -> None:
    client.send_many("source", [b"1", b"x", b"3"])
    threads = set()

    def handle(txn: object, record: object) -> None:
        threads.add(threading.get_ident())
        number = int(record.value)  # type: ignore[attr-defined]  # a Record
        txn.send("target", f"{number * 2}")  # type: ignore[attr-defined]  # a SyncTransaction

    done = client.process("source", "doubling", handle, on_error=dead_letter("bad"), idle_timeout=0.1)
    assert (done.records, done.dead_letters) == (2, 1)
    assert threads == {threading.get_ident()}
    assert read_values(client, "target", 2) == [b"2", b"6"]
    assert read_values(client, "bad", 1) == [b"x"]
    client.send("source", b"y")
    with pytest.raises(ValueError, match="invalid literal"):
        client.process("source", "doubling", handle)


def test_closed_client_rejects_calls(client: SyncClient) -> None:
    client.close()
    with pytest.raises(InvalidRequest, match="was closed"):
        client.send("log", b"v")
    client.close()


def test_file_log_has_one_owner(client: SyncClient, tmp_path: Path) -> None:
    script = f"from txnbuffer import connect\nconnect('file:{tmp_path / 'log'}').open_sync()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert Locked.__name__ in done.stderr
    assert client.outcome  # still ours


FORK = """
import os, sys
from txnbuffer import connect, UsedAfterFork
with connect(sys.argv[1]) as client:
    txn = client.transaction().begin()
    txn.send("log", b"one")
    client.send("read", b"zero")
    reader = client.reader("read")
    child = os.fork()
    if child == 0:
        code = 0
        for call in (
            lambda: client.send("log", b"child"),
            lambda: client.transaction().send("log", b"child"),
            lambda: txn.commit(),
            lambda: txn.abort(),
            lambda: client.transaction().abort(),
            lambda: client.reader("log"),
            lambda: reader.read(timeout=1.0),
            lambda: client.close(),
        ):
            try:
                call()
            except UsedAfterFork as error:
                advice = "start the process with spawn" if "txnbuf:" in sys.argv[2] else "connect after forking"
                code += f"belongs to the parent process: {advice}" in str(error)
        try:
            with connect(sys.argv[2]) as other:
                other.send("log", b"child")
                code += 1
        except UsedAfterFork as error:
            code += "gRPC was used before" in str(error)
        reader.close()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 9, code
    assert [record.value for record in reader.read(timeout=120)] == [b"zero"]
    reader.close()
    txn.commit()
    print(client.outcome(txn.id).name)
"""


@pytest.mark.parametrize("where", ["file", "service"])
def test_use_after_fork_is_an_error(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    address = f"file:{tmp_path / 'forked'}"
    if where == "service":
        service: ServiceProcess = request.getfixturevalue("txnbuf_service")
        address = service.address
    other = address if where == "service" else f"file:{tmp_path / 'of the child'}"
    command = [sys.executable, "-c", FORK, address, other]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout, done.returncode) == ("COMMIT\n", 0), done.stderr


CONNECTING = """
import multiprocessing, os, sys
from broker_io import open_broker
from txnbuffer import connect, UsedAfterFork

def use(address):
    with connect(address) as client:
        client.send("log", b"value")

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def refused(open_):
    try:
        open_()
    except UsedAfterFork as error:
        assert "start the process with spawn or forkserver" in str(error), error
    else:
        raise AssertionError("connected")

def in_process(method):
    process = multiprocessing.get_context(method).Process(target=use, args=(sys.argv[1],))
    process.start()
    process.join()
    assert process.exitcode == 0, method

if __name__ == "__main__":
    in_child(lambda: use(sys.argv[1]))
    if sys.argv[2] == "client":
        use(sys.argv[1])
    else:
        open_broker(sys.argv[1]).close()
    in_child(lambda: refused(lambda: use(sys.argv[1])))
    in_child(lambda: refused(lambda: open_broker(sys.argv[1])))
    in_child(lambda: in_process("spawn"))
    for method in ("spawn", "forkserver"):
        in_process(method)
"""


@pytest.mark.parametrize("parent", ["client", "broker"])
def test_advice_of_the_error_after_a_fork_works(parent: str, tmp_path: Path, txnbuf_service: ServiceProcess) -> None:
    program = tmp_path / "connecting.py"
    program.write_text(CONNECTING)
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", str(program)]
    with connect(txnbuf_service.address) as client:
        client.send("log", b"first")
    done = subprocess.run(
        [*command, txnbuf_service.address, parent], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


LEAVING = """
import os, sys
from txnbuffer import connect
with connect(sys.argv[1]) as client:
    client.send("log", b"before")
    with client.transaction() as open_txn:
        open_txn.send("log", b"of the parent")
        assert open_txn.id
        with client.stream("log") as stream, client.reader("log"):
            child = os.fork()
            if child == 0:
                sys.exit(8)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child = os.fork()
    if child == 0:
        raise SystemExit(code + 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, client.outcome(open_txn.id).name)
"""


@pytest.mark.parametrize("where", ["file", "service"])
def test_child_process_exits_blocks_of_its_parent_with_its_own_exception(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = f"file:{tmp_path / 'left'}" if where == "file" else request.getfixturevalue("txnbuf_service").address
    # From 3.12 on, Python warns of any fork in a process with threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", LEAVING, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout, done.stderr) == ("9 COMMIT\n", "")


# A service in another process


def test_service_is_killed_and_restarted(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address, serializer=JsonSerializer()) as client:
        with client.transaction() as first:
            first.send("log", {"n": 1})
        with client.transaction() as second:
            second.send("log", {"n": 2})
            assert second.id
            txnbuf_service.restart()
            second.send("log", {"n": 3})
        assert client.outcome(first.id) is Outcome.COMMIT
        assert client.outcome(second.id) is Outcome.COMMIT
    assert txnbuf_service.stop() == 0
    with connect(f"file:{txnbuf_service.directory}") as client:
        assert read_values(client, "log", 3) == [b'{"n":1}', b'{"n":2}', b'{"n":3}']


def test_reader_opened_during_a_restart_waits_for_the_service(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as client:
        with client.transaction() as txn:
            txn.send("log", b"kept")
        txnbuf_service.kill()
        coming = threading.Timer(0.5, txnbuf_service.restart)
        coming.start()
        assert read_values(client, "log", 1) == [b"kept"]
        coming.join()


def test_service_is_killed_while_transactions_run(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as client:
        committed = []

        def write(name: str) -> None:
            for index in range(60):
                value = f"{name}{index}".encode()

                def work(txn: object, value: bytes = value) -> None:
                    txn.send("log", value)  # type: ignore[attr-defined]  # a SyncTransaction
                    txn.send("other", value)  # type: ignore[attr-defined]  # a SyncTransaction

                client.run(work)
                committed.append(value)

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcdefgh"]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.1)
            txnbuf_service.restart()
        for thread in threads:
            thread.join()
    txnbuf_service.kill()
    with connect(f"file:{txnbuf_service.directory}") as client:
        assert len(committed) == 480
        assert sorted(value or b"" for value in read_values(client, "log", 480)) == sorted(committed)
        assert sorted(value or b"" for value in read_values(client, "other", 480)) == sorted(committed)


def test_connect_without_a_service_is_an_error(txnbuf_service: ServiceProcess) -> None:
    address = txnbuf_service.address
    txnbuf_service.kill()
    with pytest.raises(ServiceUnavailable, match="no service answers"), connect(address, max_unavailable=0.3):
        raise AssertionError


def test_fencing_between_processes(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as zombie, connect(txnbuf_service.address) as heir:
        with zombie.transaction(name="sink", number=1) as txn:
            txn.send("log", b"one")
        assert heir.committed_number("sink") == 1
        with pytest.raises(Fenced), zombie.transaction(name="sink", number=2) as txn:
            txn.send("log", b"two")
        assert issubclass(StaleGeneration, Fenced)


def test_fixture_of_an_embedded_log(txnbuf_address: str) -> None:
    for value in (b"one", b"two"):
        with connect(txnbuf_address) as client, client.transaction() as txn:
            txn.send("log", value)
    with connect(txnbuf_address) as client:
        assert read_values(client, "log", 2) == [b"one", b"two"]
