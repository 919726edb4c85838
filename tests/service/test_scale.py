"""Many transactions, topics and sessions at once, with bounded memory; `make soak` runs the full numbers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from raw_session import InProcess, RawSession, transactional
from service_setup import engine_on, eventually, visible

from broker_io import open_broker
from txnbuffer.coordinator.messages import Commit
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame

FULL = os.environ.get("SOAK") == "full"
TRANSACTIONS, TOPICS, SESSIONS, MIB_MORE = (10_000, 1_000, 500, 400) if FULL else (1_000, 50, 50, 200)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_many_transactions_topics_and_sessions_at_once(tmp_path):
    asyncio.run(asyncio.wait_for(many(f"file:{tmp_path}"), 280))


async def many(address: str) -> None:
    topics = [f"topic-{number}" for number in range(TOPICS)]
    with open_broker(address) as broker:
        async with engine_on(broker) as engine:
            before = resident_mib()
            sessions = [RawSession(InProcess(engine)) for _ in range(SESSIONS)]
            each = TRANSACTIONS // SESSIONS
            opened = await asyncio.gather(
                *(begin(session, topics, number, each) for number, session in enumerate(sessions))
            )
            assert len(engine.topics.by_name) == TOPICS
            ongoing = sum(len(topic.followed.buffer.ongoing) for topic in engine.topics.by_name.values())
            assert ongoing == TRANSACTIONS
            assert resident_mib() - before < MIB_MORE
            await asyncio.gather(
                *(end(session, ids, topic) for session, (ids, topic) in zip(sessions, opened, strict=True))
            )
            await eventually(lambda: not any(topic.followed.buffer.ongoing for topic in engine.topics.by_name.values()))
            assert resident_mib() - before < MIB_MORE
            expected = sum(len(ids) for ids, topic in opened if topic == topics[0])
            assert visible(broker, topics[0]) == {b"v" * 100: expected}


async def begin(session: RawSession, topics: list[str], number: int, count: int) -> tuple[range, str]:
    """One session with open transactions on one topic; sessions use all topics in turn."""
    await session.hello()
    mine = topics[number % len(topics) :: SESSIONS] or [topics[number % len(topics)]]
    for topic in mine:
        await session.register(topic)
    ids = await session.lease(count)
    assert await session.write((mine[0], transactional(ids, b"v" * 100))) == []
    return ids, mine[0]


async def end(session: RawSession, ids: range, topic: str) -> None:
    commits = tuple(Commit(10_000 + one, TxnId(0, one), (topic,), (1,)) for one in ids)
    session.link.send(ClientFrame(commits=commits))
    await session.until(lambda: all(10_000 + one in session.answers for one in ids), seconds=200)
    assert {session.answers[10_000 + one] for one in ids} == {Outcome.COMMIT}
