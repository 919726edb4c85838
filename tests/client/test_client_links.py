"""Connections that break at the worst moments: nothing is lost or duplicated, and results are correct."""

from __future__ import annotations

import asyncio

import pytest
from client_world import BreakingLink, World, in_world, once, run_many, until, values

from txnbuffer import Outcome, OutcomeUnknown, SendUnknown, ServiceUnavailable, TransactionAborted
from txnbuffer.errors import InvalidRequest
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.engine.engine import Engine


def has_commit(frame: ClientFrame) -> bool:
    return bool(frame.commits)


def has_sends(frame: ClientFrame) -> bool:
    return bool(frame.sends)


@pytest.mark.parametrize("late", [0.0, 0.05], ids=["at once", "a little later"])
@pytest.mark.parametrize("what", [has_commit, has_sends], ids=["commit", "sends"])
@pytest.mark.parametrize("where", ["before", "after"])
@in_world
async def test_link_lost_before_or_after_a_frame_loses_nothing(
    world: World, where: str, what: object, late: float
) -> None:
    client = await world.client()
    setattr(world, where, once(what))  # type: ignore[arg-type]  # one of the two above
    world.late = late
    async with client.transaction() as txn:
        await txn.send_many("log", [b"one", b"two"])
        await txn.send("other", b"three")
    await until(lambda: len(world.links) == 2)
    assert await client.outcome(txn.id) is Outcome.COMMIT
    await until(lambda: values(world.broker, "log") == [b"one", b"two"])
    await until(lambda: values(world.broker, "other") == [b"three"])


@in_world
async def test_open_transactions_continue_over_a_new_link(world: World) -> None:
    client = await world.client()
    async with client.transaction() as one, client.transaction() as two:
        await one.send("log", b"1a")
        await two.send("log", b"2a")
        world.cut()
        await one.send("log", b"1b")
        await until(lambda: len(world.links) == 2 and client.session.core.welcomed)
        world.cut()
        await two.send("log", b"2b")
    assert sorted(values(world.broker, "log")) == [b"1a", b"1b", b"2a", b"2b"]
    assert len(world.links) == 3


@in_world
async def test_new_owner_takes_over_during_a_transaction(world: World) -> None:
    client = await world.client()
    async with client.transaction() as before:
        await before.send("log", b"before")
    async with client.transaction() as txn:
        await txn.send("log", b"one")
        await asyncio.sleep(0.05)
        await world.restart()
        await txn.send("log", b"two")
    assert await client.outcome(before.id) is Outcome.COMMIT
    assert values(world.broker, "log") == [b"before", b"one", b"two"]


@in_world
async def test_many_transactions_while_links_break_and_owners_change(world: World) -> None:
    async def disturb() -> None:
        for turn in range(6):
            await asyncio.sleep(0.05)
            if turn % 3 == 2:
                await world.restart()
            else:
                world.cut()

    await run_many(world, disturb)


@in_world
async def test_ordinary_send_in_flight_is_unknown_and_not_repeated(world: World) -> None:
    client = await world.client()
    world.after = once(has_sends)
    with pytest.raises(SendUnknown, match="may or may not be"):
        await client.send("log", b"once")
    await client.send("log", b"next")
    assert values(world.broker, "log") == [b"once", b"next"]


@in_world
async def test_without_a_service_commits_are_unknown_and_other_calls_fail(world: World) -> None:
    client = await world.client(max_unavailable=0.1)
    async with client.transaction() as known:
        await known.send("log", b"known")
    world.before = once(has_commit)
    opened = await client.transaction().begin()
    txn = await client.transaction().begin()
    await txn.send("log", b"unknown")
    world.reachable = False
    committing = asyncio.create_task(txn.commit())
    await until(lambda: world.links[0]._cut)
    with pytest.raises(OutcomeUnknown, match=f"ask for the outcome of {txn.id}") as raised:
        await committing
    assert raised.value.txn == txn.id
    for refused in (client.outcome(txn.id), client.send("log", b"v"), client.transaction().begin()):
        with pytest.raises(ServiceUnavailable, match="no service for"):
            await refused
    with pytest.raises(ServiceUnavailable):
        await opened.send("log", b"v")
    world.reachable = True

    async def outcome() -> Outcome | None:
        while True:
            try:
                return await client.outcome(txn.id)
            except ServiceUnavailable:
                await asyncio.sleep(0.01)

    assert await outcome() is Outcome.ABORT
    with pytest.raises(TransactionAborted):
        await opened.send("log", b"v")
    async with client.transaction() as after:
        await after.send("log", b"after")
    await until(lambda: values(world.broker, "log") == [b"known", b"after"])


