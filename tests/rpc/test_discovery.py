"""Where the service of a namespace is: its newest owner's entry in the decision log tells."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from cut_readers import cut_short

from broker_io.batch import Batch
from broker_io.errors import DiskFailed, TopicNotFound
from broker_io.memory import MemoryBroker
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.shards import Shard, shard_of
from txnbuffer.client.connection import connect_to_owner
from txnbuffer.client.session.session import Link
from txnbuffer.coordinator.decisions import (
    TOPIC,
    Lease,
    Owner,
    OwnerAddress,
    decode_owner_address,
    encode,
    encode_owner_address,
)
from txnbuffer.errors import ServiceUnavailable, TopicNotCreated
from txnbuffer.rpc.discovery import ServiceDiscovery, check_creatable, owner_address_of
from txnbuffer.rpc.frames import ClientFrame, ServerFrame


class Log:
    """A decision log, and whoever looks into it."""

    def __init__(self) -> None:
        self.broker: MemoryBroker = MemoryBroker(ledger_entries=4)
        self.discovery = ServiceDiscovery(self.broker.connect(), "public/default")

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
            log.discovery.newest_address()
        log.broker.create_topic(TOPIC)


def test_an_owner_without_an_address_is_named() -> None:
    log = Log()
    log.owner(1, "")
    with pytest.raises(ServiceUnavailable, match=r"\(owner 1\) published no address"):
        log.discovery.newest_address()


def test_the_newest_owner_is_told_and_looked_for_again() -> None:
    log = Log()
    log.owner(1, "a:1")
    log.others(9)
    assert log.discovery.newest_address() == "a:1"
    log.others(3)
    assert log.discovery.newest_address() == "a:1"
    log.owner(2, "b:2")
    assert log.discovery.newest_address() == "b:2"


def test_the_owner_of_a_topic_is_that_of_its_shard() -> None:
    log = Log()
    log.owner(1, "only:1")
    assert owner_address_of(log.broker, "public/default", "orders") == "only:1"
    shared = MemoryBroker()
    shared.partition(SNAPSHOT_TOPIC, 3)
    shared.partition(TOPIC, 3)
    for number in range(3):
        with shared.writer(Shard(number, 3).topic(TOPIC)) as writer:
            writer.append(Batch.of([encode(Owner(1, "owner", f"shard:{number}"))])).result()
    for topic in ("orders", "clicks", "flights", "departures"):
        assert owner_address_of(shared, "public/default", topic) == f"shard:{shard_of(topic, 3)}"


def test_an_owner_of_an_older_epoch_is_none() -> None:
    log = Log()
    log.owner(2, "b:2")
    log.owner(1, "a:1")
    assert log.discovery.newest_address() == "b:2"
    log.owner(2, "c:3")
    assert log.discovery.newest_address() == "c:3"


def test_a_log_that_is_compacted_and_trimmed_between_looks_is_read_anew() -> None:
    log = Log()
    log.owner(1, "a:1")
    assert log.discovery.newest_address() == "a:1"
    log.owner(2, "b:2")
    log.others(9)
    log.broker.compact(TOPIC)
    log.broker.trim(TOPIC, log.broker.ledgers(TOPIC)[-1].ledger)
    assert log.discovery.newest_address() == "b:2"
    assert ServiceDiscovery(log.broker, "public/default").newest_address() == "b:2"


def test_a_log_that_was_trimmed_behind_the_last_look_is_read_anew() -> None:
    log = Log()
    log.owner(1, "a:1")
    assert log.discovery.newest_address() == "a:1"
    log.others(9)
    log.owner(2, "b:2")
    log.broker.trim(TOPIC, log.broker.ledgers(TOPIC)[-1].ledger)
    assert log.discovery.newest_address() == "b:2"


class NotedBroker(MemoryBroker):
    """Has a note beside the decision log; `fails` when it is read."""

    def __init__(self, text: str | None, fails: Exception | None = None) -> None:
        super().__init__()
        self.text, self.fails = text, fails

    def annotate(self, topic: str, text: str) -> None:
        assert topic == TOPIC
        self.text = text

    def annotation(self, topic: str) -> str | None:
        assert topic == TOPIC
        if self.fails is not None:
            raise self.fails
        return self.text


class NotedLog(Log):
    """A decision log with a note beside it. Nobody answers at any address but at that of `alive`."""

    def __init__(self, text: str | None, fails: Exception | None = None) -> None:
        super().__init__()
        self.broker = NotedBroker(text, fails)
        self.discovery = ServiceDiscovery(self.broker, "public/default")
        self.alive = ""
        self.dialled: list[str] = []

    async def dial(self, address: str) -> Nobody:
        self.dialled.append(address)
        if address != self.alive:
            raise ServiceUnavailable(f"nobody is at {address}")
        return Nobody(address)

    async def find(self) -> list[str]:
        """The addresses that are dialled until a connection stands."""
        self.dialled.clear()
        await connect_to_owner(self.discovery, self.dial)
        return [*self.dialled]


def test_what_a_slow_broker_kept_back_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the log got nothing more: its owner may be one that nobody asks for anything."""
    log = Log()
    log.owner(1, "a:1")
    log.owner(2, "b:2")
    log.discovery = ServiceDiscovery(log.broker, "public/default")
    with monkeypatch.context() as patched:
        cut_short(patched, log.broker, 1)
        assert log.discovery.newest_address() == "a:1"
    assert log.discovery.newest_address() == "b:2"


