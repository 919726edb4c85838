"""Deletion of a topic on request: refused while somebody uses the topic, and complete when it returns

The log of the topic is deleted first, at once. A crash before the rest is the same as a deletion by somebody else: the
next owner finds a snapshot without its topic, and removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from broker_io.errors import NotSupported, ServiceUnavailable, TopicNotFound
from broker_io.partitions import partition_of
from broker_io.port import PartitionedBroker
from txnbuffer.errors import OPEN_TRANSACTION, TopicInUse
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.topics.appends import ServiceTopic
from txnbuffer.service.topics.topics import FLIGHT_POLL, close_quietly

if TYPE_CHECKING:
    from txnbuffer.service.engine.engine import Engine

NOTICED_SECONDS = 10.0
"""Seconds within which the reader of a topic of a cluster reaches the end, and notices that the topic was deleted."""
GRACE, GRACE_POLL = 2.0, 0.02
"""Seconds that a deletion waits for the end of what uses the topic, and between two checks."""


async def delete_topic(engine: Engine, name: str) -> None:
    """Delete a topic and all its records; cancelling the caller does not stop it.

    Raises TopicInUse, TopicNotFound, InvalidTopicName, ForeignTopic, and NotSupported for partitions.
    """
    deleting = asyncio.ensure_future(_delete_topic(engine, name))
    deleting.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
    await asyncio.shield(deleting)


async def _delete_topic(engine: Engine, name: str) -> None:
    topics = engine.topics
    topics.check(name)
    if engine.requests.refusal is not None:
        raise engine.requests.refusal
    await asyncio.to_thread(_check_exists, engine, name)
    deadline = engine.clock.monotonic() + GRACE
    while True:
        await _wait_until_unused(engine, name, deadline)
        try:
            await _delete_if_unused(engine, name)
        except TopicInUse:
            if engine.clock.monotonic() >= deadline:
                raise  # else records of a transaction that is about to end have just come
        else:
            return


async def _delete_if_unused(engine: Engine, name: str) -> None:
    topics = engine.topics
    while (known := topics.get(name)) is not None and topics.takes_records:
        async with known.lock:
            if await _delete_owned(engine, known):
                return
    if known is not None:
        await _delete_shared(engine, known)
    else:
        await _check_unused(engine, name)
        await topics.delete_unopened(name)


def _check_exists(engine: Engine, name: str) -> None:
    broker, part = engine.broker, partition_of(name)
    if isinstance(broker, PartitionedBroker):
        whole = name if broker.partitions(name) else None
        if part is not None and broker.partitions(part.topic):
            whole = part.topic
        if whole is not None:
            raise NotSupported(
                f"topic {whole!r} is partitioned: stop what uses it, and delete it with `pulsar-admin topics "
                "delete-partitioned-topic`"
            )
    if name not in broker.topics():
        raise TopicNotFound(f"there is no topic {name!r} to delete: correct the name")


async def _delete_owned(engine: Engine, topic: ServiceTopic) -> bool:
    """Delete a topic of an embedded log: no record is appended between the check and the deletion.

    False: nothing was done, because the topic was deleted or opened again meanwhile.
    """
    topics, name = engine.topics, topic.name
    held, topic.held = topic.held, True
    gone = False
    try:
        while topic.under_way:
            await asyncio.sleep(FLIGHT_POLL)
        async with topics.snapshot_lock:
            if topics.get(name) is not topic:
                return False
            await _check_unused(engine, name)
            await topics.work(engine.broker.delete_topic, name)
            gone, topic.followed = True, None
            await topics.work(topics.manager.deleted, name)
            return True
    finally:
        if gone:
            await _forget(engine, topic)
        elif not held:
            engine.appends.release(topic)


async def _delete_shared(engine: Engine, topic: ServiceTopic) -> None:
    """Delete a topic of a cluster, and wait until the service has noticed that."""
    name = topic.name
    if topic.followed is not None:
        read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        engine.topics.when_read(topic, lambda: None if read.done() else read.set_result(None))
        try:
            async with asyncio.timeout(NOTICED_SECONDS):
                await read
        except TimeoutError:
            raise ServiceUnavailable(f"topic {name!r} could not be read to its end, and was not deleted") from None
    await _check_unused(engine, name)
    try:
        with engine.topics.deleting(name):
            await asyncio.to_thread(engine.broker.delete_topic, name)
            deadline = engine.clock.monotonic() + NOTICED_SECONDS
            while engine.topics.get(name) is topic and topic.followed is not None:
                if engine.clock.monotonic() >= deadline:
                    raise ServiceUnavailable(f"topic {name!r} was deleted, but its reader does not end: try again")
                await asyncio.sleep(FLIGHT_POLL)
            if engine.topics.get(name) is topic:
                await _forget(engine, topic)
    except BaseException:
        engine.topics.look_up(name)  # if it still exists, it is followed again
        raise


async def _forget(engine: Engine, topic: ServiceTopic) -> None:
    """Forget a deleted topic, so that its name is that of no topic again."""
    name, now = topic.name, engine.now()
    writer = engine.topics.drop(name)
    engine.appends.fail(topic, topic_deleted(name))
    engine.coordinator.topic_missing(name, now)
    engine.effects.shard_messages.missing(name)
    engine.coordinator.topic_deleted(name, now)
    engine.streams.forget(name)
    engine.wake()
    if writer is not None:
        await close_quietly(writer)


async def _wait_until_unused(engine: Engine, name: str, deadline: float) -> None:
    """Wait for uses that are about to end, such as a transaction whose markers are being written."""
    while [*_uses(engine, name)] and engine.clock.monotonic() < deadline:
        await asyncio.sleep(GRACE_POLL)


async def _check_unused(engine: Engine, name: str) -> None:
    """Raises TopicInUse with everything that still needs the topic."""
    uses = [*_uses(engine, name)]
    if await engine.trim_floors.shards(name) is not None:
        uses.append("a consumer group of another shard has a position: forget_group(GROUP, TOPIC) removes it")
    await engine.trim_floors.prove_ownership()
    uses = uses or [*_uses(engine, name)]  # something may have begun meanwhile
    if uses:
        raise TopicInUse.by(name, uses)


def _uses(engine: Engine, name: str) -> Iterator[str]:
    topic, groups = engine.topics.get(name), engine.coordinator.consumer_groups
    followed = None if topic is None else topic.followed
    open_txns = set(engine.sends.open_on(name))
    if followed is not None:
        open_txns |= {*followed.buffer.ongoing}
    for txn in sorted(open_txns):
        yield OPEN_TRANSACTION.format(txn)
    for peer in engine.streams.peers(name):
        yield f"a change stream of {peer} reads it: close it"
    for cursor in sorted(followed.cursors) if followed is not None else ():
        yield f"the durable cursor {cursor!r} is on it: remove it"
    for group, _, positions in groups.all_groups():
        held = name in groups.members(group).holders
        if held or name in positions:
            stop = "stop its members, then " if held else ""
            yield f"consumer group {group!r} reads it: {stop}forget_group({group!r}, {name!r})"
    if topic is not None and topic.compacting:
        yield "it is being compacted: wait for the end"
