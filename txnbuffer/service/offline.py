"""What commands do to a log that no service has open: an engine owns it meanwhile, so the same rules hold."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from broker_io.environment import current
from broker_io.errors import ServiceUnavailable, StillHeld
from broker_io.port import AnnotatedBroker, Broker
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.config import CompactionConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import decode_owner_address
from txnbuffer.errors import CompactionFailed
from txnbuffer.model import TxnId
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.compaction import CompactRecords
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.standby.takeover import take_if_free

POLLS = (0.05, 0.1, 0.2, 0.5)
"""Seconds between questions how far a compaction is; the last one is repeated."""

Ask: TypeAlias = Callable[..., Awaitable[Any]]
"""`ask(method, **request)` asks the service, or the engine that owns the log meanwhile."""
MARKER_SECONDS = 60.0
"""Seconds within which the topics of an aborted transaction must have its markers."""


@contextlib.asynccontextmanager
async def owning(
    broker: Broker, owner: str, config: CompactionConfig, compact_records: CompactRecords | None = None
) -> AsyncIterator[Ask]:
    """Own the log of a broker and ask its engine. `compact_records` compacts topics instead of the broker."""
    engine = await Engine.start(broker, owner=owner, compaction=config, compact_records=compact_records)
    try:
        yield _asking(engine)
    finally:
        await engine.stop()


def _asking(engine: Engine) -> Ask:
    methods = ServiceAdmin(engine).methods()

    async def ask(method: str, **request: Any) -> Any:
        return await methods[method](request)

    return ask


async def aborted(broker: Broker, txn: TxnId, owner: str, *, cluster_mode: bool) -> dict[str, Any]:
    """Abort a transaction of a log without a service, and write its markers; answers as the service does.

    Owns all shards of a cluster that have no service: each writes the markers of its own topics. Raises StillHeld while
    a service owns the shard of the transaction.
    """
    count = shards_of(broker)
    engines: dict[int, Engine] = {}
    try:
        # The shard of the transaction first: if a service has it, nothing is owned.
        for number in sorted(range(count), key=lambda number: number != txn.most):
            try:
                engines[number] = await _start(broker, owner, Shard(number, count), cluster_mode=cluster_mode)
            except StillHeld:
                if not engines:
                    raise StillHeld(
                        f"a service owns shard {number} of the log, so only that service can abort transaction {txn}: "
                        "find out why it does not answer, or stop it"
                    ) from None
        first = next(iter(engines.values()))
        answer: dict[str, Any] = await _asking(first)("Abort", txn=str(txn))
        await _until_ended(txn, [*engines.values()])
        return answer
    finally:
        for engine in engines.values():
            await engine.stop()


async def _start(broker: Broker, owner: str, shard: Shard, *, cluster_mode: bool) -> Engine:
    """Own a shard that no service owns. Clients still look for the next service at the address of the last one."""
    decisions = shard.topic(DECISIONS)
    address = await asyncio.to_thread(_last_address, broker, decisions) if cluster_mode else ""
    note = broker.annotation(decisions) if isinstance(broker, AnnotatedBroker) else None
    annotated = None if note is None else decode_owner_address(note)
    limits = Limits(create_topics=annotated is None or annotated.creates_topics)
    state = await asyncio.to_thread(take_if_free, broker, shard) if cluster_mode else None
    return await Engine.start(
        broker, owner=owner, address=address, shard=shard, cluster_mode=cluster_mode, standby_state=state, limits=limits
    )


def _last_address(broker: Broker, decisions: str) -> str:
    """Where the last owner of a decision log served; empty if it said nothing. Raises ServiceUnavailable."""
    try:
        return ServiceDiscovery(broker, "", decisions).newest_address()
    except ServiceUnavailable:
        if decisions not in broker.topics():
            raise  # it never had an owner, and must not get its first one here
        return ""


async def _until_ended(txn: TxnId, engines: Sequence[Engine]) -> None:
    """Wait for the markers of a decided transaction. Raises ServiceUnavailable."""
    clock = current().clock
    deadline = clock.monotonic() + MARKER_SECONDS
    while left := [
        name
        for engine in engines
        for name, topic in engine.topics.by_name.items()
        if topic.followed is not None and txn in topic.followed.buffer.ongoing
    ]:
        if clock.monotonic() >= deadline:
            raise ServiceUnavailable(
                f"transaction {txn} is decided, but {', '.join(left)} got no marker within {MARKER_SECONDS:g} s: start "
                "a service, which writes it, or try again"
            )
        await asyncio.sleep(POLLS[0])


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
