"""Histories that break a weaker protocol of a pair, one test or more for each hole that its review found."""

from __future__ import annotations

import pytest
from pair_world import QUANTUM, SETTINGS, TTL, Lock, World, clone
from replication.pair_histories import LOCAL, A, B, acked, alone, member, pair, promote, role, run

from broker_io.errors import DiskWatermark, NotInSync, NotLive, NotPromotable
from broker_io.filelog.log.records import START, Index, Kind, Mark, StoreLog, is_damage, make_record, shown_end
from broker_io.filelog.replication import messages as m
from broker_io.filelog.replication import serving
from broker_io.filelog.replication.lease import LockLease, LockSession, Terms, Watch
from broker_io.filelog.replication.lock import LockRecord, LockView, PairMembership, Swap, accepts, ineligible
from broker_io.filelog.replication.member import Followed, PairMember, PeerStage, Role
from broker_io.filelog.replication.states import step


def test_h01_lost_answer_is_settled_by_a_later_swap_only() -> None:
    """The delayed swap that lets B join finds another version, or B is required for every append."""
    world = alone()
    world.do(("start", B))
    run(world, *LOCAL, until=lambda: bool(world.lock.requests))
    before = acked(world)
    world.do(("break",))
    for first in (0, 1):
        branch = clone(world)
        branch.do(("append", A))
        run(branch, "disk", "net", "apply")
        branch.do(("time",))
        branch.do(("time",))
        assert acked(branch) == before
        assert len(branch.lock.requests) == 3
        branch.do(("swap", first))
        branch.do(("swap", 0))
        branch.do(("swap", 0))
        run(branch, "answer", "apply", "disk")
        assert branch.lock.record.in_sync == ((b"a1",) if first else (b"a1", b"b1"))
        assert (acked(branch) > before) == bool(first)
        branch.settle()


def test_h01_read_of_the_old_version_settles_nothing() -> None:
    record = LockRecord(4, 1, b"a1", (b"a1",), START, None)
    swap = Swap(record._replace(version=5, in_sync=(b"a1", b"b1")), 1, None)
    membership = PairMembership(record)
    membership.send(1, swap, 0)
    membership.settle(record)
    assert membership.possible == {b"a1", b"b1"}
    membership.settle(record._replace(version=5))
    assert membership.possible == {b"a1"}


def test_h01_swap_names_the_version() -> None:
    record = LockRecord(4, 1, b"a1", (b"a1",), START, None)
    swap = Swap(record._replace(version=4, in_sync=(b"a1", b"b1")), 1, None)
    assert not accepts(LockView(record, None), swap, session_alive=True)


def old_image(world: World) -> None:
    """B's directory is replaced by an older copy of itself, and A has no journal from there."""
    older = clone(world.nodes[B].disk)
    for _ in range(2):
        world.do(("append", A))
        run(world, *LOCAL)
    world.do(("checkpoint", A))
    world.do(("crash", B))
    world.acked.clear()  # that B lacks them now is no fault of the protocol
    world.shown.clear()
    world.nodes[B].disk = older
    world.do(("start", B))


def test_h02_store_leaves_in_sync_before_anything_of_it_is_dropped() -> None:
    world = pair(appends=1)
    old_image(world)
    run(world, *LOCAL)
    peer = member(world, A).peer
    assert peer is not None
    assert peer.stage is PeerStage.LEAVING
    assert not world.nodes[B].disk.partial
    world.settle()


def test_h02_partial_store_never_becomes_live() -> None:
    world = pair(appends=1)
    old_image(world)
    run(world, *LOCAL, "swap", "answer", until=lambda: world.nodes[B].disk.partial)
    world.do(("crash", B))
    world.do(("crash", A))
    world.do(("start", B))
    run(world, "time", limit=12)
    assert role(world, B) is Role.BACKUP
    assert "incomplete" in ineligible(world.lock.record._replace(in_sync=(b"b1",)), member(world, B).log, founder=True)
    with pytest.raises(NotPromotable):
        world.give(B, m.ForceRequested())
    world.settle()


def test_h02_store_that_the_lock_names_refuses_to_rejoin() -> None:
    """A primary that was paused may still ask for it."""
    world = pair(appends=1)
    backup = member(world, B)
    backup.break_link()
    world.do(("break",))
    world.do(("link",))
    world.do(("net", B))
    world.do(("net", B))
    assert backup.link is not None
    rejoin = m.Rejoin(1, b"a1", m.CatchUp.COPY, START)
    world.give(B, m.Received(backup.link, rejoin))
    assert (backup.link, backup.joining, backup.log.partial) == (None, None, False)


