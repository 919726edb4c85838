"""A member with damaged files lets the other one become live first, but not for ever."""

from __future__ import annotations

import pytest
from pair_world import SETTINGS, TTL

from broker_io.replication import messages as m
from broker_io.replication.lease import LockLease, LockSession
from broker_io.replication.lock import LockRecord, LockView
from broker_io.replication.member import PairMember, Role
from broker_io.replication.records import START, Index, Mark, StoreLog
from broker_io.replication.states import step

END = Mark(1, 5, 7)


def waiting(*, damaged: bool, in_sync: tuple[bytes, ...]) -> tuple[PairMember, LockRecord]:
    """A backup with everything, whose session lives, and the record of the lock."""
    member = PairMember(SETTINGS, StoreLog(b"b1", Index(END), 5, 5, 5, END, pair=b"p"))
    member.informed = True
    step(member, m.DamageNoted(damaged), 0)
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
    for event in (m.DamageNoted(False), m.ForceRequested()):
        member, record = waiting(damaged=True, in_sync=(b"a1", b"b1"))
        read(member, record, 100)
        step(member, event, 101)
        assert read(member, record, 102) is Role.CLAIMING
