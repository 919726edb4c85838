"""Two nodes of a pair on real threads: found, follow, commit, fail over, join, switch, and every end of them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from pair_parts import Engine, LockServer, LoopTransport, MemoryDisk, MemoryLock, MemoryStore, Net, node_of

from broker_io.errors import (
    AppendUnknown,
    CallerError,
    Closed,
    DiskFailed,
    LockUnavailable,
    NotInSync,
    NotLive,
    PeerError,
)
from broker_io.filelog.log.records import LogRecord
from broker_io.filelog.pair.port import CopyChunk
from broker_io.filelog.pair.status import status_of
from broker_io.filelog.replication.lease import Terms
from broker_io.filelog.replication.lock import NO_RECORD
from broker_io.filelog.replication.member import Peer, PeerStage, Settings
from broker_io.filelog.replication.messages import Records, SessionEnded
from broker_io.testing.contract.base import eventually as until

MS = 1_000_000
TTL = 400 * MS
SETTINGS = Settings(
    Terms(TTL), member_timeout=150 * MS, answer_timeout=100 * MS, window_bytes=1000, stall=200 * MS, founder=False
)


class Member:
    """A node that can be started again on its disk."""

    def __init__(self, pair: Pair, name: str, settings: Settings) -> None:
        self.pair = pair
        self.name = name
        self.settings = settings
        self.disk = MemoryDisk(name.encode() + b"1")
        self.roles: list[bool] = []
        self.begin()

    def begin(self) -> None:
        self.store = MemoryStore(self.disk)
        self.lock = MemoryLock(self.pair.server, lambda name, after: self.pair.lock_fault(self.name, name, after))
        transport = LoopTransport(self.pair.net, self.name)
        self.node = node_of(self.settings, self.store, self.lock, transport, self.roles.append)
        self.engine = Engine(self.node, self.store)
        self.store.append = self.engine.append

    def start(self) -> None:
        self.node.start()

    def stop(self) -> None:
        self.node.close()
        self.store.close()

    def restart(self) -> None:
        self.stop()
        self.begin()
        self.start()

    @property
    def contents(self) -> list[bytes]:
        return [content for _, content in self.store.state]


class Pair:
    """Two members; `a` may found the pair."""

    def __init__(self, settings: Settings = SETTINGS, *, clocked: bool = True) -> None:
        self.net = Net()
        self.server = LockServer(TTL / 1e9, clocked=clocked)
        self.lock_fault: Callable[[str, str, bool], None] = lambda _member, _request, _after: None
        self.a = Member(self, "a", settings._replace(founder=True))
        self.b = Member(self, "b", settings)

    def in_sync(self) -> bool:
        stores = {self.a.disk.store, self.b.disk.store}
        return {*self.server.record.in_sync} == stores

    def follows(self, member: Member, other: Member) -> bool:
        """Whether everything that one has is applied on the other one."""
        return self.in_sync() and member.contents == other.contents


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for member in (made.a, made.b):
        if member.disk.used:
            member.stop()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    until(lambda: {*threading.enumerate()} <= before)


def live(member: Member) -> None:
    assert member.node.wait_live(60)


def begun(pair: Pair) -> None:
    """Both run, `a` is live, and they are in sync."""
    pair.a.start()
    live(pair.a)
    pair.b.start()
    until(pair.in_sync)


def test_founder_serves_alone(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    assert [pair.a.engine.append(b"x%d" % number) for number in range(3)] == [2, 3, 4]
    assert pair.a.engine.read() == [b"epoch 1", b"x0", b"x1", b"x2"]


def test_backup_follows_and_what_is_acknowledged_is_durable_on_it(pair: Pair) -> None:
    begun(pair)
    for number in range(100):
        lsn = pair.a.engine.append(b"x%d" % number)
        assert pair.b.disk.journal[-1].lsn >= lsn
    until(lambda: pair.follows(pair.a, pair.b))
    assert pair.b.engine.read() is None
    with pytest.raises(NotLive):
        pair.b.engine.append(b"y")


def test_backup_takes_over_when_the_live_is_gone(pair: Pair) -> None:
    begun(pair)
    for number in range(10):
        pair.a.engine.append(b"x%d" % number)
    pair.a.stop()
    live(pair.b)
    pair.b.engine.append(b"y")
    assert pair.b.contents == [b"epoch 1", *[b"x%d" % number for number in range(10)], b"epoch 2", b"y"]
    until(lambda: (pair.a.roles, pair.b.roles) == ([True, False], [True]))
    pair.a.begin()
    pair.a.start()
    until(lambda: pair.follows(pair.b, pair.a))


def test_many_threads_append(pair: Pair) -> None:
    begun(pair)
    with ThreadPoolExecutor(8) as pool:
        lsns = [*pool.map(pair.a.engine.append, [b"x%d" % number for number in range(200)])]
    assert sorted(lsns) == [*range(2, 202)]
    until(lambda: pair.follows(pair.a, pair.b))


def test_backup_without_the_journal_gets_a_copy(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    for number in range(50):
        pair.a.engine.append(b"x%d" % number)
    pair.a.store.checkpoint()
    until(lambda: not pair.a.disk.journal)
    pair.b.start()
    until(lambda: pair.follows(pair.a, pair.b))
    assert pair.a.disk.copies == 1
    pair.a.engine.append(b"y")
    until(lambda: pair.follows(pair.a, pair.b))


def test_backup_that_comes_later_reads_the_journal(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    for number in range(200):
        pair.a.engine.append(b"x" * 30 + b"%d" % number)
    pair.b.start()
    until(lambda: pair.follows(pair.a, pair.b))
    assert not pair.a.disk.copies


def test_switch_moves_the_role_and_comes_back(pair: Pair) -> None:
    begun(pair)
    pair.a.engine.append(b"x")
    pair.a.node.switch()
    assert not pair.a.node.live
    live(pair.b)
    pair.b.engine.append(b"y")
    until(lambda: pair.follows(pair.b, pair.a))
    pair.b.node.switch()
    live(pair.a)
    assert pair.a.contents == [b"epoch 1", b"x", b"epoch 2", b"y", b"epoch 3"]


def test_switch_returns_once_the_lock_has_the_other_one(pair: Pair) -> None:
    """A process that ends after it, and is started again at once, would be the first one to claim."""
    begun(pair)
    pair.lock_fault = lambda member, request, _after: time.sleep(0.1 if (member, request) == ("b", "swap") else 0.0)
    pair.a.node.switch()
    assert pair.server.record.live == b"b1"
    pair.a.restart()
    live(pair.b)
    until(lambda: pair.follows(pair.b, pair.a))
    assert pair.a.roles == [True, False]


def test_switch_that_the_other_one_does_not_take_is_an_error(pair: Pair) -> None:
    begun(pair)
    pair.b.lock.down = True
    with pytest.raises(LockUnavailable, match="the other one has not taken it within"):
        pair.a.node.switch()
    live(pair.a)
    pair.b.lock.down = False
    until(lambda: pair.follows(pair.a, pair.b))


def test_switch_needs_a_backup_in_sync(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    with pytest.raises(NotInSync):
        pair.a.node.switch()
    pair.b.start()
    with pytest.raises(NotLive):
        pair.b.node.switch()


def test_appends_wait_during_a_switch_and_learn_that_it_happened(pair: Pair) -> None:
    begun(pair)
    with ThreadPoolExecutor(1) as pool:
        stopped = threading.Event()

        def append() -> str:
            number = 0
            while not stopped.is_set():
                try:
                    pair.a.engine.append(b"x%d" % number)
                except NotLive:
                    return f"{number} acknowledged"
                number += 1
            return "all"

        running = pool.submit(append)
        pair.a.node.switch()
        until(running.done)
        stopped.set()
    count = int(running.result().split()[0])
    live(pair.b)
    assert pair.b.contents == [b"epoch 1", *[b"x%d" % number for number in range(count)], b"epoch 2"]


def test_live_without_an_answer_of_the_lock_steps_down(pair: Pair) -> None:
    begun(pair)
    pair.a.engine.append(b"x")
    pair.a.lock.down = True
    until(lambda: not pair.a.node.live)
    with pytest.raises(NotLive):
        pair.a.engine.append(b"y")
    live(pair.b)
    pair.a.lock.down = False
    until(lambda: pair.follows(pair.b, pair.a))


def test_append_during_a_cut_continues_once_the_backup_is_taken_out(pair: Pair) -> None:
    begun(pair)
    pair.net.cut = True
    pair.net.break_links()
    pair.a.engine.append(b"x")
    assert pair.server.record.in_sync == (b"a1",)
    pair.net.cut = False
    until(lambda: pair.follows(pair.a, pair.b))


def test_strict_live_alone_takes_no_appends_until_there_is_a_backup() -> None:
    pair = Pair(SETTINGS._replace(min_in_sync=2))
    pair.a.start()
    live(pair.a)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair.a.engine.append, b"x")
        assert not threading.Event().wait(0.5)
        assert not running.done()
        assert pair.a.node.status()["waits_for_backup"]
        assert not pair.a.node.wait_writable(0)
        pair.b.start()
        assert pair.a.node.wait_writable(10)
        until(running.done)
    assert running.result() == 2
    pair.b.stop()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair.a.engine.append, b"y")
        assert not threading.Event().wait(0.5)
        assert not running.done()
        pair.a.stop()
        with pytest.raises(AppendUnknown):
            running.result()


def test_close_ends_what_waits(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    pair.b.start()
    until(pair.in_sync)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(pair.b.node.wait_live, 100)
        pair.b.stop()
        with pytest.raises(Closed):
            waiting.result()
    pair.a.stop()
    with pytest.raises(NotLive):
        pair.a.node.commit(b"x", lambda: True)
    pair.a.node.close()


def test_live_whose_disk_fails_stops_and_the_backup_takes_over_at_once(pair: Pair) -> None:
    begun(pair)
    ended: list[str] = []
    pair.lock_fault = lambda member, request, _after: ended.append(member) if request == "end" else None
    pair.a.engine.append(b"x")
    pair.a.disk.fails = True
    with pytest.raises(AppendUnknown):
        pair.a.engine.append(b"y")
    assert isinstance(pair.a.node.failure, DiskFailed)
    with pytest.raises(DiskFailed):
        pair.a.engine.append(b"z")
    live(pair.b)
    assert "a" in ended


def test_force_makes_a_store_live_that_lacks_records(pair: Pair) -> None:
    begun(pair)
    pair.net.cut = True
    pair.net.break_links()
    pair.a.engine.append(b"lost")
    pair.a.stop()
    assert not pair.b.node.wait_live(1)
    pair.b.node.force()
    live(pair.b)
    with pytest.raises(CallerError, match="live already"):
        pair.b.node.force()
    pair.b.engine.append(b"y")
    assert pair.b.contents == [b"epoch 1", b"epoch 2", b"y"]
    pair.net.cut = False
    pair.a.begin()
    pair.a.start()
    until(lambda: pair.follows(pair.b, pair.a))
    assert pair.a.disk.aside == 1


def test_lost_answers_of_the_lock_are_settled(pair: Pair) -> None:
    lost: list[str] = []

    def fault(member: str, request: str, after: bool) -> None:
        if after and request == "swap" and len(lost) < 3:
            lost.append(member)
            raise LockUnavailable("the answer is lost")

    pair.lock_fault = fault
    begun(pair)
    pair.a.engine.append(b"x")
    until(lambda: pair.follows(pair.a, pair.b))
    assert len(lost) == 3


def test_lock_without_a_clock() -> None:
    pair = Pair(clocked=False)
    begun(pair)
    pair.a.engine.append(b"x")
    pair.a.lock.down = True
    until(lambda: not pair.a.node.live)
    live(pair.b)
    pair.a.lock.down = False
    until(lambda: pair.follows(pair.b, pair.a))
    pair.a.stop()
    pair.b.stop()


def test_link_cut_at_each_message(pair: Pair) -> None:
    """The link breaks at the n-th message, for all n up to one in sync; in the end the backup has everything."""
    pair.a.start()
    live(pair.a)
    pair.b.start()
    until(pair.in_sync)
    for number in range(1, 25):
        seen = 0

        def fault(_name: str, _message: object, last: int = number) -> bool:
            nonlocal seen
            seen += 1
            return seen != last

        pair.net.fault = fault
        pair.net.break_links()
        for part in range(3):
            pair.a.engine.append(b"%d, %d" % (number, part))
        until(lambda: pair.follows(pair.a, pair.b))
    pair.net.fault = lambda _name, _message: True


def test_status_of_both(pair: Pair) -> None:
    begun(pair)
    for number in range(5):
        pair.a.engine.append(b"x%d" % number)
    until(lambda: pair.follows(pair.a, pair.b) and pair.a.node.status()["lag_operations"] == 0)
    of_live, of_backup = pair.a.node.status(), pair.b.node.status()
    assert (of_live["role"], of_backup["role"]) == ("live", "backup")
    assert of_live["in_sync"] == of_backup["in_sync"] == [b"a1".hex(), b"b1".hex()]
    assert of_live["peer"]["applied"] == of_live["end"] == of_live["commit"] == of_backup["applied"] == 6
    assert 0 < of_live["lease_left"] <= TTL / 1e9
    assert of_backup["lease_left"] == 0
    assert [of_live[name] for name in ("lag_bytes", "lag_seconds", "problem", "linked")] == [0, 0.0, "", True]
    json.dumps([of_live, of_backup])


def waits(member: Member) -> str:
    found: str = member.node.status()["waits_for"]
    return found


def problem(member: Member) -> str:
    found: str = member.node.status()["problem"]
    return found


def test_status_says_who_is_live_or_what_is_waited_for(pair: Pair) -> None:
    pair.b.lock.down = True
    pair.b.start()
    until(lambda: waits(pair.b).startswith("it is not known who is live: ") and "is down" in waits(pair.b))
    pair.b.lock.down = False
    until(lambda: "this member can't become live, because no pair was founded yet: start" in waits(pair.b))
    pair.a.start()
    live(pair.a)
    until(lambda: waits(pair.b) == "the other member is live" and pair.in_sync())
    assert waits(pair.a) == ""
    pair.net.cut = True
    pair.net.break_links()
    pair.a.engine.append(b"x")
    until(lambda: waits(pair.b).startswith("the other member has the lease of the primary"))
    pair.a.stop()
    until(lambda: waits(pair.b) == "nobody is live: this member can't become live, because it is not in sync")


def test_record_that_is_lost_is_a_problem_of_both_and_founded_by_nobody(pair: Pair) -> None:
    """The first member was started as the founder."""
    begun(pair)
    pair.server.record, pair.server.lease = NO_RECORD, None
    until(lambda: all("lock: the lock has no record" in problem(member) for member in (pair.a, pair.b)))
    assert [member.node.status()["in_sync"] for member in (pair.a, pair.b)] == [[], []]
    pair.a.engine.append(b"x")  # both are there still
    with pytest.raises(NotInSync, match="no record of this pair any more"):
        pair.a.node.switch()
    pair.net.cut = True
    pair.net.break_links()
    pair.a.stop()
    until(lambda: waits(pair.b).startswith("nobody can become live: the lock has no record"))
    assert pair.server.record == NO_RECORD


def test_former_live_that_was_the_founder_makes_no_record(pair: Pair) -> None:
    begun(pair)
    pair.a.node.switch()
    until(lambda: pair.b.node.live and pair.in_sync())
    pair.b.node.switch()
    until(lambda: pair.a.node.live and pair.in_sync())
    pair.server.record, pair.server.lease = NO_RECORD, None
    pair.a.node.post(SessionEnded(pair.a.node._member.session.number or 0))
    until(lambda: pair.server.record != NO_RECORD or "no record of this pair any more" in problem(pair.a))
    time.sleep(2 * TTL / 1e9)
    assert pair.server.record == NO_RECORD
    assert not pair.a.node.live


def test_backup_that_has_not_said_what_it_has_is_not_behind_by_the_whole_log(pair: Pair) -> None:
    begun(pair)
    pair.a.engine.append(b"x")
    until(lambda: pair.a.node.status()["lag_records"] == 0)
    with pair.a.node._mutex:
        member = pair.a.node._member
        peer, member.peer = member.peer, Peer(b"b", PeerStage.FOLLOWING)
        lag = status_of(member, pair.a.node._lag, pair.a.node._now())["lag_records"]
        member.peer = peer
    assert lag == 0


def test_live_that_lacks_its_backup_says_so_as_its_problem() -> None:
    pair = Pair(SETTINGS._replace(min_in_sync=2))
    begun(pair)
    assert problem(pair.a) == ""
    pair.b.stop()
    until(lambda: "pair.min_in_sync is 2 and the backup is not in sync" in problem(pair.a))
    pair.a.stop()


def test_times_of_the_status_are_rounded(pair: Pair) -> None:
    begun(pair)
    pair.b.store.apply = lambda _lsn: time.sleep(0.2)  # type: ignore[method-assign]  # a slow store
    pair.a.engine.append(b"x")
    found = [member.node.status() for member in (pair.a, pair.b)]
    times = [status[name] for status in found for name in ("lease_left", "lag_seconds")]
    assert times == [round(each, 2) for each in times]
    assert max(times) > 0


def test_record_that_is_applied_after_the_lease_is_not_answered_and_holds_up_the_next_epoch(pair: Pair) -> None:
    """The primary applies its record before anything else is, and this record may be one that another primary drops."""
    pair.a.start()
    live(pair.a)
    node, store = pair.a.node, pair.a.store
    mark = node.commit(b"x", lambda: True)
    pair.a.lock.down = True
    until(lambda: not node.live)
    pair.a.lock.down = False
    assert not node.wait_live(3 * TTL / 1e9)
    assert store.applied == [1]
    store.apply(mark.lsn)
    node.applied()
    assert not node.may_answer()
    live(pair.a)
    assert pair.a.contents == [b"epoch 1", b"x", b"epoch 2"]


def test_append_that_was_built_before_the_role_was_lost_and_won_again_is_refused(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    with pytest.raises(NotLive, match="for a while"):
        pair.a.node.commit(b"x", lambda: False)
    assert pair.a.engine.append(b"y") == 2


def test_lease_counts_from_the_moment_when_its_renewal_was_sent(pair: Pair) -> None:
    def fault(_member: str, request: str, after: bool) -> None:
        if after and request == "renew":
            time.sleep(0.15)

    pair.a.start()
    live(pair.a)
    pair.lock_fault = fault
    time.sleep(0.3)
    left = 0.0
    for _ in range(60):
        left = max(left, pair.a.node.status()["lease_left"])
        time.sleep(0.01)
    assert 0 < left <= TTL / 1e9 - 0.15


def test_commit_index_is_written_once_nothing_follows(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    for number in range(5):
        pair.a.engine.append(b"x%d" % number)
    until(lambda: pair.a.disk.noted == 6)


def test_copy_waits_until_the_backup_has_ended_applying(pair: Pair) -> None:
    begun(pair)
    with copy_within_apply(pair, pair.b.store.apply):
        time.sleep(0.2)
        assert pair.b.disk.journal
    until(lambda: pair.follows(pair.a, pair.b))
    assert pair.a.disk.copies == 1


def test_copy_ends_the_attempts_of_the_backup_to_apply(pair: Pair) -> None:
    """What it lacks can't be fetched over a link that waits for the end of this."""
    begun(pair)
    with copy_within_apply(pair, raising(PeerError("there is no link"))):
        pass
    until(lambda: not pair.b.disk.partial)
    del pair.b.store.apply
    until(lambda: pair.follows(pair.a, pair.b))