def test_h03_store_on_a_new_disk_is_not_promoted() -> None:
    world = pair(appends=1)
    world.do(("crash", B))
    world.do(("wipe", B))
    world.do(("crash", A))
    world.do(("start", B))
    run(world, "time", limit=12)
    assert role(world, B) is Role.BACKUP
    world.settle()


def test_h03_store_that_was_restored_from_an_older_copy_is_not_promoted() -> None:
    mark = Mark(1, 3, 99)
    log = StoreLog.open(b"b1", START, START, [], 0, partial=False)
    record = LockRecord(2, 1, b"a1", (b"a1", b"b1"), mark, None)
    assert "older copy" in ineligible(record, log, founder=False)


def test_h03_durable_of_another_store_does_not_count() -> None:
    world = pair(appends=1)
    live = member(world, A)
    assert live.link is not None
    message = m.Durable(1, b"b2", live.log.index.end, 0, False)
    world.give(A, m.Received(live.link, message))
    assert live.link is None


def test_h04_live_that_restarts_takes_the_next_epoch() -> None:
    """The swap that its former process sent is void, and it has lost what it had not synced."""
    world = alone()
    world.do(("start", B))
    run(world, *LOCAL, until=lambda: bool(world.lock.requests))
    world.do(("crash", A))
    world.do(("start", A))
    run(world, *LOCAL, until=lambda: len(world.lock.requests) == 2)
    world.do(("swap", 0))
    assert world.lock.record.in_sync == (b"a1",)
    run(world, until=lambda: role(world, A) is Role.LIVE)
    assert world.lock.record.epoch == 2
    world.settle()


def test_h05_own_end_is_not_committed_after_a_restart() -> None:
    world = pair(appends=1)
    world.do(("append", A))
    world.do(("disk", A))
    world.do(("crash", A))
    run(world, until=lambda: role(world, B) is Role.LIVE)
    world.do(("start", A))
    log = member(world, A).log
    assert log.durable == 3
    assert log.commit == 2
    world.settle()


def test_h06_commit_index_counts_up_to_what_was_compared() -> None:
    world = pair(appends=1)
    backup = member(world, B)
    record = make_record(backup.log.index.end, 1, 2, b"of a former epoch")
    backup.log.append(record)
    backup.log.durable = record.lsn
    backup.followed = Followed(1, b"a1", compared=2, commit=2)
    assert backup.link is not None
    effects = step(backup, m.Received(backup.link, m.Records(1, b"a1", (), 3)), backup.now)
    assert backup.log.commit == 2
    assert m.Apply(3) not in effects


def test_h07_readers_of_a_directory_are_shown_what_is_committed() -> None:
    world = pair(appends=1)
    world.do(("append", A))
    world.do(("disk", A))
    world.do(("crash", A))
    world.do(("look", A))
    assert max(world.shown) == 2
    world.settle()


def test_h07_end_of_what_is_shown() -> None:
    first = make_record(START, 1, 0, b"1")
    second = make_record(first.mark, 1, 1, b"2")
    assert shown_end(START, [first, second]) == 1
    assert shown_end(START, [first, second], noted=2) == 2
    assert shown_end(second.mark, []) == 2
    assert shown_end(START, [first], noted=2) == 1


def test_h08_backup_refuses_an_epoch_below_the_one_it_knows() -> None:
    world = pair(appends=1)
    backup = member(world, B)
    assert backup.known is not None
    assert backup.link is not None
    backup.see(LockView(backup.known.record._replace(version=99, epoch=5), None))
    world.give(B, m.Received(backup.link, m.Records(1, b"a1", (), 2)))
    assert backup.link is None


def test_h08_durable_counts_only_after_the_logs_were_compared_on_its_link() -> None:
    world = pair(appends=1)
    live = member(world, A)
    durable = m.Durable(1, b"b1", live.log.index.end, 2, False)
    world.do(("break",))
    world.do(("link",))
    run(world, "net", until=lambda: live.link == world.links)
    world.nodes[B].inbound.clear()
    live.peer = None
    world.give(A, m.Received(world.links, durable))
    assert live.peer is None
    live.link = world.links
    world.give(A, m.Received(world.links - 1, durable))
    assert live.link == world.links


