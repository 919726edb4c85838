"""A member with damaged files is not preferred: not in a switch, and not where both could become live."""

from __future__ import annotations

import pytest
from pair_world import SETTINGS, TTL, World
from replication.pair_histories import LOCAL, A, B, member, pair, role, run

from broker_io.errors import NotInSync
from broker_io.filelog.log.records import START, Index, Mark, StoreLog
from broker_io.filelog.replication import messages as m
from broker_io.filelog.replication.lease import LockLease, LockSession
from broker_io.filelog.replication.lock import LockRecord, LockView
from broker_io.filelog.replication.member import PairMember, Role
from broker_io.filelog.replication.states import step

END = Mark(1, 5, 7)


def waiting(*, damaged: bool, in_sync: tuple[bytes, ...]) -> tuple[PairMember, LockRecord]:
    """A backup with everything, whose session lives, and the record of the lock."""
    member = PairMember(SETTINGS, StoreLog(b"b1", Index(END), 5, 5, 5, END, pair=b"p"))
    member.informed = True
    step(member, m.DamageNoted(("t",) if damaged else ()), 0)
    return member, LockRecord(3, 1, b"a1", in_sync, START, None, b"p")


def read(member: PairMember, record: LockRecord, now: int, lease: LockLease | None = None) -> Role:
    """The role after a read of the lock."""
    member.session, member.reading, member.read_since = LockSession(1, now), 9, now
    step(member, m.LockRead(9, LockView(record, lease)), now)
    return member.role


def test_damaged_member_waits_for_one_lease_after_that_of_the_live_has_ended() -> None:
    member, record = waiting(damaged=True, in_sync=(b"a1", b"b1"))
    assert read(member, record, 100) is Role.BACKUP
    assert read(member, record, 99 + TTL) is Role.BACKUP
    assert read(member, record, 100 + TTL) is Role.CLAIMING


def test_wait_begins_anew_once_somebody_was_live() -> None:
    member, record = waiting(damaged=True, in_sync=(b"a1", b"b1"))
    read(member, record, 100)
    assert read(member, record, 50 + TTL, LockLease(b"a1", 1, 1)) is Role.BACKUP
    assert read(member, record, 100 + TTL) is Role.BACKUP
    assert read(member, record, 100 + 2 * TTL) is Role.CLAIMING


@pytest.mark.parametrize(("damaged", "in_sync"), [(False, (b"a1", b"b1")), (True, (b"b1",))])
def test_member_without_damage_or_alone_in_sync_waits_for_nobody(damaged: bool, in_sync: tuple[bytes, ...]) -> None:
    member, record = waiting(damaged=damaged, in_sync=in_sync)
    assert read(member, record, 100) is Role.CLAIMING


def test_repaired_member_and_a_forced_one_wait_no_longer() -> None:
    for event in (m.DamageNoted(()), m.ForceRequested()):
        member, record = waiting(damaged=True, in_sync=(b"a1", b"b1"))
        read(member, record, 100)
        step(member, event, 101)
        assert read(member, record, 102) is Role.CLAIMING


def test_member_waits_for_nobody_that_has_the_same_damage() -> None:
    for there, found in ((("s", "t"), Role.CLAIMING), (("s",), Role.BACKUP)):
        waits, record = waiting(damaged=True, in_sync=(b"a1", b"b1"))
        waits.damaged_there = there
        assert read(waits, record, 100) is found


# --- a planned switch ---


def damage(world: World, at: int, *topics: str) -> None:
    world.give(at, m.DamageNoted(topics))
    run(world, *LOCAL)


def test_switch_to_a_damaged_backup_waits_for_its_repair() -> None:
    world = pair(appends=1)
    damage(world, B, "orders", "t")
    damage(world, A, "t")
    with pytest.raises(NotInSync, match=r"topics 'orders', which .*wait until they are repaired"):
        world.give(A, m.SwitchRequested())
    assert role(world, A) is Role.LIVE
    damage(world, B, "t")
    world.give(A, m.SwitchRequested())
    run(world, until=lambda: role(world, B) is Role.LIVE)
    world.settle()


def test_error_names_a_few_of_many_topics() -> None:
    world = pair()
    damage(world, B, *[f"topic{number}" for number in range(2000)])
    with pytest.raises(NotInSync, match="topics 'topic0', 'topic1', 'topic2' and 997 more, which"):
        world.give(A, m.SwitchRequested())


def test_each_link_begins_without_what_was_said_before() -> None:
    world = pair()
    damage(world, B, "t")
    world.do(("break",))
    world.give(B, m.DamageNoted(()))
    world.settle()
    world.give(A, m.SwitchRequested())
    run(world, until=lambda: role(world, B) is Role.LIVE)


def test_damage_is_said_again_on_a_new_link_and_to_the_backup_too() -> None:
    world = pair()
    damage(world, B, "t")
    damage(world, A, "s")
    world.do(("break",))
    world.settle()
    assert (member(world, A).damaged_there, member(world, B).damaged_there) == (("t",), ("s",))


def test_damage_that_is_found_during_a_switch_ends_it() -> None:
    world = pair()
    world.do(("append", A))
    world.give(B, m.DamageNoted(("t",)))
    world.give(A, m.SwitchRequested())
    assert role(world, A) is Role.SWITCHING
    run(world, *LOCAL, until=lambda: role(world, A) is not Role.SWITCHING)
    assert role(world, A) is Role.LIVE


def test_damage_of_another_store_or_epoch_breaks_the_link() -> None:
    for message in (m.DamagedTopics(1, b"b2", ("t",)), m.DamagedTopics(7, b"b1", ("t",))):
        world = pair()
        live = member(world, A)
        assert live.link is not None
        world.give(A, m.Received(live.link, message))
        assert (live.link, live.damaged_there) == (None, ())
