"""Where the service of a namespace is: its newest owner's entry in the decision log tells."""

from __future__ import annotations

import asyncio

import pytest
from client_world import run

from broker_io.batch import Batch
from broker_io.errors import DiskFailed
from broker_io.memory import MemoryBroker
from txnbuffer.client.cluster import finding
from txnbuffer.client.finding import Finder
from txnbuffer.client.link import Link
from txnbuffer.coordinator.entries import TOPIC, Lease, Owner, encode
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.frames import ClientFrame, ServerFrame


class Log:
    """A decision log, and whoever looks into it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(ledger_entries=4)
        self.finder = Finder(self.broker.connect(), "public/default")

    def owner(self, epoch: int, address: str) -> None:
        self.broker.create_topic(TOPIC)
        with self.broker.writer(TOPIC) as writer:
            writer.append(Batch.of([encode(Owner(epoch, f"owner {epoch}", address))])).result()

    def others(self, count: int) -> None:
        """Entries that have nothing to do with it."""
        with self.broker.writer(TOPIC) as writer:
            for first in range(1, count + 1):
                writer.append(Batch.of([encode(Lease(first, 1, "s", 0))])).result()


def test_before_any_owner_it_says_what_to_run() -> None:
    log = Log()
    for _ in range(2):
        with pytest.raises(ServiceUnavailable, match="no service has ever taken over namespace public/default: run"):
            log.finder.look()
        log.broker.create_topic(TOPIC)


def test_an_owner_without_an_address_is_named() -> None:
    log = Log()
    log.owner(1, "")
    with pytest.raises(ServiceUnavailable, match=r"\(owner 1\) told no address"):
        log.finder.look()


def test_the_newest_owner_is_told_and_looked_for_again() -> None:
    log = Log()
    log.owner(1, "a:1")
    log.others(9)
    assert log.finder.look() == "a:1"
    log.others(3)
    assert log.finder.look() == "a:1"
    log.owner(2, "b:2")
    assert log.finder.look() == "b:2"


def test_an_owner_of_an_older_epoch_is_none() -> None:
    log = Log()
    log.owner(2, "b:2")
    log.owner(1, "a:1")
    assert log.finder.look() == "b:2"
    log.owner(2, "c:3")
    assert log.finder.look() == "c:3"


def test_a_log_that_is_compacted_and_trimmed_between_looks_is_read_anew() -> None:
    log = Log()
    log.owner(1, "a:1")
    assert log.finder.look() == "a:1"
    log.owner(2, "b:2")
    log.others(9)
    log.broker.compact(TOPIC)
    log.broker.trim(TOPIC, log.broker.ledgers(TOPIC)[-1].ledger)
    assert log.finder.look() == "b:2"
    assert Finder(log.broker, "public/default").look() == "b:2"


def test_a_log_that_was_trimmed_behind_the_last_look_is_read_anew() -> None:
    log = Log()
    log.owner(1, "a:1")
    assert log.finder.look() == "a:1"
    log.others(9)
    log.owner(2, "b:2")
    log.broker.trim(TOPIC, log.broker.ledgers(TOPIC)[-1].ledger)
    assert log.finder.look() == "b:2"


class Nobody:
    """A link to an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    async def send(self, frame: ClientFrame) -> None:
        """Nobody is there."""

    async def receive(self) -> ServerFrame | None:
        return None

    async def end(self) -> None:
        """Nobody is there."""

    async def close(self) -> None:
        self.closed = True


def test_a_dial_goes_over_to_the_next_owner_while_the_one_before_does_not_answer() -> None:
    async def test() -> None:
        log = Log()
        log.owner(1, "a:1")
        dialled: list[str] = []

        async def dial(address: str) -> Link:
            dialled.append(address)
            if address == "a:1":
                await asyncio.to_thread(log.owner, 2, "b:2")
                await asyncio.Event().wait()
            return Nobody(address)

        link = await finding(log.finder, dial)()
        assert isinstance(link, Nobody)
        assert link.address == "b:2"
        assert dialled == ["a:1", "b:2"]

    run(test())


def test_a_dial_that_is_given_up_leaves_no_connection_behind() -> None:
    async def test() -> None:
        log = Log()
        log.owner(1, "a:1")
        links: list[Nobody] = []
        dialling = asyncio.Event()

        async def dial(address: str) -> Link:
            dialling.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                links.append(Nobody(address))  # it was there just then
            return links[0]

        task = asyncio.ensure_future(finding(log.finder, dial)())
        await dialling.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [link.closed for link in links] == [True]

    run(test())


def test_whatever_breaks_a_look_is_tried_again() -> None:
    async def test() -> None:
        log = Log()
        log.owner(1, "a:1")

        async def dial(address: str) -> Link:
            return Nobody(address)

        found = finding(log.finder, dial)
        faults = log.finder._broker.faults  # type: ignore[attr-defined]  # a MemoryBroker
        faults.fail_read(RuntimeError("what is this"))
        with pytest.raises(ServiceUnavailable, match="what is this"):
            await found()
        faults.fail_read(DiskFailed("read by a fault"))
        with pytest.raises(DiskFailed):
            await found()
        assert isinstance(await found(), Nobody)

    run(test())
