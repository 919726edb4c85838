"""The scrub: everything is read again and again, a little at a time, on whichever machine it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker_io.errors import Damaged, Error, NotLive
from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from txnbuffer.service.servers.http_server import HttpServer, metrics
from txnbuffer.service.topics import scrub as module
from txnbuffer.service.topics.scrub import LEAST_BYTES, LEAST_SECONDS, PART_BYTES, Scrub


class StoredTopics:
    """A broker with a ledger of a size for each topic; `reads` are the parts that were verified."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.reads: list[tuple[str, int, int | None]] = []
        self.repaired: tuple[str, ...] = ()
        self.errors: dict[str, list[Error]] = {}
        self.damages: dict[str, Error] = {}

    def topics(self) -> list[str]:
        return [*self.sizes]

    def ledgers(self, topic: str) -> list[Ledger]:
        return [Ledger(1, 1, self.sizes[topic], closed=False, original=True)]

    def check_stored(self, topic: str, ledger: int, start: int = 0, size: int | None = None) -> int:
        if errors := self.errors.get(topic):
            raise errors.pop(0)
        self.reads.append((topic, start, size))
        end = self.sizes[topic] if size is None else start + size
        return end if end < self.sizes[topic] else 0

    def damaged_topics(self) -> dict[str, Error]:
        return self.damages

    def on_damage(self, notify: Callable[[], object]) -> Callable[[], object]:
        return notify


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of all pauses, which take none."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", pause)
    return found


async def until_passes(scrub: Scrub, count: int) -> None:
    task = asyncio.ensure_future(scrub.run())
    while scrub.passes < count and not task.done():
        await asyncio.wait([task], timeout=0.001)
    task.cancel()


async def test_first_pass_is_fast_and_later_ones_take_their_time(pauses: list[float]) -> None:
    broker = StoredTopics(a=3 * PART_BYTES + 1, b=1)
    scrub = Scrub(broker, 1000)  # type: ignore[arg-type]  # has what the scrub uses
    await until_passes(scrub, 2)
    parts = [("a", at * PART_BYTES, PART_BYTES) for at in range(4)]
    assert broker.reads[:7] == [("a", 0, None), ("b", 0, None), *parts, ("b", 0, PART_BYTES)]
    assert 0 < pauses[0] <= LEAST_SECONDS  # between two passes
    assert pauses[1:4] == [PART_BYTES / 1000] * 3


async def test_many_small_files_are_paid_for_too(pauses: list[float]) -> None:
    broker = StoredTopics(**{f"t{number:03}": 1 for number in range(100)})
    scrub = Scrub(broker, 1000)  # type: ignore[arg-type]  # as above
    await until_passes(scrub, 2)
    assert sum(pause == PART_BYTES / 1000 for pause in pauses) >= 100 * LEAST_BYTES // PART_BYTES


async def test_rate_of_0_reads_everything_once() -> None:
    broker = StoredTopics(a=PART_BYTES)
    scrub = Scrub(broker, 0)  # type: ignore[arg-type]  # as above
    await scrub.run()
    await scrub.run()
    assert broker.reads == [("a", 0, None)]


async def test_pass_goes_on_where_it_was_cancelled(pauses: list[float]) -> None:
    """A machine of a pair changes its role in the middle of one."""
    broker = StoredTopics(a=1, b=1, c=1)
    broker.errors["b"] = [NotLive("a copy replaces the log")] * 1_000_000
    scrub = Scrub(broker, 1000)  # type: ignore[arg-type]  # as above
    task = asyncio.ensure_future(scrub.run())
    while scrub.problem is None:
        await asyncio.wait([task], timeout=0.001)
    task.cancel()
    broker.errors.clear()
    await until_passes(scrub, 1)
    topics = [topic for topic, _, _ in broker.reads]
    until = topics[: topics.index("c") + 1]
    assert [*dict.fromkeys(until)] == ["a", "b", "c"]
    assert until.count("a") == 1  # a thread may still have read b when the pass was cancelled
    assert scrub.problem is None


async def test_damage_ends_the_topic_and_not_the_pass(pauses: list[float]) -> None:
    broker = StoredTopics(a=1, b=1)
    broker.errors["a"] = [error := Damaged("1-0.log", 7, "the checksum is wrong")]
    broker.damages = {"a": error}
    scrub = Scrub(broker, 1000)  # type: ignore[arg-type]  # as above
    await until_passes(scrub, 1)
    assert broker.reads[0] == ("b", 0, None)
    assert scrub.problem is None  # the damage itself is told


async def test_age_is_that_of_the_last_complete_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    scrub = Scrub(StoredTopics(a=1), 0)  # type: ignore[arg-type]  # as above
    monkeypatch.setattr(scrub, "_monotonic", lambda: now)
    scrub._completed = 90.0
    assert scrub.age == 10.0
    await scrub.run()
    assert scrub.age == 0.0
    now = 130.0
    assert scrub.age == 30.0


async def test_broker_that_stores_nothing_itself_is_not_read() -> None:
    scrub = Scrub(MemoryBroker())
    await scrub.run()
    assert (scrub.passes, scrub.damaged) == (0, {})


async def test_standby_shows_its_damage_and_the_age_of_its_scrub() -> None:
    broker = StoredTopics(a=1)
    broker.damages, broker.repaired = {"a": Damaged("1-0.log", 7, "the checksum is wrong")}, ("2-0.log",)
    server = HttpServer()
    server.scrub = Scrub(broker)  # type: ignore[arg-type]  # as above
    assert server._health()["damaged"] == ["a"]
    found = {metric.name: metric.value for metric in metrics(None, scrub=server.scrub)}
    assert (found["topics_damaged"], found["files_repaired"], found["scrubs"]) == (1, 1, 0)
    assert found["scrub_age_seconds"] >= 0