def forced(world: World) -> None:
    """B is out of `in_sync` and lacks two records; A is lost; an operator forces B."""
    for _ in range(2):
        world.do(("append", A))
        run(world, "disk", "apply", "answer")
    world.do(("crash", A))
    world.do(("start", B))
    world.do(("force", B))
    run(world, "time", "disk", "apply", until=lambda: bool(world.lock.requests))


def test_h09_forced_promotion_that_crashes_is_forced_again() -> None:
    world = alone(appends=1)
    forced(world)
    world.do(("swap", 0))
    world.do(("crash", B))
    world.do(("start", B))
    run(world, "time", "disk", "apply", "swap", "answer", until=lambda: role(world, B) is Role.LIVE)
    assert world.lock.record.forced is None
    assert world.nodes[B].disk.journal[-1].kind is Kind.FORCED
    assert world.lock.record.epoch == 3
    world.settle()
    assert world.nodes[A].disk.store == b"a2"


def test_h09_forced_store_serves_after_its_epoch_record_is_confirmed() -> None:
    world = alone(appends=1)
    forced(world)
    world.do(("swap", 0))
    run(world, "answer", "disk", "apply")
    assert role(world, B) is Role.OPENING
    assert world.lock.record.forced is not None
    run(world, "swap", "answer")
    assert role(world, B) is Role.LIVE
    assert world.lock.record.forced is None


def test_h09_store_beyond_the_fork_is_replaced_when_the_journal_begins_after_it() -> None:
    world = alone(appends=1)
    forced(world)
    run(world, "time", "disk", "apply", "swap", "answer", until=lambda: role(world, B) is Role.LIVE)
    for _ in range(4):
        world.do(("append", B))
        run(world, "disk", "apply")
    world.do(("checkpoint", B))
    world.do(("crash", B))
    world.do(("start", B))
    run(world, until=lambda: role(world, B) is Role.LIVE)
    assert member(world, B).log.index.base.lsn > len(world.nodes[A].disk.journal)
    world.do(("start", A))
    world.settle()
    assert world.nodes[A].disk.store == b"a2"
    assert member(world, A).log.forks == member(world, B).log.forks != ()


def test_h09_live_answers_nothing_after_its_lease() -> None:
    """An operator may have forced the other store, which lacks the record."""
    world = alone(appends=1)
    world.do(("append", A))
    world.do(("pause", A))
    run(world, "time", limit=5)
    world.do(("resume", A))
    world.do(("disk", A))
    assert member(world, A).log.commit == 3
    assert acked(world) == 2


def test_h10_lease_counts_from_the_sending_of_its_renewal() -> None:
    session, terms = LockSession(), Terms(1000, 0.1)
    assert session.renewed(1, 100)
    assert not session.renewed(1, 300)
    assert not session.renewed(2, 900)
    assert (session.holds_at(1099, terms), session.holds_at(1100, terms)) == (True, False)


def test_h10_late_answer_of_a_renewal_does_not_prolong_the_lease() -> None:
    world = pair(appends=1)
    world.slow_lock = True
    for _ in range(2):
        world.do(("time",))
        run(world, "net")
    renewal = next(at for at, each in enumerate(world.lock.answers) if isinstance(each[2], m.Renewed))
    world.do(("pause", A))
    held = world.lock.answers.pop(renewal)
    world.slow_lock = False
    promote(world, B)
    world.do(("append", B))
    run(world, "disk", "apply")
    assert acked(world) == 4
    world.do(("resume", A))
    world.lock.answers.append(held)
    world.do(("answer", len(world.lock.answers) - 1))
    world.do(("read", A))
    assert serving.reads(member(world, A), world.now(world.nodes[A])) is serving.Gate.REFUSE


@pytest.mark.parametrize("clocked", [True, False])
def test_h10_clocks_that_drift_show_nothing_stale(clocked: bool) -> None:
    """The clock of the primary is slow, that of its backup fast: the one stops before the other begins."""
    world = pair(appends=1, clocked=clocked)
    slow, fast = world.nodes
    base = world.real
    slow.rate, fast.rate = 900, 1100
    for node, rate in ((slow, 900), (fast, 1100)):
        assert node.member is not None
        node.member.now = node.member.session.sent = base * rate // 1000
    world.do(("isolate", A))
    world.do(("break",))
    promote(world, B)
    assert role(world, B) is Role.LIVE
    assert serving.reads(member(world, A), world.now(slow)) is serving.Gate.REFUSE


