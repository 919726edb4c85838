"""What applications that read note of what they were shown, in scripts of their streams."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Self

import pytest
from sim.apps import Setting
from sim.history import History
from sim.partitions import Partitions
from sim.readers import CursorFollower
from sim.world import World

from txnbuffer.streams.failover import ResumeToken

TOPIC = "orders"


class Item(list[Any]):
    """A batch of no changes."""

    topic = TOPIC
    complete = True

    def __init__(self, seqno: int) -> None:
        self.token = ResumeToken(TOPIC, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)


class ScriptedStream:
    """A stream that shows items, then nothing; `done` acknowledges all of them."""

    def __init__(self, *items: Item) -> None:
        self._items = [*items]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def next(self, timeout: float) -> Item:
        if not self._items:
            raise TimeoutError
        return self._items.pop(0)

    async def done(self) -> None:
        pass


class Always(random.Random):
    """Ends a stream after each call."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        return 0.0


@pytest.mark.parametrize(("items", "acknowledged"), [((), 13), ((Item(14),), 14)])
def test_a_new_process_has_acknowledged_what_its_own_stream_showed(items: tuple[Item, ...], acknowledged: int) -> None:
    with World(seed=1) as world:
        history = History(lambda: 0.0, world.fail, Partitions({}))
        setting = Setting("", history, (TOPIC,), world.log)
        host = world.host("gamma")
        app = CursorFollower("cursor-follower", host, setting, Always())
        app.following(TOPIC).seqno = 14  # a former process was shown it, and was killed before it asked for more
        app.acknowledged[TOPIC] = 13
        client: Any = SimpleNamespace(stream=lambda *_, **__: ScriptedStream(*items))
        process = host.start("cursor-follower", lambda: app.take(client, TOPIC))
        assert world.run(60.0, lambda: process.dead)
        assert world.failure is None
        assert app.acknowledged[TOPIC] == acknowledged
