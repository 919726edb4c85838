"""Fix 4: dropped transactions, aborts after commits, wrong types, and `connect` without `with` are reported."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from client_world import run

from broker_io import open_broker
from broker_io.errors import CallerError
from txnbuffer import (
    Client,
    CommittedReader,
    Outcome,
    SyncClient,
    SyncTransaction,
    TransactionAborted,
    TxnId,
    connect,
    dead_letter,
)
from txnbuffer.client.path.record_path import EndPlan, OpenTransaction
from txnbuffer.errors import InvalidRequest, NotVisible, OutcomeUnknown, TransactionCommitted


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "txnbuffer.client"]


def test_a_transaction_that_is_dropped_at_close_warns(caplog: pytest.LogCaptureFixture) -> None:
    with connect("memory:") as client:
        dropped = client.transaction().begin()
        dropped.send_many("orders", [b"1", b"2"])
        dropped.send("stock", b"3")
        empty = client.transaction().begin()
        with client.transaction() as committed:
            committed.send("orders", b"4")
        aborted = client.transaction().begin()
        aborted.send("orders", b"5")
        aborted.abort()
        ids = str(dropped.id), str(empty.id)
    (warning,) = warnings_of(caplog)
    assert f"{ids[0]} (2 for 'orders', 1 for 'stock')" in warning
    assert "dropped" in warning
    assert "commit()" in warning
    assert ids[1] not in warning
    assert [one.levelno for one in caplog.records if one.name == "txnbuffer.client"] == [logging.WARNING]


async def test_an_asyncio_client_warns_too_and_names_a_few(caplog: pytest.LogCaptureFixture) -> None:
    async with connect("memory:") as client:
        for _ in range(7):
            txn = await client.transaction().begin()
            await txn.send("orders", b"1")
    (warning,) = warnings_of(caplog)
    assert warning.count("1 for 'orders'") == 5
    assert "and 2 more" in warning


async def test_blocks_that_fail_abort_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), connect("memory:") as client, client.transaction() as txn:
        txn.send("orders", b"1")
        raise ZeroDivisionError

    async def cancelled() -> None:
        async with connect("memory:") as client, client.transaction() as txn:
            await txn.send("orders", b"1")
            await asyncio.sleep(60)

    task = asyncio.ensure_future(cancelled())
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert warnings_of(caplog) == []


async def test_an_abort_after_the_commit_says_that_it_has_committed() -> None:
    async with connect("memory:") as client:
        async with client.transaction() as txn:
            await txn.send("orders", b"1")
        with pytest.raises(TransactionCommitted, match=f"transaction {txn.id} has committed") as caught:
            await txn.abort()
        assert caught.value.txn == txn.id
        assert await client.outcome(txn.id) is Outcome.COMMIT
        async with client.transaction() as aborted:
            await aborted.send("orders", b"2")
            await aborted.abort()
            await aborted.abort()
    with connect("memory:") as client:
        with client.transaction() as sync_txn:
            sync_txn.send("orders", b"1")
            sync_txn.commit()
            with pytest.raises(TransactionCommitted, match="has committed"):
                sync_txn.abort()
        with pytest.raises(TransactionCommitted):
            sync_txn.abort()
        assert client.outcome(sync_txn.id) is Outcome.COMMIT


def test_an_abort_after_a_commit_that_failed_hides_no_error() -> None:
    async def ended(error: Exception) -> None:
        async with connect("memory:") as client:
            txn = await client.transaction().begin()
            await txn.send("orders", b"1")

            def fails(opened: OpenTransaction, plan: EndPlan) -> None:
                opened.ending = True
                plan.waiter.set_exception(error)

            session: Any = txn._session
            end, session.end = session.end, fails
            with pytest.raises(type(error)):
                await txn.commit()
            session.end = end
            try:
                await txn.abort()
            finally:
                txn._begun().ending = False

    txn = TxnId(0, 1)
    run(ended(TransactionAborted(txn, "its time was up")))  # an abort has nothing to add
    with pytest.raises(OutcomeUnknown):
        run(ended(OutcomeUnknown(txn, "the connection broke")))
    with pytest.raises(NotVisible, match="is committed"):
        run(ended(NotVisible(txn, "orders", "it has stopped")))


WRONG: tuple[Any, ...] = (5, 1.5, b"x", object(), ["a"], {"a": 1}, {5}, True, datetime(2026, 1, 1, tzinfo=UTC), print)
"""Values that are wrong for most arguments."""
RIGHT: dict[str, Any] = {
    "topic": "log", "topics": "log", "source": "log", "value": b"v", "values": [b"v"], "key": b"k", "group": "g",
    "name": "n", "number": 1, "txn": "0:1", "work": lambda _: None, "handler": lambda *_: None, "cursor": "c", "at": 1,
    "address": "memory:",
}  # fmt: skip


def calls_of(kind: type, name: str) -> list[dict[str, Any]]:
    """The arguments of calls with one wrong value each."""
    parameters = [one for one in inspect.signature(getattr(kind, name)).parameters if one != "self"]
    required = {
        one.name: RIGHT[one.name]
        for one in inspect.signature(getattr(kind, name)).parameters.values()
        if one.default is inspect.Parameter.empty and one.name != "self"
    }
    if "idle_timeout" in parameters:
        required["idle_timeout"] = 0.05
    if name == "transaction":
        return [required | {one: value} for one in parameters for value in WRONG] + [
            {"name": value, "number": 1} for value in WRONG
        ]
    calls = [required | {one: value} for one in parameters for value in (*WRONG, None)]
    return [one for one in calls if one.get("idle_timeout", 0) not in (5, 1.5, None)]  # these would wait


METHODS = [
    "transaction",
    "run",
    "outcome",
    "committed_number",
    "delete_name",
    "send",
    "send_many",
    "delete",
    "reader",
    "stream",
    "process",
    "process_batches",
    "forget_group",
    "topics",
    "last_visible",
    "delete_topic",
]


def check_clear(call: Callable[[], Any], text: str) -> None:
    """Make a call. If it fails, the error must tell a user what to change."""
    try:
        call()
    except TimeoutError:
        return
    except CallerError as error:
        found: BaseException = error
    except Exception as error:
        found = error
    else:
        return
    assert isinstance(found, CallerError), f"{text} raised {found!r}"
    assert len(str(found)) > 10, f"{text} raised {found!r}"


def fed(value: Any) -> Any:
    """Use what a call returns, if it does nothing before that."""
    if hasattr(value, "read"):
        value.read()
        value.close()
    elif hasattr(value, "next"):
        value.next(timeout=0.01)
    elif hasattr(value, "commit"):
        with value:
            value.send("log", b"v")
    return value


@pytest.mark.parametrize("name", METHODS)
def test_wrong_types_raise_errors_of_this_package(name: str) -> None:
    with connect("memory:") as client:
        client.send("log", b"v", key=b"k")
        for arguments in calls_of(SyncClient, name):
            check_clear(lambda given=arguments: fed(getattr(client, name)(**given)), f"{name}({arguments})")
        client.send("log", b"v")


@pytest.mark.parametrize("name", ["send", "send_many", "delete", "commit"])
def test_wrong_types_in_a_transaction_too(name: str) -> None:
    def call(client: SyncClient, arguments: dict[str, Any]) -> None:
        with client.transaction() as txn:
            getattr(txn, name)(**arguments)

    with connect("memory:") as client:
        for arguments in calls_of(SyncTransaction, name):
            check_clear(lambda given=arguments: call(client, given), f"{name}({arguments})")


def test_wrong_types_of_readers() -> None:
    def call(client: SyncClient, arguments: dict[str, Any]) -> None:
        with client.reader("log") as reader:
            reader.read(**arguments)

    with connect("memory:") as client:
        client.send("log", b"v")
        for arguments in calls_of(CommittedReader, "read"):
            check_clear(lambda given=arguments: call(client, given), f"read({arguments})")


OTHERS: dict[str, Callable[[SyncClient, Any], Any]] = {
    "topic of a new cursor": lambda client, value: client.cursors.add(value, "c"),
    "topic of a removed cursor": lambda client, value: client.cursors.remove(value, "c"),
    "name of a cursor": lambda client, value: client.cursors.add("log", value),
    "place of a cursor": lambda client, value: client.cursors.advance("log", "c", value),
    "serializer": lambda client, value: client.send("log", {"a": 1}, serializer=value),
    "name of a property": lambda client, value: client.send("log", b"v", properties={value: "a"}),
    "value of a property": lambda client, value: client.send("log", b"v", properties={"a": value}),
    "start of a topic": lambda client, value: client.reader("log", start={"log": value}).close(),
    "dead letters": lambda client, value: client.process(
        "log", "g", lambda txn, record: None, on_error=dead_letter(value), idle_timeout=0.05
    ),
    "broker": lambda client, value: CommittedReader(value, "log"),
    "address of a broker": lambda client, value: open_broker(value).close(),
    "timeout of a stream": lambda client, value: client.stream("log", to=0).next(value),
}


@pytest.mark.parametrize("what", OTHERS)
def test_wrong_types_in_other_places(what: str) -> None:
    with connect("memory:") as client:
        client.send("log", b"v")
        for value in (*(one for one in WRONG if not isinstance(one, dict | list | set)), None):
            check_clear(lambda given=value: OTHERS[what](client, given), f"{what}: {value!r}")


def test_wrong_types_of_connect() -> None:
    def call(arguments: dict[str, Any]) -> None:
        with connect(**arguments):
            pass

    parameters = [one for one in inspect.signature(connect).parameters if one != "address"]
    calls: list[dict[str, Any]] = [{"address": value} for value in (*WRONG, None)]
    calls += [{"address": "memory:", one: value} for one in parameters for value in WRONG]
    for arguments in calls:
        check_clear(lambda given=arguments: call(given), f"connect({arguments})")


@pytest.mark.parametrize(
    "use",
    [
        lambda pending: pending.send("orders", b"1"),
        lambda pending: pending.transaction(),
        lambda pending: pending.reader("orders"),
        lambda pending: pending.close(),
        lambda pending: pending.topics(),
    ],
)
def test_connect_without_with_says_how_to_use_it(use: Callable[[Any], Any]) -> None:
    pending = connect("file:data")
    with pytest.raises(InvalidRequest, match=r"connect\('file:data'\) is not open.*`with connect") as caught:
        use(pending)
    assert "async with" in str(caught.value)
    assert "open_sync()" in str(caught.value)
    assert not os.path.exists("data")


async def test_the_repr_of_connect_says_how_to_use_it_and_shows_no_secret(tmp_path: Path) -> None:
    pending = connect(f"file:{tmp_path}", token="sEcReT")
    assert "with connect(…) as client" in repr(pending)
    assert "sEcReT" not in repr(pending)
    assert not hasattr(pending, "no_such_name")
    with connect("memory:") as client:
        assert isinstance(client, SyncClient)
    opened = await connect("memory:")
    assert isinstance(opened, Client)
    await opened.close()
