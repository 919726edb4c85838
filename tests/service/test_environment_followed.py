"""A transaction, its service and its readers run in the environment in which they were opened, and nowhere else."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from source_tree import PACKAGES, within

from broker_io.environment import Environment, current, use
from broker_io.system import ContextThread, SystemClock, SystemThreads
from broker_io.testing import SeededRandomness
from txnbuffer import connect

YEARS = 10 * 365 * 86_400_000
"""Milliseconds that the clock of the environment is ahead."""


class LateClock(SystemClock):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def now_ms(self) -> int:
        self.calls["now_ms"] += 1
        return super().now_ms() + YEARS

    def monotonic(self) -> float:
        self.calls["monotonic"] += 1
        return super().monotonic() + 1e6


class RecordedRandomness(SeededRandomness):
    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[str] = []

    def token(self, size: int) -> bytes:
        token = super().token(size)
        self.tokens.append(token.hex())
        return token


class RecordedThreads(SystemThreads):
    """Threads that find out in which environment their calls run."""

    def __init__(self) -> None:
        self.names: set[str | None] = set()
        self.ran_in: list[Environment] = []

    def thread(self, work: Callable[[], object], *, name: str | None = None, daemon: bool = False) -> ContextThread:
        self.names.add(name)
        return super().thread(self._noted(work), name=name, daemon=daemon)

    def executor(self, workers: int, name: str) -> Executor:
        self.names.add(name)
        executor = super().executor(workers, name)
        submit = executor.submit

        def noting(call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
            return submit(self._noted(call), *arguments, **options)

        executor.submit = noting  # type: ignore[method-assign] # an executor has no hook for its calls
        return executor

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self.ran_in.append(current())
            return call(*arguments, **options)

        return noted


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of product modules that reach the machine past the ports."""
    found: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if within(caller, *PACKAGES) and caller != "broker_io.system":
                found.append(f"{caller} calls {name}")
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in ("monotonic", "time", "time_ns", "sleep"):
        watch(time, name)
    for name in ("token_bytes", "token_hex"):
        watch(secrets, name)
    for name in ("random", "randrange", "uniform"):
        watch(random, name)
    for owner in (threading.Thread, threading.Condition, threading.Event, ThreadPoolExecutor):
        watch(owner, "__init__")
    return found


async def publish_times() -> list[int]:
    """Commit a transaction over two topics and read it."""
    times: list[int] = []
    async with connect("memory:") as client:
        async with client.transaction(name="sender", number=1) as txn:
            await txn.send("a", b"1", key="k")
            await txn.send("b", b"2")
        for topic in ("a", "b"):
            async with await client.reader(topic) as reader:
                batch = await reader.read(timeout=60.0)
                assert batch is not None
                times += batch.publish_times.tolist()
    return times


def publish_times_without_asyncio() -> list[int]:
    with connect("memory:") as client:
        with client.transaction() as txn:
            txn.send("a", b"1")
        with client.reader("a") as reader:
            batch = reader.read(timeout=60.0)
            assert batch is not None
            return batch.publish_times.tolist()


@pytest.fixture
def clock() -> LateClock:
    return LateClock()


@pytest.fixture
def randomness() -> RecordedRandomness:
    return RecordedRandomness()


@pytest.fixture
def threads() -> RecordedThreads:
    return RecordedThreads()


@pytest.mark.parametrize("run", [lambda: asyncio.run(publish_times()), publish_times_without_asyncio])
def test_a_transaction_runs_in_the_environment_of_its_caller(
    run: Callable[[], list[int]],
    clock: LateClock,
    randomness: RecordedRandomness,
    threads: RecordedThreads,
    direct: list[str],
) -> None:
    environment = replace(current(), clock=clock, randomness=randomness, threads=threads)
    before = SystemClock().now_ms()
    with use(environment):
        times = run()
    assert direct == []
    assert min(times) >= before + YEARS
    assert min(clock.calls.values()) > 0
    assert randomness.tokens
    assert "txnbuffer-snapshots" in threads.names
    assert threads.ran_in
    assert all(each is environment for each in threads.ran_in)
