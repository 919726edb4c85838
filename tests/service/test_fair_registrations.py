"""A client that registers or opens many topics does not keep the single topic of another client waiting for them."""

from __future__ import annotations

import pytest
from raw_session import RawSession
from service_setup import engine_on, eventually, session_on

from broker_io.batch import Batch, Blobs
from broker_io.memory.broker import MemoryBroker
from txnbuffer.rpc.frames import ClientFrame, NamedRequest
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.topics.topics import OPENED_AT_ONCE

MANY = 20 * OPENED_AT_ONCE
BEFORE = 4 * OPENED_AT_ONCE
"""Topics of the other client that may be opened before the single one."""


async def ask_for_many(engine: Engine) -> RawSession:
    session, _ = await session_on(engine)
    rows = tuple(NamedRequest(1000 + number, f"many-{number}") for number in range(MANY))
    session.link.send(ClientFrame(registers=rows))
    return session


@pytest.mark.parametrize("cluster_mode", [False, True])
async def test_a_single_registration_does_not_wait_for_those_of_another_client(cluster_mode: bool) -> None:
    async with engine_on(MemoryBroker(), cluster_mode=cluster_mode) as engine:
        other, _ = await session_on(engine)
        many = await ask_for_many(engine)
        await other.register("single")
        registered = sum(name.startswith("many-") for name in engine.coordinator.topics())
        assert registered <= BEFORE
        await many.until(lambda: len(many.answers) == MANY)


async def test_a_plain_send_does_not_wait_for_the_topics_of_another_client() -> None:
    async with engine_on(MemoryBroker()) as engine:
        other, _ = await session_on(engine)
        many, _ = await session_on(engine)
        plain = Batch(Blobs.of([b"k"]), Blobs.of([b"v"]))
        many.send(*((f"many-{number}", plain) for number in range(MANY)))
        await other.write(("single", plain))
        assert sum(topic.writer is not None for topic in engine.topics.by_name.values()) <= BEFORE
        await eventually(lambda: all(topic.writer is not None for topic in engine.topics.by_name.values()))