def test_h10_lapsed_lease_is_not_revived() -> None:
    world = pair(appends=1)
    world.do(("isolate", B))
    world.do(("isolate", A))
    run(world, "time", limit=6)
    world.do(("reach", A))
    world.do(("time",))
    assert role(world, A) is not Role.LIVE
    world.settle()
    assert world.lock.record.epoch > 1


def test_h10_lock_without_a_clock_is_watched() -> None:
    watch, terms, lease = Watch(), Terms(1000, 0.1, clocked=False), LockLease(b"a1", 1, 5)
    assert not watch.ended(lease, 0, 10, terms)
    assert not watch.ended(lease, 1209, 1300, terms)
    assert watch.ended(lease, 1210, 1300, terms)
    assert not watch.ended(lease._replace(renewals=6), 9000, 9000, terms)
    assert watch.ended(None, 9000, 9000, terms)


def test_h12_redo_begins_after_the_record_that_the_manifest_names() -> None:
    first = make_record(START, 1, 0, b"1")
    second = make_record(first.mark, 1, 1, b"2")
    third = make_record(second.mark, 1, 2, b"3")
    log = StoreLog.open(b"a1", first.mark, START, [first, second, third], 0, partial=False)
    assert (log.applied, log.commit, log.durable) == (1, 2, 3)
    assert m.Apply(2) in step(PairMember(SETTINGS, log), m.Start(), 0)


def test_h16_hole_is_damage_only_if_it_was_synced() -> None:
    assert not is_damage(5, [4, 3])
    assert is_damage(5, [4, 5])
    assert not is_damage(5, [])


def test_h17_strict_live_alone_serves_what_was_committed_and_appends_wait() -> None:
    world = pair(appends=1, min_in_sync=2)
    world.do(("crash", A))
    run(world, until=lambda: role(world, B) is Role.LIVE)
    assert serving.reads(member(world, B), world.now(world.nodes[B])) is serving.Gate.SEND
    world.do(("append", B))
    run(world, "disk", "apply", "time", "swap", "answer", limit=20)
    assert acked(world) == 2
    world.settle()
    assert acked(world) == 4


def test_h17_strict_pair_shrinks_by_a_swap() -> None:
    world = alone(min_in_sync=2)
    assert world.lock.record.in_sync == (b"a1",)
    world.do(("wipe", B))
    world.settle()


def test_h18_joining_store_is_required_no_longer_if_it_dies_before_the_swap() -> None:
    world = alone()
    world.do(("start", B))
    run(world, "link", "net", until=lambda: bool(member(world, A).peer))
    peer = member(world, A).peer
    assert peer is not None
    peer.durable, peer.required = 0, True
    world.do(("append", A))
    run(world, "disk", "apply")
    assert acked(world) == 0
    world.do(("crash", B))
    run(world, "net", "disk", "apply")
    assert acked(world) == 2


def test_h18_store_that_comes_no_nearer_is_required_at_once() -> None:
    world = alone(appends=3)
    live = member(world, A)
    live.settings = live.settings._replace(window_bytes=1)
    for _ in range(3):
        world.do(("append", A))
        run(world, "disk", "apply")
    world.do(("start", B))
    run(world, "link", "net", until=lambda: live.peer is not None and live.peer.durable is not None)
    assert live.peer is not None
    assert not live.peer.required
    world.nodes[B].inbound.clear()
    world.do(("time",))
    world.do(("time",))
    assert live.peer.required


def test_h19_window_bounds_what_a_backup_has_not_applied() -> None:
    world = pair(window=30)
    world.slow = True
    live = member(world, A)
    built = 0
    while serving.has_room(live):
        world.do(("append", A))
        run(world, "net", "disk")
        world.nodes[A].applies and world.do(("apply", A))
        built += 1
        assert built < 9
    assert live.log.commit == live.log.index.end.lsn
    run(world, "apply")
    world.do(("time",))
    run(world, "net")
    assert serving.has_room(live)


def test_h19_append_above_the_window_passes() -> None:
    world = pair(window=3)
    assert serving.has_room(member(world, A))
    world.do(("append", A))
    run(world, *LOCAL)
    assert acked(world) == 2


def test_h19_one_record_is_under_way() -> None:
    world = pair()
    world.do(("append", A))
    assert not serving.has_room(member(world, A))


