"""Registering topics of a cluster that is slow to answer: one does not wait for another's answers."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import patch

from cluster_app import app_on, cluster_engine
from raw_session import stop
from service_setup import engine_on, eventually, session_on, visible

from broker_io.filelog.log import FileBroker, log
from broker_io.memory import MemoryBroker
from txnbuffer.model import Outcome
from txnbuffer.rpc.frames import ClientFrame, NamedRequest
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.topics import topics
from txnbuffer.service.topics.topics import HELD_BYTES


class SlowToMake(MemoryBroker):
    """Creates the topic `slow` only once `go` is set; `asked` is set when it should be created."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def create_topic(self, topic: str) -> None:
        if topic == "slow":
            self.asked.set()
            assert self.go.wait(120)
        super().create_topic(topic)


async def test_a_registration_does_not_wait_for_answers_about_another_topic():
    with SlowToMake() as broker:
        engine = await Engine.start(broker, cluster_mode=True)
        try:
            waiting = asyncio.create_task(app_on(engine, broker, "slow"))
            assert await asyncio.to_thread(broker.asked.wait, 60)
            app = await app_on(engine, broker, "quick")
            txn = next(app.ids)
            await app.write("quick", [txn])
            assert await app.commit(txn, "quick") is Outcome.COMMIT
            assert not waiting.done()
            broker.go.set()
            app = await waiting
            await app.write("slow", [txn := next(app.ids)])
            assert await app.commit(txn, "slow") is Outcome.COMMIT
            await eventually(lambda: visible(broker, "slow") == {b"v": 1})
        finally:
            broker.go.set()
            await stop(engine)


async def test_topics_that_are_registered_together_share_manifests(tmp_path):
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        async with engine_on(broker) as engine:
            session, _ = await session_on(engine)
            names = [f"t{number}" for number in range(60)]
            with patch.object(log, "replace_manifest", wraps=log.replace_manifest) as replaced:
                numbers = [session.request + place for place in range(1, len(names) + 1)]
                session.request += len(names)
                asked = (NamedRequest(number, name) for number, name in zip(numbers, names, strict=True))
                session.link.send(ClientFrame(registers=tuple(asked)))
                await session.until(lambda: {*numbers} <= session.answers.keys())
            assert replaced.call_count < len(names) / 2
            assert {*names} <= {*broker.topics()}
            assert not any(isinstance(answer, Exception) for answer in session.answers.values())


async def test_many_new_topics_are_created_in_steps(tmp_path):
    """Between two steps the log accepts the records of others."""
    with FileBroker.open(str(tmp_path / "log"), watermark_bytes=0) as broker:
        async with engine_on(broker) as engine:
            session, _ = await session_on(engine)
            with (
                patch.object(topics, "TOPICS_AT_ONCE", 8),
                patch.object(broker, "create_topics", wraps=broker.create_topics) as created,
            ):
                numbers = [session.request + place for place in range(1, 61)]
                session.request += len(numbers)
                asked = (NamedRequest(number, f"t{number}") for number in numbers)
                session.link.send(ClientFrame(registers=tuple(asked)))
                await session.until(lambda: {*numbers} <= session.answers.keys())
            sizes = [len(call.args[0]) for call in created.call_args_list]
            assert max(sizes) == 8
            assert {f"t{number}" for number in numbers} <= {*broker.topics()}


async def test_a_new_topic_is_queried_once_before_it_is_followed():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, broker):
            app = await app_on(engine, cluster)
            with (
                patch.object(broker, "last_position", wraps=broker.last_position) as ends,
                patch.object(broker, "ledgers", wraps=broker.ledgers) as ledgers,
            ):
                await app.session.register("a")
            asked = [call.args[0] for call in ends.call_args_list], [call.args[0] for call in ledgers.call_args_list]
            assert asked == ([], ["a", "a"])  # the second time for its epoch marker


async def test_a_thousand_topics_of_a_cluster_are_followed_by_a_few_threads():
    before = threading.active_count()
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            names = [f"t{number}" for number in range(1000)]
            app = await app_on(engine, cluster, *names)
            assert threading.active_count() - before < 64
            txn = next(app.ids)
            for name in (names[0], names[-1]):
                await app.write(name, [txn])
            assert await app.commit(txn, names[0], names[-1]) is Outcome.COMMIT
            await eventually(lambda: all(visible(cluster, name) == {b"v": 1} for name in (names[0], names[-1])))
            assert threading.active_count() - before < 64


async def test_memory_is_shared_by_all_topics_without_a_step_for_each_at_each_registration():
    with MemoryBroker() as broker:
        async with engine_on(broker) as engine:
            with patch.object(engine.topics, "_divide_memory", wraps=engine.topics._divide_memory) as shared:
                await session_on(engine, *(f"t{number}" for number in range(60)))
            assert shared.call_count < 40
            limits = [engine.topics.by_name[f"t{number}"].followed.held_limit for number in range(60)]
            assert HELD_BYTES / 1.2 < sum(limits) < HELD_BYTES * 1.2
