"""A client opens a producer's name once, however many of its tasks use it: opening it again would fence the others."""

from __future__ import annotations

import asyncio

import pytest

from txnbuffer import connect
from txnbuffer.client.producer_names import ProducerNames
from txnbuffer.coordinator.messages import NameOpened
from txnbuffer.errors import (
    AlreadyCommitted,
    Fenced,
    ProducerFenced,
    ServiceUnavailable,
    StaleGeneration,
    TransactionAborted,
)
from txnbuffer.model import TxnId


class Opening:
    """Counts; `held` opens it, unless it is to fail so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.names = ProducerNames()
        self.count = 0
        self._failures = failures

    async def open(self, name: str) -> None:
        self.count += 1
        await asyncio.sleep(0)
        if self.count <= self._failures:
            raise ServiceUnavailable("away")
        self.names.opened(name, NameOpened(committed=3, epoch=self.count))


async def test_concurrent_users_wait_for_one_opening_of_a_name() -> None:
    opening = Opening()
    sequences = await asyncio.gather(*(opening.names.sequence("n", number, opening.open) for number in range(4, 24)))
    assert {sequence.epoch for sequence in sequences} == {1}
    with pytest.raises(AlreadyCommitted):
        await opening.names.sequence("n", 3, opening.open)
    await opening.names.sequence("other", 4, opening.open)
    assert opening.count == 2


async def test_next_waiting_task_opens_a_name_after_a_failure() -> None:
    opening = Opening(failures=1)
    uses = (opening.names.sequence("n", number, opening.open) for number in (4, 5, 6))
    first, *others = await asyncio.gather(*uses, return_exceptions=True)
    assert isinstance(first, ServiceUnavailable)
    assert [getattr(sequence, "epoch", sequence) for sequence in others] == [2, 2]


@pytest.mark.parametrize("error", [ProducerFenced("stop"), StaleGeneration("stop")], ids=["producer", "group"])
async def test_only_the_lost_epoch_of_a_name_is_released(error: Fenced) -> None:
    opening = Opening()
    old = await opening.names.sequence("n", 4, opening.open)
    opening.names.lost(old, error)
    if isinstance(error, ProducerFenced):
        with pytest.raises(ProducerFenced, match=r"committed_number\('n'\)"):
            await opening.names.sequence("n", 4, opening.open)
        await opening.open("n")
    new = await opening.names.sequence("n", 4, opening.open)
    opening.names.lost(old, error)  # an older transaction is told of it later
    assert await opening.names.sequence("n", 4, opening.open) == new
    assert opening.count == 2


async def test_tasks_of_one_client_do_not_fence_each_other() -> None:
    async with connect("memory:") as client:
        transactions = [client.transaction(name="n", number=number) for number in range(1, 6)]
        await asyncio.gather(*(txn.begin() for txn in transactions))
        for txn in transactions:
            await txn.send("log", b"v")
            await txn.commit()
        assert await client.committed_number("n") == 5


async def test_after_a_commit_that_fails_those_of_its_name_that_wait_fail() -> None:
    names, failed = ProducerNames(), asyncio.Event()
    order: list[int] = []

    async def commit(number: int, error: Exception | None = None) -> None:
        async with names.committing(TxnId(0, number), "shop"):
            order.append(number)
            await failed.wait()
            if error is not None:
                raise error

    first = asyncio.create_task(commit(5, ValueError("refused")))
    second = asyncio.create_task(commit(6))
    await asyncio.sleep(0)
    assert order == [5]
    failed.set()
    with pytest.raises(ValueError, match="refused"):
        await first
    with pytest.raises(TransactionAborted, match="an earlier commit of producer 'shop' failed"):
        await second
    await commit(7)
    assert order == [5, 7]
