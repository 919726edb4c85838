"""An embedded log without file descriptors at its start: its topics continue once there are some, without a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from raw_session import transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io.errors import TooManyFiles
from broker_io.memory import MemoryBroker
from txnbuffer.errors import RegistrationFailed
from txnbuffer.model import Outcome
from txnbuffer.service.engine.deletion import delete_topic
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin

NO_FILE = TooManyFiles("topics/3/1-0.log: Too many open files: the topic can't be read; raise the limit (ulimit -n)")


class Descriptors:
    """`lack`: topic a can't be read."""

    lack = True


@pytest.fixture
def broker():
    with MemoryBroker() as opened:
        yield opened


@asynccontextmanager
async def successor(broker: MemoryBroker, descriptors: Descriptors) -> AsyncIterator[Engine]:
    """The next owner of a log with a committed record in each of the topics a and b."""
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        for number, topic in enumerate("ab"):
            await session.write((topic, transactional([ids[number]], b"first")))
            assert await session.commit(ids[number], [topic], [1]) is Outcome.COMMIT
    ledgers = broker.ledgers

    def asked(name):
        if name == "a" and descriptors.lack:
            raise NO_FILE
        return ledgers(name)

    with patch.object(broker, "ledgers", asked):
        async with engine_on(broker) as engine:
            yield engine


async def test_a_topic_without_a_descriptor_at_the_start_continues_later(broker):
    descriptors = Descriptors()
    async with successor(broker, descriptors) as engine:
        assert engine.topics.get("a").problem is NO_FILE
        assert "retried" in (await ServiceAdmin(engine).describe({"topic": "a"}))["waits_for"]
        session, ids = await session_on(engine, "b")
        await session.write(("b", transactional([ids[0]], b"meanwhile")))
        assert await session.commit(ids[0], ["b"], [1]) is Outcome.COMMIT
        assert await session.write(("a", transactional([ids[1]])))  # it fails
        with pytest.raises(RegistrationFailed, match="raise the limit"):
            await session.register("a")
        assert not engine.coordinator.ready  # an older owner may have decided a transaction in the topic
        descriptors.lack = False
        await eventually(lambda: engine.coordinator.ready)
        assert engine.topics.get("a").obstacle is None
        await session.register("a")
        assert not await session.write(("a", transactional([ids[2]], b"later")))
        assert await session.commit(ids[2], ["a"], [1]) is Outcome.COMMIT
        assert visible(broker, "a") == {b"first": 1, b"later": 1}
        assert visible(broker, "b") == {b"first": 1, b"meanwhile": 1}


async def test_a_topic_that_is_recovered_late_begins_a_version_of_its_owner(broker):
    descriptors = Descriptors()
    async with successor(broker, descriptors) as engine:
        descriptors.lack = False
        await eventually(lambda: engine.coordinator.ready)
        versions = {name: engine.topics.get(name).followed.failover.versions for name in "ab"}
        assert [len(one) for one in versions.values()] == [2, 2]
        assert [one[0].seqno for one in versions.values()] == [1, 1]


async def test_a_topic_that_is_deleted_while_it_cannot_be_read_is_not_created_again(broker):
    descriptors = Descriptors()
    async with successor(broker, descriptors) as engine:
        await delete_topic(engine, "a")
        descriptors.lack = False
        await eventually(lambda: engine.coordinator.ready)
        await eventually(lambda: "a" not in engine.coordinator.topics())
        await eventually(lambda: not engine.topics._looked_up)
        assert "a" not in broker.topics()
