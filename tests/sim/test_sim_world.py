"""The simulated world: threads, loops, clocks, disks and processes behave as real ones, and one seed decides all."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
from sim.world import Finding, World

from broker_io.environment import current
from broker_io.testing import Unsynced


def run_alone(work: Callable[[], Any], *, seed: int = 1, preemption: float = 0.3, seconds: float = 1000.0) -> Any:
    """Run a coroutine function in a world of its own; return its result."""
    results: list[Any] = []

    async def main() -> None:
        results.append(await work())

    with World(seed, preemption=preemption) as world:
        world.host("alpha").start("main", main)
        assert world.run(seconds, lambda: bool(results)), "the process did not end in time"
    return results[0]


def test_time_is_virtual() -> None:
    async def work() -> tuple[float, int]:
        clock = current().clock
        began, wall = clock.monotonic(), clock.now_ms()
        await asyncio.sleep(500.0)
        return clock.monotonic() - began, clock.now_ms() - wall

    passed, wall = run_alone(work)
    assert 500.0 <= passed < 500.1
    assert abs(wall - 500_000) < 100


def test_threads_interleave_and_locks_exclude() -> None:
    async def work() -> tuple[int, list[str]]:
        threads = current().threads
        lock, order, inside, most = threads.lock(), list[str](), 0, 0

        def add(name: str) -> None:
            nonlocal inside, most
            for _ in range(50):
                with lock:
                    inside += 1
                    most = max(most, inside)
                    current().clock.sleep(0.001)
                    inside -= 1
                order.append(name)

        running = [threads.thread(lambda name=name: add(name)) for name in "abc"]
        for thread in running:
            thread.start()
        for thread in running:
            await asyncio.to_thread(thread.join)
        return most, order

    most, order = run_alone(work)
    assert most == 1
    assert len(order) == 150
    assert order != sorted(order)
    assert run_alone(work)[1] == order
    assert run_alone(work, seed=2)[1] != order


def test_a_condition_waits_for_a_notification_or_a_time() -> None:
    async def work() -> tuple[bool, bool, float]:
        threads, clock = current().threads, current().clock
        condition, items = threads.condition(), list[int]()

        def put() -> None:
            clock.sleep(2.0)
            with condition:
                items.append(1)
                condition.notify_all()

        def take(seconds: float) -> bool:
            with condition:
                return bool(condition.wait_for(lambda: items, seconds))

        began = clock.monotonic()
        too_early = await asyncio.to_thread(take, 1.0)
        threads.thread(put).start()
        return too_early, await asyncio.to_thread(take, 10.0), clock.monotonic() - began

    too_early, found, passed = run_alone(work)
    assert (too_early, found) == (False, True)
    assert 3.0 <= passed < 3.1


def test_futures_park_their_thread_only() -> None:
    async def work() -> tuple[str, int, list[str]]:
        threads = current().threads
        future: Future[str] = Future()
        threads.timer(5.0, lambda: future.set_result("set")).start()
        pool = threads.executor(2, "pool")
        results = [pool.submit(lambda: current().process) for _ in range(5)]

        def block() -> int:
            return len(wait(results).done)

        return (
            await asyncio.to_thread(future.result, 10.0),
            await asyncio.to_thread(block),
            [r.result() for r in results],
        )

    text, count, processes = run_alone(work)
    assert (text, count) == ("set", 5)
    assert processes == ["1"] * 5


def test_what_nothing_handles_is_a_finding() -> None:
    def broken() -> None:
        raise ValueError("a bug")

    async def work() -> None:
        current().threads.thread(broken).start()
        await asyncio.sleep(1.0)

    with pytest.raises(Finding, match="a bug"):
        run_alone(work)


def test_a_killed_process_does_nothing_more_and_its_lock_ends() -> None:
    left: list[str] = []
    held: list[bool] = []

    async def first() -> None:
        disk = current().disk
        disk.make_directory("/data")
        assert disk.lock("/data/lock") is not None
        try:
            await asyncio.sleep(100.0)
            left.append("ran on")
        finally:
            with current().threads.lock():
                left.append("left a block")

    async def second() -> None:
        held.append(current().disk.lock("/data/lock") is None)

    with World(1) as world:
        process = world.host("alpha").start("first", first)
        world.run(1.0)
        world.host("alpha").start("second", second)
        world.run(1.0)
        process.kill()
        world.host("alpha").start("second", second)
        world.run(1.0)
        assert left == []
    assert held == [True, False]


def test_a_paused_process_continues_later() -> None:
    ticks: list[float] = []

    async def main() -> None:
        while True:
            await asyncio.sleep(1.0)
            ticks.append(world.now)

    with World(1) as world:
        process = world.host("alpha").start("main", main)
        world.run(5.5)
        process.pause()
        world.run(10.0)
        assert len(ticks) == 5
        process.resume()
        world.run(3.0)
    assert len(ticks) == 8
    assert 15.4 < ticks[5] < 15.6


@pytest.mark.parametrize("unsynced", Unsynced)
def test_a_power_loss_keeps_what_was_synced(unsynced: Unsynced) -> None:
    async def main() -> None:
        disk = current().disk
        file = disk.open("/file", write=True, create=True)
        file.write(0, [b"synced"])
        file.sync()
        disk.sync_directory("/")
        file.write(6, [b" and not"])
        await asyncio.sleep(100.0)

    with World(1) as world:
        host = world.host("alpha")
        process = host.start("main", main)
        world.run(1.0)
        host.lose_power(unsynced)
        assert process.dead
        found = host.disk.content("/file")
    assert found.startswith(b"synced")
    assert (found == b"synced and not") >= (unsynced is Unsynced.KEPT)


def test_a_sync_on_a_slow_disk_ends() -> None:
    async def main() -> None:
        file = current().disk.open("/file", write=True, create=True)
        for _ in range(400):
            began = world.now
            file.sync()
            took.append(world.now - began)

    took: list[float] = []
    with World(1) as world:
        world.host("alpha").sync_factor = 100.0
        world.host("alpha").start("main", main)
        world.run(1000.0)
    assert len(took) == 400
    assert 5.0 < max(took) < 10.1


@pytest.mark.parametrize("full", [True, False])
def test_a_disk_that_fails_is_noticed_once(full: bool) -> None:
    async def main() -> None:
        disk = current().disk
        file = disk.open("/file", write=True, create=True)
        with pytest.raises(FileNotFoundError):
            disk.rename("/nothing", "/file")
        assert noticed == []
        if full:
            host.disk.capacity = 0
        else:
            host.disk.fail_at(1, errno.EIO)
            host.disk.fail_at(2, errno.EIO)
        for _ in range(2):
            with pytest.raises(OSError):
                file.write(0, [b"data"])
        noticed.append("the end")

    noticed: list[str] = []
    with World(1) as world:
        host = world.host("alpha")
        host.on_disk_failure = lambda: noticed.append("a failure")
        host.start("main", main)
        world.run(10.0)
    assert noticed == ["a failure", "the end"]


def test_descriptors_run_out() -> None:
    async def work() -> int | None:
        disk: Any = current().disk
        disk.most_files = 3
        for number in range(3):
            disk.open(f"/{number}", create=True)
        with pytest.raises(OSError) as caught:
            disk.open("/another", create=True)
        return caught.value.errno

    assert run_alone(work) == errno.EMFILE


def test_clocks_jump_and_drift() -> None:
    seen: list[tuple[float, int]] = []

    async def main() -> None:
        clock = current().clock
        while True:
            await asyncio.sleep(10.0)
            seen.append((world.now, clock.now_ms()))

    with World(1) as world:
        host = world.host("alpha")
        host.start("main", main)
        world.run(10.5)
        host.clock.offset += 3600.0
        host.clock.drift(2.0)
        world.run(20.0)
    (_, wall), (first, later), (second, _) = seen[:3]
    assert 4.9 < second - first < 5.1, "a clock of twice the rate ends a sleep in half of the time"
    assert later - wall > 3_600_000


def test_what_happens_in_the_last_steps_ends_a_run() -> None:
    async def main() -> None:
        await asyncio.sleep(5.0)
        ended.append(world.now)

    ended: list[float] = []
    with World(1) as world:
        world.host("alpha").start("main", main)
        assert world.run(6.0, lambda: bool(ended), every=1_000_000)
        assert world.run(6.0, lambda: len(ended) > 1, every=1_000_000) is False


def test_the_same_seed_makes_the_same_events() -> None:
    def digest(seed: int) -> str:
        async def main() -> None:
            world.log("main", f"{current().randomness.token(4).hex()} at {current().clock.monotonic()}")
            await asyncio.gather(*(asyncio.to_thread(current().clock.sleep, 0.1) for _ in range(5)))

        with World(seed, preemption=0.5) as world:
            world.host("alpha").start("main", main)
            world.run(10.0)
        return world.digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
