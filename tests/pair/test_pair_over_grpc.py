"""Two nodes with real links and a real lock, each behind a bad connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer, free_port
from fault_proxy import DOWN, UP, FaultProxy
from pair_parts import Engine, MemoryDisk, MemoryStore, node_of

from broker_io.errors import Error, NotLive
from broker_io.filelog.pair import open_lock
from broker_io.filelog.pair.transport import GrpcTransport, LinkSettings
from broker_io.filelog.replication.lease import Terms
from broker_io.filelog.replication.member import Settings
from broker_io.filelog.replication.messages import DamageNoted
from broker_io.testing.contract.base import eventually as until

MS = 1_000_000
SETTINGS = Settings(Terms(2000 * MS), member_timeout=500 * MS, answer_timeout=400 * MS, window_bytes=100_000)
WAIT = 60.0


class Member:
    """A node with a directory in memory; its link and its lock are behind proxies that a test breaks."""

    def __init__(self, name: str, lock: str, listen: int, peer: FaultProxy) -> None:
        self.disk = MemoryDisk(name.encode() + b"1")
        self._settings = SETTINGS._replace(founder=name == "a")
        self._lock = lock
        idle = SETTINGS.member_timeout / 1e9
        self._link = LinkSettings("orders", f"127.0.0.1:{listen}", peer.address, idle_timeout=idle)
        self.running = False
        self.old = False
        """Whether it takes only the messages that 0.2.0 knows."""

    def start(self) -> None:
        self.store = MemoryStore(self.disk)
        transport, lock = GrpcTransport(self._link), open_lock(self._lock)
        if self.old:
            transport._takes = ""
        self.node = node_of(self._settings, self.store, lock, transport, lambda _: None)  # type: ignore[arg-type]  # has all of it
        self.engine = Engine(self.node, self.store)
        self.node.start()
        self.running = True

    def stop(self) -> None:
        if self.running:
            self.running = False
            self.node.close()
            self.store.close()

    @property
    def contents(self) -> list[bytes]:
        return [content for _, content in self.store.state]


class Pair:
    """Both members; `links` are the proxies before their ports, `locks` those before etcd."""

    def __init__(self, stack: contextlib.ExitStack, lock: str, locks: list[FaultProxy]) -> None:
        ports = [free_port(), free_port()]
        self.links = [stack.enter_context(FaultProxy(port)) for port in ports]
        self.locks = locks
        addresses = [lock] * 2 if not locks else [f"etcd://{proxy.address}/orders" for proxy in locks]
        self.a = Member("a", addresses[0], ports[0], self.links[1])
        self.b = Member("b", addresses[1], ports[1], self.links[0])
        stack.callback(self.a.stop)
        stack.callback(self.b.stop)

    def begin(self) -> None:
        self.a.start()
        assert self.a.node.wait_live(WAIT)
        self.b.start()
        until(lambda: self.follows(self.a, self.b))

    def follows(self, member: Member, other: Member) -> bool:
        """Whether a primary and its backup are in sync and have the same applied."""
        return len(member.node.status()["in_sync"]) == 2 and member.contents == other.contents


@pytest.fixture(params=["etcd", "file"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            yield Pair(stack, f"file:{tmp_path}/lock", [])
        else:
            server = stack.enter_context(EtcdServer(tmp_path))
            yield Pair(stack, "", [stack.enter_context(FaultProxy(server.port)) for _ in range(2)])


def test_backup_follows_and_takes_over(pair: Pair) -> None:
    pair.begin()
    for number in range(50):
        lsn = pair.a.engine.append(b"x%d" % number)
        assert pair.b.disk.journal[-1].lsn >= lsn
    pair.a.stop()
    assert pair.b.node.wait_live(WAIT)
    pair.b.engine.append(b"y")
    pair.a.start()
    until(lambda: pair.follows(pair.b, pair.a))
    assert pair.a.contents == [b"epoch 1", *[b"x%d" % number for number in range(50)], b"epoch 2", b"y"]
    pair.b.node.switch()
    assert pair.a.node.wait_live(WAIT)
    pair.a.engine.append(b"z")
    until(lambda: pair.follows(pair.a, pair.b))


@pytest.mark.parametrize("name", ["a", "b"], ids=["live", "backup"])
def test_old_member_gets_no_message_that_it_does_not_know(pair: Pair, name: str) -> None:
    """It would end the link. It says nothing of damage, and counts as undamaged."""
    old: Member = getattr(pair, name)
    new = pair.b if old is pair.a else pair.a
    old.old = True
    pair.begin()
    new.node.post(DamageNoted(("orders",)))
    old.node.post(DamageNoted(("t",)))
    until(lambda: new.node._member.damaged_there == ("t",))
    pair.a.engine.append(b"x")
    until(lambda: pair.follows(pair.a, pair.b))
    assert old.node._member.damaged_there == ()
    assert ("'t'" in pair.a.node.status()["cannot_switch"]) == (old is pair.b)


def test_copy_goes_over_the_link(pair: Pair) -> None:
    pair.a.start()
    assert pair.a.node.wait_live(WAIT)
    for number in range(30):
        pair.a.engine.append(b"%d" % number * 5000)
    pair.a.store.checkpoint()
    until(lambda: not pair.a.disk.journal)
    pair.b.start()
    until(lambda: pair.follows(pair.a, pair.b))
    assert pair.a.disk.copies == 1


@pytest.mark.parametrize("how", ["cut", "held"])
def test_live_continues_alone_while_the_link_is_lost(pair: Pair, how: str) -> None:
    pair.begin()
    if how == "cut":
        pair.links[0].cut()
    else:
        pair.links[0].held |= {UP, DOWN}
    for number in range(5):
        pair.a.engine.append(b"x%d" % number)
    assert len(pair.a.node.status()["in_sync"]) == 1
    if how == "held":
        pair.links[0].cut(refuse=False)
    pair.links[0].heal()
    until(lambda: pair.follows(pair.a, pair.b))


@pytest.mark.parametrize("pair", ["etcd"], indirect=True)
def test_live_that_loses_its_lock_gives_way(pair: Pair) -> None:
    pair.begin()
    pair.a.engine.append(b"x")
    pair.locks[0].held |= {UP, DOWN}
    assert pair.b.node.wait_live(WAIT)
    with pytest.raises(NotLive):
        pair.a.engine.append(b"y")
    pair.locks[0].cut(refuse=False)
    pair.locks[0].heal()
    pair.b.engine.append(b"z")
    until(lambda: pair.follows(pair.b, pair.a))
    assert pair.a.contents == [b"epoch 1", b"x", b"epoch 2", b"z"]


def test_nothing_acknowledged_is_lost_while_everything_breaks(pair: Pair) -> None:
    pair.begin()
    acknowledged: list[bytes] = []
    for turn in range(4):
        proxies = [*pair.links, *pair.locks]
        proxies[turn % len(proxies)].cut(refuse=turn % 2 == 0)
        for number in range(20):
            for member in (pair.a, pair.b):
                content = b"%d-%d at %s" % (turn, number, member.disk.store)
                with contextlib.suppress(Error):
                    member.engine.append(content)
                    acknowledged.append(content)
                    break
        for proxy in proxies:
            proxy.heal()
    until(lambda: any(pair.follows(*each) for each in ((pair.a, pair.b), (pair.b, pair.a))))
    assert [each for each in pair.a.contents if each in {*acknowledged}] == acknowledged
