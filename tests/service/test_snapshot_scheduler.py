"""The snapshot scheduler: what happens before the state of topics is captured."""

from __future__ import annotations

import pytest
from service_setup import engine_on, session_on

from broker_io.memory import MemoryBroker
from txnbuffer.service.topics.upkeep import SnapshotScheduler


async def test_listener_is_called_before_each_capture() -> None:
    async with engine_on(MemoryBroker()) as engine:
        await session_on(engine, "a", "b")
        order: list[tuple[str, list[str]]] = []
        manager = engine.topics.manager
        begin = manager.begin
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "begin", lambda names: order.append(("capture", names)) or begin(names))
            scheduler = SnapshotScheduler(engine.topics, lambda names: order.append(("listener", names)))
            for names in (["a"], ["a", "b"]):
                await scheduler.snapshot(names)
        assert order == [("listener", ["a"]), ("capture", ["a"]), ("listener", ["a", "b"]), ("capture", ["a", "b"])]
        assert scheduler.problem is None
