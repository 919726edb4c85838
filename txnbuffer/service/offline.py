"""Compaction of a log that no service has open: an engine owns it meanwhile, so the same rules hold."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from broker_io.port import Broker
from txnbuffer.config import CompactionConfig
from txnbuffer.errors import CompactionFailed
from txnbuffer.service.engine.compaction import CompactRecords
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin

POLLS = (0.05, 0.1, 0.2, 0.5)
"""Seconds between questions how far a compaction is; the last one is repeated."""

Ask: TypeAlias = Callable[..., Awaitable[Any]]
"""`ask(method, **request)` asks the service, or the engine that owns the log meanwhile."""


@contextlib.asynccontextmanager
async def owning(
    broker: Broker, owner: str, config: CompactionConfig, compact_records: CompactRecords | None = None
) -> AsyncIterator[Ask]:
    """Own the log of a broker and ask its engine. `compact_records` compacts topics instead of the broker."""
    engine = await Engine.start(broker, owner=owner, compaction=config, compact_records=compact_records)
    methods = ServiceAdmin(engine).methods()

    async def ask(method: str, **request: Any) -> Any:
        return await methods[method](request)

    try:
        yield ask
    finally:
        await engine.stop()


async def compacted(ask: Ask, topic: str, number: int, show: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Wait for the compaction of a number; the statistics.

    `show` is called with the state, and the bytes done and expected. Raises CompactionFailed.
    """
    for polls in range(sys.maxsize):
        (row,) = await ask("Compactions", topic=topic)
        run, state = row["run"], row["state"]
        if run["number"] >= number and state not in ("waiting", "running"):
            break
        show(state, run["bytes_done"], run["bytes_expected"])
        await asyncio.sleep(POLLS[min(polls, len(POLLS) - 1)])
    show(state, run["bytes_done"], run["bytes_done"])
    if run["problem"] is not None:
        raise CompactionFailed(topic, run["problem"])
    return {"topic": topic, "upto": run["upto"], **run["statistics"]}


async def compact_all(ask: Ask, topics: Sequence[str]) -> tuple[list[dict[str, Any]], list[CompactionFailed]]:
    """Compact topics, one after the other; the statistics of each, and the errors of the others."""
    rows: list[dict[str, Any]] = []
    failures: list[CompactionFailed] = []
    numbers = [(await ask("Compact", topic=topic))["run"] for topic in topics]  # all come before what is due
    for topic, number in zip(topics, numbers, strict=True):
        try:
            rows.append(await compacted(ask, topic, number, lambda *_: None))
        except CompactionFailed as error:
            failures.append(error)
    return rows, failures