def test_backup_whose_disk_fails_while_a_copy_comes_can_be_closed(pair: Pair) -> None:
    begun(pair)
    with copy_within_apply(pair, raising(DiskFailed("/b: an I/O error"))):
        pass
    until(lambda: pair.b.node.failure is not None)
    pair.b.node.close()
    assert str(pair.b.node.failure) == "/b: an I/O error"


def raising(error: Exception) -> Callable[[int], None]:
    def raise_it(_: int) -> None:
        raise error

    return raise_it


@contextlib.contextmanager
def copy_within_apply(pair: Pair, apply: Callable[[int], None]) -> Iterator[None]:
    """A copy waits until the backup has applied a record, which goes on after the block."""
    going, held = threading.Event(), threading.Event()

    def slow(lsn: int) -> None:
        held.set()
        going.wait(120)
        apply(lsn)

    pair.b.store.apply = slow
    pair.a.engine.append(b"x")
    assert held.wait(60)
    pair.net.cut = True
    pair.net.break_links()
    for number in range(5):
        pair.a.engine.append(b"%d" % number)
    pair.a.store.checkpoint()
    until(lambda: not pair.a.disk.journal)
    pair.net.cut = False
    until(lambda: pair.b.node._applies._unwanted)
    yield
    going.set()


def test_what_comes_over_an_ended_link_counts_no_more(pair: Pair) -> None:
    begun(pair)
    pair.a.engine.append(b"x")
    until(lambda: pair.follows(pair.a, pair.b))
    node = pair.b.node
    node.copy_chunk(999, CopyChunk("state", 0, b"", 0))
    node.copy_end(999)
    node.received(999, Records(1, b"a1", (), 77))
    node.down(999, "an older link")
    pair.a.engine.append(b"y")
    until(lambda: pair.follows(pair.a, pair.b))
    assert pair.net.links == 1


def test_record_that_is_being_written_when_a_backup_comes_is_sent_once_it_is_durable(pair: Pair) -> None:
    pair.a.start()
    live(pair.a)
    write, going, held = pair.a.store.write, threading.Event(), threading.Event()

    def slow(records: Sequence[LogRecord], synced: int) -> None:
        held.set()
        going.wait(120)
        write(records, synced)

    pair.a.store.write = slow  # type: ignore[method-assign]  # a slow one
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair.a.engine.append, b"x")
        assert held.wait(60)
        pair.b.start()
        until(lambda: pair.a.node._member.peer is not None and pair.a.node._member.peer.sent == 2)
        time.sleep(0.1)
        going.set()
        assert running.result(60) == 2
    until(lambda: pair.follows(pair.a, pair.b))