def test_h20_full_disk_of_the_backup_refuses_before_anything_is_sent() -> None:
    world = pair()
    world.give(B, m.DiskSpace(True))
    run(world, "net")
    with pytest.raises(DiskWatermark):
        world.give(A, m.AppendRequested(b"x"))
    assert member(world, A).log.index.end.lsn == 1
    world.give(B, m.DiskSpace(False))
    run(world, "net")
    world.do(("append", A))


def test_h20_live_that_steps_down_says_so() -> None:
    world = pair()
    live = member(world, A)
    world.do(("append", A))
    effects = step(live, m.SessionEnded(live.session.number or 0), live.now)
    assert any(isinstance(each, m.StepDown) for each in effects)
    with pytest.raises(NotLive):
        world.give(A, m.AppendRequested(b"x"))


def test_h21_reads_wait_until_the_epoch_record_is_applied() -> None:
    world = pair(appends=1)
    world.do(("crash", A))
    run(world, until=lambda: role(world, B) is Role.OPENING)
    node = world.nodes[B]
    assert serving.reads(member(world, B), world.now(node)) is serving.Gate.WAIT
    run(world, "disk", "apply")
    assert serving.reads(member(world, B), world.now(node)) is serving.Gate.SEND


def test_h22_switch_ends_the_lease_after_everything_is_committed() -> None:
    world = pair(appends=1)
    world.do(("append", A))
    world.do(("switch", A))
    assert role(world, A) is Role.SWITCHING
    assert world.lock.lease is not None
    real = world.real
    run(world, until=lambda: role(world, B) is Role.LIVE)
    assert world.real - real <= QUANTUM < TTL
    assert acked(world) == 3
    world.settle()


def test_h22_switch_back_needs_no_wait() -> None:
    """The former primary lets the other one claim first; that is over once the other one is live."""
    world = pair(appends=1)
    world.do(("switch", A))
    run(world, until=lambda: role(world, B) is Role.LIVE)
    run(world, until=lambda: member(world, B).leading.membership.record.in_sync == (b"a1", b"b1"))
    real = world.real
    world.do(("switch", B))
    run(world, until=lambda: role(world, A) is Role.LIVE)
    assert world.real - real <= QUANTUM < TTL
    world.settle()


def test_h22_switch_to_a_backup_that_is_not_in_sync_is_refused() -> None:
    world = alone()
    with pytest.raises(NotInSync):
        world.give(A, m.SwitchRequested())


def test_h23_append_is_answered_after_it_is_applied() -> None:
    world = pair()
    world.slow = True
    world.do(("append", A))
    run(world, "disk", "net")
    assert member(world, A).log.commit == 2
    assert acked(world) == 0
    world.do(("apply", A))
    assert acked(world) == 2


def test_h24_swap_of_a_session_that_has_ended_is_refused() -> None:
    world = pair(appends=1)
    world.do(("crash", A))
    run(world, "time", until=lambda: bool(world.lock.requests))
    world.do(("crash", B))
    run(world, "time", limit=5)
    request = world.lock.requests[0]
    world.do(("swap", 0))
    assert world.lock.record.live == b"a1"
    assert not accepts(world.lock.view(), request[2].swap, session_alive=False)
    world.settle()


def test_h25_copy_is_taken_only_as_the_first_thing_on_a_link() -> None:
    world = pair(appends=1)
    backup = member(world, B)
    assert backup.link is not None
    for message in (m.CopyBegin(1, b"a1", START, ()), m.Rejoin(1, b"a1", m.CatchUp.COPY, START)):
        branch = clone(world)
        found = member(branch, B)
        assert found.link is not None
        branch.give(B, m.Received(found.link, message))
        assert (found.link, found.joining) == (None, None)


def test_h26_process_says_nothing_to_its_peer_before_it_has_read_the_lock() -> None:
    """The swap of its former process may still make it live; a session of its own rules that out."""
    world = pair(appends=1)
    world.do(("crash", B))
    world.do(("isolate", B))
    world.do(("start", B))
    run(world, *LOCAL)
    assert member(world, A).peer is None
    world.do(("reach", B))
    run(world, until=lambda: member(world, A).peer is not None)
    assert member(world, B).informed
    world.settle()


