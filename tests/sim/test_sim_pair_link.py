"""Links of a pair over the simulated network: the product's own transport, and what both sides notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import google_crc32c
import pytest
from sim.world import Host, Process, World

from broker_io.environment import current
from broker_io.errors import PeerError, TopicNotFound
from broker_io.filelog.log.records import START, Kind, LogRecord, Mark
from broker_io.filelog.pair import transport
from broker_io.filelog.pair.port import CopyChunk, PairLink
from broker_io.filelog.pair.transport import GrpcTransport, LinkSettings
from broker_io.filelog.replication import messages as m

STORE = b"\x0a" * 16
PORT = 7722
CHUNKS = 100
BYTES = 1000


class Copy:
    """A copy; `closed` counts."""

    mark, forks = START, ()

    def __init__(self) -> None:
        self.read = self.closed = 0

    def __iter__(self) -> Iterator[CopyChunk]:
        for number in range(CHUNKS):
            self.read += 1
            data = bytes(BYTES)
            yield CopyChunk("file", number * BYTES, data, google_crc32c.value(data))

    def close(self) -> None:
        self.closed += 1


class Node:
    """A node as its transport sees it."""

    def __init__(self, host: Host, peer: str, *, live: bool) -> None:
        self.live = live
        self.links: list[PairLink] = []
        self.seen: list[object] = []
        self.reasons: list[str] = []
        self.fetched: list[bytes | str] = []
        self.work: list[Callable[[], object] | None] = []
        self.slow = 0.0
        self._settings = LinkSettings("one", f"{host.name}:{PORT}", f"{peer}:{PORT}")
        self.process: Process = host.spawn("node", self._main)

    def _main(self) -> None:
        clock = current().clock
        self.transport = GrpcTransport(self._settings)
        self.transport.start(self, lambda: self.live, lambda: not self.live)
        while True:
            clock.sleep(0.01)
            while self.work:
                work = self.work.pop(0)
                if work is None:
                    self.transport.close()
                    return
                work()

    def fetch(self, name: str) -> None:
        try:
            self.fetched.append(self.transport.fetch(name, 2, 3))
        except (PeerError, TopicNotFound) as error:
            self.fetched.append(type(error).__name__)

    def up(self, link: PairLink) -> None:
        self.links.append(link)

    def received(self, number: int, message: m.Message) -> None:
        self.seen.append(message)

    def copy_chunk(self, number: int, chunk: CopyChunk) -> None:
        current().clock.sleep(self.slow)
        self.seen.append(chunk.offset)

    def copy_end(self, number: int) -> None:
        self.seen.append("end")

    def down(self, number: int, reason: str) -> None:
        self.reasons.append(reason)

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        if name != "file":
            raise TopicNotFound(f"there is no file {name}")
        return b"0123456789"[offset : offset + size]


class Rig:
    """A primary node on one host, and its backup on another."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.live = Node(world.host("alpha"), "omega", live=True)
        self.backup = Node(world.host("omega"), "alpha", live=False)
        self.wait(lambda: bool(self.live.links and self.backup.links))

    def wait(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        assert self.world.run(seconds, done), f"{self.live.seen} {self.backup.seen} {self.live.reasons}"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with World(seed=3, preemption=0.1) as world, mock.patch.object(transport, "is_loopback", return_value=True):
        yield Rig(world)


def records(lsn: int) -> m.Records:
    return m.Records(1, STORE, (LogRecord(Mark(1, lsn, 7), lsn, Kind.DATA, b"content"),), lsn)


def test_messages_and_copies_arrive_in_order(rig: Rig) -> None:
    live, backup, copy = rig.live, rig.backup, Copy()
    begin = m.CopyBegin(1, STORE, START, ())

    def send() -> None:
        live.links[0].send(records(1))
        live.links[0].send_copy(begin, copy)
        live.links[0].send(records(2))

    live.work.append(send)
    backup.work.append(lambda: backup.links[0].send(m.Hello(1, STORE, START, START, False)))
    rig.wait(lambda: len(backup.seen) == CHUNKS + 4 and bool(live.seen))
    assert backup.seen == [records(1), begin, *range(0, CHUNKS * BYTES, BYTES), "end", records(2)]
    assert copy.closed == 1


def test_a_slow_receiver_slows_the_copy_down(rig: Rig) -> None:
    copy = Copy()
    rig.backup.slow = 1.0
    rig.live.work.append(lambda: rig.live.links[0].send_copy(m.CopyBegin(1, STORE, START, ()), copy))
    rig.world.run(10.5)
    assert len(rig.backup.seen) < 15
    assert copy.read < 60


def test_fetches_are_answered(rig: Rig) -> None:
    for name in ("file", "other"):
        rig.backup.work.append(lambda name=name: rig.backup.fetch(name))
    rig.wait(lambda: len(rig.backup.fetched) == 2)
    assert rig.backup.fetched == [b"234", "TopicNotFound"]


def test_a_partition_is_noticed_by_silence_and_a_new_link_follows(rig: Rig) -> None:
    rig.world.network.partition("alpha", "omega")
    began = rig.world.now
    rig.wait(lambda: bool(rig.live.reasons and rig.backup.reasons))
    assert rig.world.now - began < 4.0
    assert len(rig.live.links) == 1
    rig.world.network.heal()
    rig.wait(lambda: len(rig.live.links) == 2 and len(rig.backup.links) == 2)


def test_a_killed_node_is_noticed_and_both_end(rig: Rig) -> None:
    rig.live.process.kill()
    rig.wait(lambda: bool(rig.backup.reasons), 1.0)
    rig.live = Node(rig.world.host("alpha"), "omega", live=True)
    rig.wait(lambda: len(rig.backup.links) == 2)
    for node in (rig.live, rig.backup):
        node.work.append(None)
    rig.wait(lambda: rig.live.process.dead and rig.backup.process.dead)
    assert rig.live.process.ended


def test_a_node_that_is_not_live_is_asked_again(rig: Rig) -> None:
    rig.live.live = False
    rig.backup.work.append(lambda: rig.backup.links[0].close())
    rig.wait(lambda: bool(rig.live.reasons))
    rig.world.run(5.0)
    assert len(rig.live.links) == 1
    rig.live.live = True
    rig.wait(lambda: len(rig.live.links) == 2)
