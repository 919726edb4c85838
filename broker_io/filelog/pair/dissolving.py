"""Ending a pair: the store of one member becomes a log without a pair, and the other store can never be live again

The member becomes live by the rules of the pair, alone. So it has every acknowledged record, unless it was promoted by
force, and everything in its log is committed and applied. It writes a checkpoint, so that its directory can leave the
pair without being live again. Then the record of the lock gets an empty `in_sync`, after which no store is promoted.
The directory leaves the pair last. If something interrupts this, it is done again, and continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress

from broker_io.environment import current
from broker_io.errors import CallerError, Error, LockUnavailable, NotPromotable
from broker_io.filelog.log.layout import Options, load_manifest
from broker_io.filelog.log.records import Store
from broker_io.filelog.log.recovery import open_log
from broker_io.filelog.pair import open_lock
from broker_io.filelog.pair.broker import PairBroker, PairOptions
from broker_io.filelog.pair.port import LinkEvents, PairLock, Transport
from broker_io.filelog.replication.lock import NO_RECORD, Swap, foreign

LEASES = 3
"""Leases within which a member must become live: that of another one has to end, and a request for force lapses."""


class NoLink(Transport):
    """No link: the other member takes no part."""

    problem = ""

    def start(self, events: LinkEvents, may_accept: Callable[[], bool], may_connect: Callable[[], bool]) -> None:
        """Nothing."""

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        raise NotPromotable(
            f"this store lacks the file {name}: start its service, wait until it is in sync, then stop it"
        )

    def close(self) -> None:
        """Nothing."""


def dissolve(directory: str, pair: PairOptions, *, force: bool = False) -> None:
    """End the pair of the directory of a member that is not running; its log then belongs to no pair.

    `force`: although the other member may have acknowledged records that this one lacks. Raises NotPromotable if this
    member does not become live, CallerError for a directory without a pair, LockUnavailable, and what opening a log
    raises. Nothing has changed then but that this member may have been live for a moment.
    """
    manifest = load_manifest(current().disk, directory)
    if manifest is None or not manifest.is_member:
        raise CallerError(f"{directory} belongs to no pair: there is nothing to dissolve")
    store = manifest.pair.store
    with closing(open_lock(pair.lock)) as lock:
        record = lock.read().record
        if record == NO_RECORD:
            raise NotPromotable(
                f"the lock {pair.lock} has no record of a pair: check its name. If the record is lost, start and stop "
                "the service of the machine that was live last with --found, then repeat this"
            )
        if (error := foreign(record, manifest.pair.id)) is not None:
            raise error
        if not record.dissolved:
            _end_as_live(directory, pair, lock, force=force)
        elif record.live != store:
            raise NotPromotable(f"the pair was dissolved by the other member, which has the log: remove {directory}")
    with closing(open_log(current(), directory, Options(), member=True).log) as log:
        log.leave()


def _end_as_live(directory: str, pair: PairOptions, lock: PairLock, *, force: bool) -> None:
    """Become live, and let no other store be live after that."""
    settings = pair.settings()._replace(min_in_sync=1, founder=False)
    with PairBroker(current(), directory, Options(), settings, open_lock(pair.lock), NoLink()) as broker:
        if force:
            broker.promote()
        if not broker.wait_live(LEASES * pair.lease_seconds):
            why = broker.status()["waits_for"]
            raise NotPromotable(f"{directory} may lack acknowledged records, so its pair is not dissolved: {why}")
        _mark(lock, broker.leave(), pair.lease_seconds)


def _mark(lock: PairLock, store: Store, ttl: float) -> None:
    """Store in the lock that the pair was dissolved by a store, which was live last. Raises LockUnavailable."""
    session = lock.renew(store, None, ttl)
    if session is None:
        raise LockUnavailable("there is no session with the lock service: try again")
    view = lock.read()
    record = view.record
    if (record.live, record.in_sync) != (store, (store,)):
        raise NotPromotable("the other member has become live meanwhile: its store has the log")
    done, _ = lock.swap(Swap(record._replace(version=record.version + 1, in_sync=()), session, view.lease))
    with suppress(Error):  # it ends by itself
        lock.end_session(session)
    if not done:
        raise LockUnavailable("the lock has changed meanwhile: try again")
