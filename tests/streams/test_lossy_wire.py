"""Client and server on a connection that is lost anywhere, with failovers, compactions and crashes of the client.

Whenever the client reports that its data is complete, its table equals the history that it follows; in
the end it equals the topic.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from stream_world import World

from txnbuffer.streams.messages import EndReason

TOPICS = ["a", "b"]
seeds = st.integers(0, 2**20)
topics = st.sampled_from(TOPICS)
keys = st.sampled_from([b"k", b"l", b"m", None])
rows = st.lists(st.tuples(keys, st.sampled_from([b"1", b"22", b"333", None])), min_size=1, max_size=6)
reasons = st.sampled_from([EndReason.STATE_CHANGED, EndReason.ROLLBACK, EndReason.TOO_SLOW, EndReason.CLOSED])


class LossyWire(RuleBasedStateMachine):
    """The rules of the state machine; the invariants hold after each."""

    @initialize(first=rows)
    def begin(self, first: list[tuple[bytes | None, bytes | None]]) -> None:
        self.world = World(TOPICS)
        self.world.write("a", first)

    @rule(topic=topics, more=rows, keep=st.booleans())
    def write(self, topic: str, more: list[tuple[bytes | None, bytes | None]], keep: bool) -> None:
        if keep:
            self.world.keep(topic)
        self.world.write(topic, more)

    @rule(turns=st.integers(1, 12), seed=seeds)
    def flow(self, turns: int, seed: int) -> None:
        choose = random.Random(seed).randint
        for turn in range(turns):
            self.world.node.pump(turn, choose)
            self.world.carry(choose(0, 6))
            self.world.reader.read(choose(0, 6), choose)

    @rule(seed=seeds)
    def drain(self, seed: int) -> None:
        choose = random.Random(seed).randint
        for turn in range(40):
            self.world.node.pump(turn, choose)
            self.world.carry(20)
            self.world.reader.read(20, choose)

    @rule(arrive=st.integers(0, 5))
    def cut(self, arrive: int) -> None:
        self.world.carry(arrive)
        self.world.connect()

    @rule()
    def retry(self) -> None:
        self.world.reader.now += 1.0
        self.world.reader.client.tick(self.world.reader.now)

    @rule(topic=topics, reason=reasons)
    def end_streams(self, topic: str, reason: EndReason) -> None:
        self.world.node.server.end_topic(topic, reason)
        self.world.node.settle()

    @rule(topic=topics, which=st.integers(0, 5), lost=st.integers(0, 4), cut=st.booleans())
    def fail_over(self, topic: str, which: int, lost: int, cut: bool) -> None:
        self.world.fail_over(topic, which, lost)
        if not cut:
            self.world.node.server.end_topic(topic, EndReason.ROLLBACK)
            self.world.node.settle()
        else:
            self.world.connect()

    @rule(topic=topics)
    def re_create(self, topic: str) -> None:
        self.world.recreate(topic)
        self.world.node.server.end_topic(topic, EndReason.ROLLBACK)
        self.world.node.settle()

    @rule(topic=topics, purge=st.integers(1, 30))
    def compact(self, topic: str, purge: int) -> None:
        self.world.compact(topic, purge)

    @rule()
    def store(self) -> None:
        self.world.reader.store()

    @rule()
    def crash(self) -> None:
        self.world.reader.start()
        self.world.connect()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestLossyWire = LossyWire.TestCase
TestLossyWire.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=40)
