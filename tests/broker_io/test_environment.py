"""The current environment follows the code that is started in it, and the threads of the ports work as such."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty

import pytest

from broker_io.environment import Environment, Threads, current, use
from broker_io.system import SystemDisk, SystemNetwork, SystemRandomness, SystemThreads
from broker_io.testing import SeededRandomness

SECONDS = 10.0
"""More than any wait of these tests takes."""


@pytest.fixture
def other() -> Iterator[Environment]:
    environment = replace(current(), process="another one")
    with use(environment):
        yield environment


@pytest.fixture
def threads() -> Threads:
    return SystemThreads()


def ran(start: Callable[[Callable[[], None]], object]) -> Environment:
    """The environment of code that is started in some way."""
    found: list[Environment] = []
    done = threading.Event()

    def work() -> None:
        found.append(current())
        done.set()

    start(work)
    assert done.wait(SECONDS)
    return found[0]


# --- the current environment ---


def test_the_real_machine_is_the_default() -> None:
    assert current() is current()
    assert current().process == str(os.getpid())


def test_the_environment_is_another_one_within_a_block_only() -> None:
    before, outer, inner = current(), replace(current(), process="outer"), replace(current(), process="inner")
    with use(outer):
        with use(inner):
            assert current() is inner
        assert current() is outer
        with pytest.raises(ZeroDivisionError), use(inner):
            raise ZeroDivisionError
        assert current() is outer
    assert current() is before


def test_threads_inherit_the_environment_of_their_starter(other: Environment) -> None:
    assert ran(lambda work: other.threads.thread(work).start()) is other


def test_a_thread_has_the_environment_in_which_it_was_started_not_made(other: Environment) -> None:
    def start(work: Callable[[], None]) -> None:
        thread = other.threads.thread(work)
        with use(replace(other, process="starter")):
            thread.start()

    assert ran(start).process == "starter"


def test_timers_inherit_the_environment_of_their_starter(other: Environment) -> None:
    assert ran(lambda work: other.threads.timer(0.0, work).start()) is other


def test_executors_inherit_the_environment_of_their_creator(other: Environment) -> None:
    with other.threads.executor(2, "some") as executor, use(replace(other, process="submitter")):
        assert executor.submit(current).result(SECONDS) is other


def test_tasks_and_callbacks_inherit_the_environment(other: Environment) -> None:
    async def main() -> list[Environment]:
        async def task() -> Environment:
            return current()

        loop = asyncio.get_running_loop()
        called: asyncio.Future[Environment] = loop.create_future()
        loop.call_soon_threadsafe(lambda: called.set_result(current()))
        return [await asyncio.create_task(task()), await called, await asyncio.to_thread(current)]

    assert asyncio.run(main()) == [other] * 3


def test_what_a_thread_uses_does_not_reach_its_starter(other: Environment) -> None:
    entered = []

    def work() -> None:
        entered.append(use(replace(other, process="inside")).__enter__())

    thread = other.threads.thread(work)
    thread.start()
    thread.join(SECONDS)
    assert entered
    assert current() is other


def test_a_forked_child_has_its_own_process_id() -> None:
    child = os.fork()
    if not child:
        os._exit(0 if current().process == str(os.getpid()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- threads ---


def test_a_thread_is_known_to_itself_and_can_be_joined(threads: Threads) -> None:
    seen: list[bool] = []
    go = threads.event()

    def work() -> None:
        go.wait()
        seen.append(thread.is_current())

    thread = threads.thread(work, name="some", daemon=True)
    thread.start()
    thread.join(0.01)
    assert seen == []
    go.set()
    thread.join()
    assert seen == [True]
    assert not thread.is_current()


def test_a_timer_calls_once_unless_it_is_cancelled(threads: Threads) -> None:
    called, never = threads.event(), threads.event()
    cancelled = threads.timer(0.05, never.set)
    cancelled.start()
    cancelled.cancel()
    threads.timer(0.0, called.set).start()
    assert called.wait(SECONDS)
    assert not never.wait(0.2)


def test_an_executor_runs_as_many_calls_at_once_as_it_has_workers(threads: Threads) -> None:
    go, changed, running = threads.event(), threads.condition(), [0]

    def work() -> int:
        with changed:
            running[0] += 1
            changed.notify_all()
        go.wait(SECONDS)
        return running[0]

    with threads.executor(2, "some") as executor:
        calls = [executor.submit(work) for _ in range(3)]
        with changed:
            assert changed.wait_for(lambda: running[0] == 2, SECONDS)
            assert not changed.wait_for(lambda: running[0] > 2, 0.05)
        go.set()
        assert max(call.result(SECONDS) for call in calls) == 3
    with pytest.raises(RuntimeError):
        executor.submit(work)


def test_one_thread_at_a_time_has_a_lock(threads: Threads) -> None:
    lock, taken = threads.lock(), []
    with lock:
        assert not lock.acquire(timeout=0.01)
        other = threads.thread(lambda: taken.append(lock.acquire()))
        other.start()
        other.join(0.01)
        assert taken == []
    other.join(SECONDS)
    assert taken == [True]
    lock.release()


def test_a_thread_can_take_a_reentrant_lock_again(threads: Threads) -> None:
    lock, taken = threads.reentrant_lock(), []
    with lock, lock:
        other = threads.thread(lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join(SECONDS)
    assert taken == [False]


def test_a_condition_releases_its_lock_while_it_waits(threads: Threads) -> None:
    condition, values = threads.condition(), []

    def work() -> None:
        with condition, condition:  # its lock is reentrant
            values.append(1)
            condition.notify()

    with condition:
        assert not condition.wait(0.01)
        threads.thread(work).start()
        assert condition.wait_for(lambda: values, SECONDS) == [1]


def test_an_event_stays_set_until_it_is_cleared(threads: Threads) -> None:
    event = threads.event()
    assert not event.is_set()
    assert not event.wait(0.01)
    event.set()
    assert event.is_set()
    assert event.wait()
    event.clear()
    assert not event.is_set()


def test_a_queue_keeps_the_order_and_waits(threads: Threads) -> None:
    queue = threads.queue()
    with pytest.raises(Empty):
        queue.get_nowait()
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    threads.timer(0.02, lambda: [queue.put(each) for each in (1, 2, None)]).start()
    assert [queue.get(), queue.get(timeout=SECONDS), queue.get_nowait()] == [1, 2, None]


# --- the other ports of the real machine ---


@pytest.mark.parametrize("randomness", [SystemRandomness(), SeededRandomness()])
def test_random_values_are_in_their_range(randomness: SystemRandomness | SeededRandomness) -> None:
    assert [len(randomness.token(size)) for size in (0, 1, 16)] == [0, 1, 16]
    assert randomness.token(16) != randomness.token(16)
    assert {randomness.below(3) for _ in range(200)} == {0, 1, 2}
    drawn = [randomness.uniform(2.0, 3.0) for _ in range(50)]
    assert 2.0 <= min(drawn) < max(drawn) <= 3.0


def test_all_of_a_pipe_is_read(tmp_path: Path) -> None:
    pipe, disk = str(tmp_path / "pipe"), SystemDisk()
    os.mkfifo(pipe)
    content = b"x" * 200_000
    SystemThreads().thread(lambda: Path(pipe).write_bytes(content), daemon=True).start()
    assert disk.read(pipe) == content


def test_an_address_is_probed_and_listened_at() -> None:
    network = SystemNetwork()
    with network.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        network.probe("127.0.0.1", port, SECONDS)
        with pytest.raises(OSError, match="in use"):
            network.check_free("127.0.0.1", port)
    with pytest.raises(OSError, match="refused"):
        network.probe("127.0.0.1", port, SECONDS)
    network.check_free("127.0.0.1", port)
    assert network.host_name() == socket.gethostname()