def test_a_note_has_epoch_and_address() -> None:
    for text, place in (
        ("7 host.name:6650", OwnerAddress(7, "host.name:6650")),
        ("12 ", OwnerAddress(12, "")),
        ("7 host.name:6650 no-topics", OwnerAddress(7, "host.name:6650", creates_topics=False)),
        ("12  no-topics", OwnerAddress(12, "", creates_topics=False)),
    ):
        assert encode_owner_address(place) == text
        assert decode_owner_address(text) == place


NO_NOTES = ["", "7", "7  a:1", "x a:1", "7 a", "7 a:1 b", "7 a:1\n", "0 a:1", "\u0667 a:1"]


def test_a_note_tells_whether_topics_are_made() -> None:
    for text in ("7 a:1", "8 ", "some other note", None):
        check_creatable(NotedBroker(text), "orders")
    check_creatable(NotedBroker(None, TopicNotFound("no service was ever there")), "orders")
    check_creatable(MemoryBroker(), "orders")
    with pytest.raises(TopicNotCreated, match="topic 'orders' does not exist, and this service creates no topics"):
        check_creatable(NotedBroker("7 a:1 no-topics"), "orders")
    with pytest.raises(ServiceUnavailable):
        check_creatable(NotedBroker(None, ServiceUnavailable("not now")), "orders")


@pytest.mark.parametrize("text", NO_NOTES)
def test_what_is_no_note_tells_nothing(text: str) -> None:
    assert decode_owner_address(text) is None


async def test_a_note_is_followed_without_a_look_at_the_log() -> None:
    log = NotedLog("1 a:1")
    log.alive = "a:1"  # there is no log at all
    assert await log.find() == ["a:1"]


@pytest.mark.parametrize("note", [None, "1 ", *NO_NOTES])
async def test_the_log_tells_where_no_note_does(note: str | None) -> None:
    log = NotedLog(note)
    log.owner(1, "a:1")
    log.alive = "a:1"
    assert await log.find() == ["a:1"]


async def test_a_note_that_cannot_be_read_is_none() -> None:
    log = NotedLog("1 z:9", ServiceUnavailable("the interface is away"))
    log.owner(1, "a:1")
    log.alive = "a:1"
    assert await log.find() == ["a:1"]


async def test_where_nobody_answers_at_the_noted_address_the_log_is_read_and_the_note_not_followed_again() -> None:
    log = NotedLog("1 z:9")
    log.owner(1, "a:1")
    log.alive = "a:1"
    assert await log.find() == ["z:9", "a:1"]
    assert await log.find() == ["a:1"]
    log.broker.annotate(TOPIC, "2 b:2")
    log.alive = "b:2"
    assert await log.find() == ["b:2"]
    log.owner(3, "c:3")
    log.alive = "c:3"
    assert await log.find() == ["c:3"]


async def test_a_note_that_led_to_somebody_else_is_followed_once() -> None:
    log = NotedLog("1 z:9")
    log.owner(1, "a:1")
    log.alive = "z:9"  # a connection stands, and it is nobody's who could answer
    assert await log.find() == ["z:9"]
    log.alive = "a:1"
    assert await log.find() == ["a:1"]


async def test_the_log_counts_for_more_than_a_note() -> None:
    log = NotedLog(None)
    log.owner(2, "b:2")
    log.alive = "b:2"
    assert await log.find() == ["b:2"]
    log.broker.annotate(TOPIC, "2 z:9")
    assert await log.find() == ["b:2"]


async def test_an_address_where_nobody_answers_is_an_error_if_the_log_tells_it_too() -> None:
    log = NotedLog("1 a:1")
    log.owner(1, "a:1")
    with pytest.raises(ServiceUnavailable, match="nobody is at a:1"):
        await log.find()
    assert log.dialled == ["a:1"]


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


async def test_a_dial_goes_over_to_the_next_owner_while_the_one_before_does_not_answer() -> None:
    log = Log()
    log.owner(1, "a:1")
    dialled: list[str] = []

    async def dial(address: str) -> Link:
        dialled.append(address)
        if address == "a:1":
            await asyncio.to_thread(log.owner, 2, "b:2")
            await asyncio.Event().wait()
        return Nobody(address)

    link = await connect_to_owner(log.discovery, dial)
    assert isinstance(link, Nobody)
    assert link.address == "b:2"
    assert dialled == ["a:1", "b:2"]


async def test_a_dial_that_is_given_up_leaves_no_connection_behind() -> None:
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

    task = asyncio.ensure_future(connect_to_owner(log.discovery, dial))
    await dialling.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [link.closed for link in links] == [True]


async def test_whatever_breaks_a_look_is_tried_again() -> None:
    log = Log()
    log.owner(1, "a:1")

    async def dial(address: str) -> Link:
        return Nobody(address)

    found = partial(connect_to_owner, log.discovery, dial)
    faults = log.discovery._broker.faults  # type: ignore[attr-defined]  # a MemoryBroker
    faults.fail_read(RuntimeError("what is this"))
    with pytest.raises(ServiceUnavailable, match="what is this"):
        await found()
    faults.fail_read(DiskFailed("read by a fault"))
    with pytest.raises(DiskFailed):
        await found()
    assert isinstance(await found(), Nobody)
