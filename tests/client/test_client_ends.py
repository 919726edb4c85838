"""How transactions of a client end: repeated, timed out, named, fenced, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from client_world import World, in_world, until, values

from txnbuffer import (
    AlreadyCommitted,
    Fenced,
    TransactionAborted,
    TxnId,
    connect,
)
from txnbuffer.errors import InvalidRequest, ProducerFenced, UnknownTransaction


@in_world
async def test_run_retries_only_aborted_transactions(world: World) -> None:
    client = await world.client()
    calls: list[TxnId] = []

    async def work(txn: object) -> str:
        calls.append(txn.id)  # type: ignore[attr-defined]  # a Transaction
        if len(calls) < 3:
            raise TransactionAborted(calls[-1], "somebody said so")
        return "done"

    assert await client.run(work) == "done"
    assert len(set(calls)) == 3

    async def fail(_: object) -> None:
        calls.append(TxnId(0, 1))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await client.run(fail)
    assert len(calls) == 4

    async def never(txn: object) -> None:
        raise TransactionAborted(TxnId(0, 1), "again and again")

    with pytest.raises(TransactionAborted, match="again and again"):
        await client.run(never, attempts=2)


@in_world
async def test_transaction_is_aborted_after_its_timeout(world: World) -> None:
    client = await world.client()
    with pytest.raises(TransactionAborted, match="was aborted"):
        async with client.transaction(timeout=0.01) as txn:
            await txn.send("log", b"never")
            while await client.outcome(txn.id) is None:
                await asyncio.sleep(0.05)
    async with client.transaction() as other:
        await other.send("log", b"fine")
    await until(lambda: values(world.broker, "log") == [b"fine"])


@in_world
async def test_invalid_timeout_is_rejected(world: World) -> None:
    client = await world.client()
    with pytest.raises(InvalidRequest, match="must be above 0 and at most"):
        async with client.transaction(timeout=1e6) as txn:
            await txn.send("log", b"v")
            await asyncio.sleep(0.05)
    assert values(world.broker, "log") == []


@in_world
async def test_number_of_a_producer_commits_once(world: World) -> None:
    client = await world.client()
    assert await client.committed_number("sink") == 0
    async with client.transaction(name="sink", number=1) as txn:
        await txn.send("log", b"one")
    with pytest.raises(AlreadyCommitted) as raised:
        async with client.transaction(name="sink", number=1) as txn:
            await txn.send("log", b"twice")
    assert (raised.value.name, raised.value.number, raised.value.last) == ("sink", 1, 1)
    async with client.transaction(name="sink", number=5) as txn:
        await txn.send("log", b"five")
    other = await world.client()
    with pytest.raises(AlreadyCommitted):
        async with other.transaction(name="sink", number=4):
            pass
    assert await other.committed_number("sink") == 5
    await other.delete_name("sink")
    assert await other.committed_number("sink") == 0
    assert values(world.broker, "log") == [b"one", b"five"]


@in_world
async def test_fenced_client_does_not_repeat_what_another_one_has_committed(world: World) -> None:
    """Rows 3 to 6 are one batch of the first client; the other one publishes them in smaller ones."""
    client, other = await world.client(), await world.client()
    async with client.transaction(name="sink", number=2) as txn:
        await txn.send("log", b"1-2")
    batch = client.transaction(name="sink", number=6)
    await batch.begin()
    await batch.send("log", b"3-6")
    assert await other.committed_number("sink") == 2
    async with other.transaction(name="sink", number=4) as txn:
        await txn.send("log", b"3-4")
    with pytest.raises(ProducerFenced):
        await batch.commit()
    for _ in range(2):
        with pytest.raises(ProducerFenced, match="another client has opened producer 'sink'"):
            await client.transaction(name="sink", number=6).begin()
    assert await client.committed_number("sink") == 4
    async with client.transaction(name="sink", number=6) as txn:
        await txn.send("log", b"5-6")
    await until(lambda: values(world.broker, "log") == [b"1-2", b"3-4", b"5-6"])


@in_world
async def test_opening_a_name_fences_the_previous_holder(world: World) -> None:
    zombie, heir = await world.client(), await world.client()
    async with zombie.transaction(name="sink", number=1) as txn:
        await txn.send("log", b"one")
    with pytest.raises(Fenced, match="another producer"):
        async with zombie.transaction(name="sink", number=2) as txn:
            await txn.send("log", b"the zombie's two")
            assert await heir.committed_number("sink") == 1
            async with heir.transaction(name="sink", number=2) as mine:
                await mine.send("log", b"two")
    await until(lambda: values(world.broker, "log") == [b"one", b"two"])
    assert await zombie.committed_number("sink") == 2  # opened anew


@in_world
async def test_name_and_number_must_be_given_together(world: World) -> None:
    client = await world.client()
    with pytest.raises(InvalidRequest, match="both"):
        client.transaction(name="sink")
    with pytest.raises(InvalidRequest, match="not begun"):
        _ = client.transaction().id


@in_world
async def test_outcome_of_unknown_transactions(world: World) -> None:
    client = await world.client()
    with pytest.raises(UnknownTransaction):
        await client.outcome(TxnId(0, 2**40))
    with pytest.raises(InvalidRequest, match="write MOST:LEAST"):
        await client.outcome("seven")
    async with client.transaction() as txn:
        assert await client.outcome(txn.id) is None


def test_transaction_that_was_left_open_is_aborted_in_the_log_when_its_client_closes(tmp_path: Path) -> None:
    """The next owner reads it as ended: nothing waits until somebody asks for its outcome."""
    address = f"file:{tmp_path}/log"

    async def leave() -> None:
        async with connect(address) as client:
            async with client.transaction() as txn:
                await txn.send("log", b"before")
            with contextlib.suppress(RuntimeError):
                async with client.transaction() as txn:
                    await txn.send("log", b"never")
                    raise RuntimeError("left")
            await (await client.transaction().begin()).send("log", b"never")

    async def read() -> list[bytes | None]:
        async with connect(address) as client:
            async with client.transaction() as txn:
                await txn.send("log", b"after")
            async with await client.reader("log") as reader:
                found: list[bytes | None] = []
                while b"after" not in found:
                    batch = await reader.read(timeout=120.0)
                    assert batch is not None
                    found += batch.messages.values.to_list()
                return found

    asyncio.run(leave())
    assert asyncio.run(read()) == [b"before", b"after"]
