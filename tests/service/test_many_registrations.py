"""Registering topics of a cluster that is slow to answer: one does not wait for another's answers."""

from __future__ import annotations

import asyncio
import threading

from cluster_app import app_on
from service_setup import eventually, on_a_loop, visible

from broker_io.memory import MemoryBroker
from txnbuffer.model import Outcome
from txnbuffer.service.engine import Engine


class SlowToMake(MemoryBroker):
    """Makes the topic `slow` only once it is told to, in `go`; `asked` tells that it is to be made."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def create_topic(self, topic: str) -> None:
        if topic == "slow":
            self.asked.set()
            assert self.go.wait(120)
        super().create_topic(topic)


@on_a_loop
async def test_a_registration_does_not_wait_for_answers_about_another_topic():
    with SlowToMake() as broker:
        engine = await Engine.start(broker, shared=True)
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
            await engine.stop()
