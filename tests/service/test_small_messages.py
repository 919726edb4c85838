"""A service whose logs take only small messages: it commits what fits, refuses what doesn't, and continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from raw_session import RawSession, transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io import open_broker
from broker_io.errors import MessageTooLarge
from broker_io.memory.broker import MemoryBroker
from broker_io.port import Broker
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import Commit
from txnbuffer.errors import InvalidConfiguration, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort, ClientFrame
from txnbuffer.service.engine.engine import Engine

KIB = 1024
TOPICS = [f"{number:03}-" + "long" * 60 for number in range(87)]


def opened(kind: str, directory: Path, limit: int) -> Broker:
    if kind == "memory":
        return MemoryBroker(max_message_bytes=limit)
    return open_broker(f"file:{directory}", max_message_bytes=limit)


def largest(broker: Broker, topic: str) -> int:
    sizes = [0]
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            sizes += placed.messages.sizes().tolist()
    return max(sizes)


async def commit_all(session: RawSession, ids: range, *topics: str) -> Counter[Any]:
    """Commit all at once; return the answers."""
    first = session.request + 1
    session.request += len(ids)
    commits = [Commit(first + at, TxnId(0, least), topics, (1,) * len(topics)) for at, least in enumerate(ids)]
    session.link.send(ClientFrame(commits=tuple(commits)))
    await session.until(lambda: len(session.answers) == len(ids))
    found = Counter(session.answers.values())
    session.answers.clear()
    return found


def all_ended(engine: Engine) -> bool:
    followed_topics = [topic.followed for topic in engine.topics.by_name.values()]
    return not any(followed is not None and len(followed.buffer.ongoing) for followed in followed_topics)


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_many_commits_at_once_go_into_groups_that_fit(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 16 * KIB) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b", ids=5000)
            assert await session.write(("a", transactional(ids)), ("b", transactional(ids))) == []
            assert await commit_all(session, ids, "a", "b") == {Outcome.COMMIT: 5000}
            await eventually(lambda: all_ended(engine))
            assert not engine.ended.done()
        assert 8 * KIB < largest(broker, DECISIONS) <= 16 * KIB
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b", ids=2)
            assert await session.write(("a", transactional(ids)), ("b", transactional(ids))) == []
            assert await commit_all(session, ids, "a", "b") == {Outcome.COMMIT: 2}
        assert visible(broker, "a") == visible(broker, "b") == {b"v": 5002}
        assert largest(broker, "a") <= 16 * KIB


@pytest.mark.parametrize("kind", ["file"])
async def test_one_commit_that_fits_no_message_is_refused_and_the_service_continues(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path, 16 * KIB) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, *TOPICS)
            refused, taken, after = ids[:3]
            for least, topics in ((refused, TOPICS), (taken, TOPICS[:60]), (after, TOPICS[:2])):
                assert await session.write(*((topic, transactional([least])) for topic in topics)) == []
            answer = await session.commit(refused, TOPICS, [1] * len(TOPICS))
            assert isinstance(answer, MessageTooLarge)
            assert f"the commit of 0:{refused} names 87 topics and needs 2" in str(answer)
            assert "the limit is 16384: commit fewer topics in one transaction" in str(answer)
            assert await session.commit(taken, TOPICS[:60], [1] * 60) is Outcome.COMMIT
            assert isinstance(await session.commit(refused, TOPICS, [1] * len(TOPICS)), TransactionAborted)
            assert await session.commit(after, TOPICS[:2], [1, 1]) is Outcome.COMMIT
            await eventually(lambda: len(engine.topics.by_name[TOPICS[-1]].followed.buffer.ongoing) == 0)
        async with engine_on(broker) as engine:
            again, _ = await session_on(engine, "c")
            assert isinstance(await again.commit(refused, TOPICS, [1] * len(TOPICS)), TransactionAborted)
            await eventually(lambda: all_ended(engine))
        assert visible(broker, TOPICS[0]) == visible(broker, TOPICS[1]) == {b"v": 2}
        assert visible(broker, TOPICS[2]) == visible(broker, TOPICS[59]) == {b"v": 1}
        assert visible(broker, TOPICS[60]) == {}


async def test_a_log_made_with_larger_messages_continues_with_small_ones(tmp_path: Path) -> None:
    with opened("file", tmp_path, 1024 * KIB) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b", ids=5000)
            assert await session.write(("a", transactional(ids)), ("b", transactional(ids))) == []
            assert await commit_all(session, ids, "a", "b") == {Outcome.COMMIT: 5000}
        before = largest(broker, DECISIONS)
        assert before > 8 * KIB
    with opened("file", tmp_path, 4 * KIB) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b", ids=1000)
            assert await session.write(("a", transactional(ids)), ("b", transactional(ids))) == []
            assert await commit_all(session, ids, "a", "b") == {Outcome.COMMIT: 1000}
            await eventually(lambda: all_ended(engine))
            for topic in engine.topics.by_name:
                await engine.snapshots.snapshot([topic])
            assert engine.snapshots.problem is None
        assert visible(broker, "a") == {b"v": 6000}


async def test_snapshots_of_many_aborts_fit_small_messages(tmp_path: Path) -> None:
    with opened("file", tmp_path, 4 * KIB) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b", ids=3000)
            assert await session.write(("a", transactional(ids)), ("b", transactional(ids))) == []
            aborts = [Abort(at, TxnId(0, least), ("a", "b")) for at, least in enumerate(ids, session.request + 1)]
            session.request += len(ids)
            session.link.send(ClientFrame(aborts=tuple(aborts)))
            await eventually(lambda: all_ended(engine))
            await engine.snapshots.snapshot(["a", "b"])
            assert engine.snapshots.problem is None
        assert largest(broker, "__txnbuffer_snapshots") <= 4 * KIB


async def test_a_service_needs_messages_that_hold_a_decision() -> None:
    with pytest.raises(InvalidConfiguration, match="max_message_bytes must be at least 4096, got 1000"):
        await Engine.start(MemoryBroker(max_message_bytes=1000))
    await asyncio.sleep(0)
