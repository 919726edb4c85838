"""A backup follows its primary

A backup takes a record only if it is the next one of its log and the chain fits, on a link on which the end of its log
was compared with the log of the primary. It syncs before it says that something is durable. It applies no more than the
primary says is committed, than was compared on this link, and than is durable here: a suffix of a former epoch may
differ from what was committed, and an effect whose record is lost would have no cause after a crash.

It obeys no epoch below the greatest that it knows of. The order of messages on a link is kept, so a record that does
not follow is a defect; a new link begins with a new comparison.
"""

from __future__ import annotations

from broker_io.errors import StorageError
from broker_io.filelog.replication import damage
from broker_io.filelog.replication.member import Followed, PairMember, Role
from broker_io.filelog.replication.messages import (
    Applied,
    DiskSpace,
    Durable,
    Follow,
    Hello,
    LinkDown,
    LinkUp,
    NoteCommit,
    Records,
    RewriteDone,
    Synced,
    Tick,
    WriteRecords,
)


def on_link_up(member: PairMember, event: LinkUp) -> None:
    """Begin with a link; a store that is being changed waits until that is done."""
    member.unlink()
    member.link = event.link
    greet(member)


def on_link_down(member: PairMember, event: LinkDown) -> None:
    if event.link == member.link:
        member.unlink()


def greet(member: PairMember) -> None:
    """Say what this store has, so that a primary can compare it with its log.

    A process that has not read the lock since its session began knows nothing of swaps that its store sent before.
    """
    log = member.log
    ready = member.role is Role.BACKUP and member.informed and not member.busy
    if ready and member.followed is None:
        commit = log.index.mark(min(log.commit, log.index.end.lsn)) or log.manifest
        member.send(Hello(member.floor, log.store, log.index.end, commit, log.partial or member.lacking))


def obeys(member: PairMember, epoch: int) -> bool:
    """Whether a message of this epoch counts; if not, the link is broken."""
    if epoch >= member.floor and not member.busy:
        return True
    member.break_link()
    return False


def on_follow(member: PairMember, message: Follow) -> None:
    """The primary has compared the end of our log; what is durable up to there counts on this link."""
    log = member.log
    if not obeys(member, message.epoch):
        return
    if message.after != log.index.end or log.partial:
        member.break_link()
        return
    member.followed = Followed(message.epoch, message.store, message.after.lsn, message.commit)
    report(member)
    report_rewrites(member)
    damage.on_compared(member)
    _apply(member)


def on_records(member: PairMember, message: Records) -> None:
    """Take the records that follow, and the commit index."""
    followed, log = member.followed, member.log
    if not obeys(member, message.epoch):
        return
    if followed is None or (message.epoch, message.store) != (followed.epoch, followed.store):
        member.break_link()
        return
    for record in message.records:
        try:
            log.append(record)
        except StorageError:
            member.break_link()
            return
        followed.compared = record.lsn
    if message.records:
        member.do(WriteRecords(message.records, log.durable))
    followed.commit = max(followed.commit, message.commit)
    _apply(member)


def _apply(member: PairMember) -> None:
    followed, log = member.followed, member.log
    if followed is not None:
        log.commit = max(log.commit, min(followed.commit, followed.compared, log.durable))
    member.apply_to(log.commit)


def report(member: PairMember) -> None:
    """Say what is durable here, which keeps the primary informed that this backup is well."""
    followed, log = member.followed, member.log
    if followed is not None:
        mark = log.mark_at(log.durable)
        member.send(Durable(followed.epoch, log.store, mark, log.applied, member.full))


def report_rewrites(member: PairMember) -> None:
    """Say which compactions this backup has rewritten."""
    followed = member.followed
    results = tuple([event for store, event in member.rewrites if store == member.store])
    if followed is not None and results:
        member.send(RewriteDone(followed.epoch, member.store, results))


def on_synced(member: PairMember, event: Synced) -> None:
    if note_synced(member, event.lsn):
        report(member)
        _apply(member)


def note_synced(member: PairMember, lsn: int) -> bool:
    """Remember how far the journal is durable; whether that is further than before."""
    log = member.log
    lsn = min(lsn, log.index.end.lsn)
    if lsn <= log.durable:
        return False
    log.durable = lsn
    return True


def on_applied(member: PairMember, event: Applied) -> None:
    note_applied(member, event.lsn)
    if member.log.durable == member.log.index.end.lsn:
        report(member)  # else the next sync does


def note_applied(member: PairMember, lsn: int) -> None:
    """Remember how far the log is applied, and note in the journal what is committed."""
    log = member.log
    log.applied = max(log.applied, min(lsn, log.commit))
    if log.commit > member.noted:
        member.noted = log.commit
        member.do(NoteCommit(log.commit))


def on_disk_space(member: PairMember, event: DiskSpace) -> None:
    """The primary refuses appends while a disk in sync is full, before it sends them."""
    member.full = event.full
    report(member)


def on_tick(member: PairMember, _event: Tick) -> None:
    """Keep the session, read the lock, and show the primary that this backup is there."""
    member.keep_session()
    report(member)
    settings = member.settings
    if member.session.number is None:
        return
    if member.reading is None or member.now >= member.read_since + settings.answer_timeout:
        member.read_lock()