@in_world
async def test_cancelled_commit_may_have_committed_and_has_a_note(world: World) -> None:
    client = await world.client()
    txn = await client.transaction().begin()
    await txn.send("log", b"v")
    sent = asyncio.Event()
    world.before = lambda frame: bool(frame.commits and sent.set())
    committing = asyncio.create_task(txn.commit())
    await sent.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await committing
    assert raised.value.__notes__ == [f"transaction {txn.id} may have committed: query its outcome"]
    assert await client.outcome(txn.id) is Outcome.COMMIT


@in_world
async def test_commit_cancelled_before_it_was_sent_aborts(world: World) -> None:
    client = await world.client()
    txn = await client.transaction().begin()
    await txn.send("log", b"v")
    committing = asyncio.create_task(txn.commit())
    await asyncio.sleep(0)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await committing
    assert not hasattr(raised.value, "__notes__")
    while (outcome := await client.outcome(txn.id)) is None:
        await asyncio.sleep(0.01)
    assert outcome is Outcome.ABORT


@in_world
async def test_cancelled_block_aborts(world: World) -> None:
    client = await world.client()
    begun: list[object] = []

    async def work() -> None:
        async with client.transaction() as txn:
            begun.append(txn.id)
            await txn.send("log", b"v")
            await asyncio.sleep(100)

    task = asyncio.create_task(work())
    await until(lambda: bool(begun))
    task.cancel()
    await asyncio.wait([task])
    while (outcome := await client.outcome(begun[0])) is None:  # type: ignore[arg-type]  # a TxnId
        await asyncio.sleep(0.01)
    assert outcome is Outcome.ABORT


@in_world
async def test_sender_waits_while_the_service_accepts_no_more_records(world: World) -> None:
    client = await world.client()
    core = client.session.core
    most = 0
    async with client.transaction() as txn:
        for _ in range(300):
            await txn.send_many("log", [bytes(10_000)] * 10)
            most = max(most, core._path.unacknowledged)
    assert most <= core._path.credits + 10 * 10_100
    assert len(values(world.broker, "log")) == 3000


@in_world
async def test_closing_aborts_open_transactions_and_fails_waiting_callers(world: World) -> None:
    client = await world.client()
    txn = await client.transaction().begin()
    await txn.send("log", b"v")
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(InvalidRequest, match="was closed"):
        await client.send("log", b"v")
    other = await world.client()
    while await other.outcome(txn.id) is None:
        await asyncio.sleep(0.01)
    await until(lambda: values(world.broker, "log") == [])


@in_world
async def test_client_waits_for_the_next_engine(world: World) -> None:
    client = await world.client()
    await world.engine.stop()
    sending = asyncio.create_task(client.send("log", b"v"))
    await asyncio.sleep(0.1)
    assert not sending.done()
    world.engine = await Engine.start(world.broker)
    await sending
    assert values(world.broker, "log") == [b"v"]


@in_world
async def test_an_engine_ends_with_the_error_of_a_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve nobody any more, and nobody would know."""

    def broken(_: BreakingLink) -> None:
        raise OverflowError("some defect")

    client = await world.client()
    monkeypatch.setattr(BreakingLink, "take_frame", broken)
    asking = asyncio.ensure_future(client.committed_number("n"))
    await until(world.engine.ended.done)
    monkeypatch.undo()
    assert "some defect" in str(world.engine.ended.result())
    asking.cancel()