def test_h26_session_that_ends_in_a_claim_leaves_the_claim_open() -> None:
    """Its swap may have succeeded, so the store follows nobody until it has read the lock again."""
    world = pair(appends=1)
    world.do(("crash", A))
    run(world, "time", "disk", until=lambda: bool(world.lock.requests))
    backup = member(world, B)
    world.do(("isolate", B))
    world.give(B, m.SessionEnded(backup.session.number or 0))
    assert (backup.role, backup.claimed, backup.informed) == (Role.BACKUP, None, False)
    world.do(("start", A))
    run(world, "link", "net")
    assert backup.followed is None
    world.settle()


def test_h27_claim_that_was_refused_is_given_up_with_its_session() -> None:
    """The primary of a lock without a clock was only slow; an answer that was lost must not keep the claim open."""
    world = pair(appends=1, clocked=False)
    world.do(("pause", A))
    run(world, "time", until=lambda: bool(world.lock.requests))
    assert world.lock.lease is not None
    world.lock.lease = world.lock.lease._replace(renewals=99)
    world.do(("swap", 0))
    world.do(("lose", 0))
    assert role(world, B) is Role.CLAIMING
    session = member(world, B).session.number
    world.do(("time",))
    world.do(("swap", 0))
    world.do(("answer", 0))
    assert role(world, B) is Role.BACKUP
    assert session not in world.lock.sessions
    world.do(("resume", A))
    world.settle()


def test_pair_is_founded_again_after_the_record_of_its_lock_is_lost() -> None:
    """The epochs of a log only grow, also where the lock knows none of them."""
    world = pair(appends=1)
    for at in (A, B):
        world.do(("crash", at))
    world.lock = Lock()
    world.do(("start", A))
    run(world, until=lambda: role(world, A) is Role.LIVE)
    assert [record.mark.epoch for record in world.nodes[A].disk.journal] == [1, 1, 2]
    world.do(("crash", A))
    world.do(("start", A))
    world.do(("start", B))
    world.settle()
    assert world.nodes[B].disk.store == b"b1"


def test_empty_store_is_not_forced() -> None:
    world = World()
    world.do(("start", B))
    run(world, "answer")
    with pytest.raises(NotPromotable, match="this store is empty"):
        world.give(B, m.ForceRequested())


def test_founder_whose_directory_was_emptied_is_not_forced() -> None:
    """It begins at a random mark before any epoch: as a primary it would have another log than the pair."""
    world = World()
    world.do(("start", B))
    run(world, "answer")
    member = world.nodes[B].member
    assert member is not None
    member.log.index = Index(Mark(0, 1, 7))
    with pytest.raises(NotPromotable, match="this store is empty"):
        world.give(B, m.ForceRequested())


def test_request_to_force_expires() -> None:
    """It must not come true when the primary dies much later."""
    world = alone(appends=1)
    world.do(("start", B))
    world.give(B, m.ForceRequested())
    early = clone(world)
    early.do(("crash", A))
    run(early, "time", until=lambda: bool(early.lock.requests))
    run(world, "time", limit=16)
    world.do(("crash", A))
    run(world, "time", limit=16)
    assert world.lock.lease is None
    assert role(world, B) is Role.BACKUP
    assert world.lock.requests == []


def test_node_that_fails_to_sync_stops() -> None:
    world = pair(appends=1)
    backup = member(world, B)
    assert step(backup, m.SyncFailed("EIO"), backup.now) == [m.Stop("EIO")]
    assert backup.role is Role.STOPPED
    assert step(backup, m.Tick(), backup.now + TTL) == []


def test_h28_forced_cut_keeps_what_a_restart_would_apply() -> None:
    """Records that were synced after their link had broken name a commit index that the store was not told."""
    world = alone()
    for _ in range(2):
        world.do(("append", A))
        run(world, "disk", "apply")
    world.do(("start", B))
    run(world, "net", "link", "answer", "time", until=lambda: bool(world.nodes[B].disk.written))
    world.do(("break",))
    world.do(("net", B))
    world.do(("crash", A))
    run(world, "disk")
    backup = member(world, B)
    assert backup.log.commit < backup.log.named < backup.log.durable
    world.do(("force", B))
    run(world, "time", "disk", "apply", until=lambda: bool(world.lock.requests))
    world.do(("swap", 0))
    cut = world.lock.record.forced
    assert cut is not None
    assert cut.lsn == backup.log.named
    world.do(("crash", B))
    world.do(("start", B))
    run(world, "disk", "apply", "answer")
    assert len(world.nodes[B].state) == cut.lsn
    world.settle()
