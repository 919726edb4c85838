"""What a lock of a pair stores, and the locks of a file and of a test as a value

A lock's record is stored as a JSON object, in UTF-8:

    format    1
    version, epoch
    live      the id of the store that is live, hex
    in_sync   the ids of all stores in sync, hex; empty once the pair was dissolved
    reached   [epoch, lsn, chain] of the mark which they all had
    forced    null, or such a mark
    pair      the id of the pair, hex; missing if its founder had none
    session   the session whose swap made this record; the lease of the primary is that of this session

A lock that can end no session by itself stores all of its state: the object has in addition

    lease     null, or [store in hex, session, renewals]
    sessions  the session of each store that has one: {store in hex: session}
    begun     the number of the last session

A newer format, which this release does not read, raises UnsupportedFormat, anything else StorageError.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Self

from broker_io.errors import StorageError, UnsupportedFormat
from broker_io.filelog.log.records import MAX_NUMBER, Mark, Store
from broker_io.filelog.replication.lease import LockLease
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView, Swap, accepts

FORMAT = 1


def encode_record(record: LockRecord, session: int) -> bytes:
    """A record and the session that made it."""
    return _as_json(_plain(record, session))


def decode_record(data: bytes, where: str) -> tuple[LockRecord, int]:
    """The record and session of these bytes, which are stored at a place. Raises StorageError, UnsupportedFormat."""
    return _LockDecoder(data, where).record()


def _plain(record: LockRecord, session: int) -> dict[str, Any]:
    pair = {"pair": record.pair.hex()} if record.pair else {}
    return {
        "format": FORMAT,
        "version": record.version,
        "epoch": record.epoch,
        "live": record.live.hex(),
        "in_sync": [store.hex() for store in record.in_sync],
        "reached": record.reached,
        "forced": record.forced,
        **pair,
        "session": session,
    }


def _as_json(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


class _LockDecoder:
    """Reads the fields of an object; `where` is the place that its errors name."""

    def __init__(self, data: bytes, where: str) -> None:
        self._where = where
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise self._damaged("no JSON object")
        self._fields = fields
        version = self._number("format")
        if version != FORMAT:
            raise UnsupportedFormat(f"{where}: the lock has format {version}, this release reads {FORMAT}: upgrade it")

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self._where}: {what} where the record of a lock was expected: use another name for it")

    def record(self) -> tuple[LockRecord, int]:
        forced = self._fields.get("forced")
        record = LockRecord(
            self._number("version"),
            self._number("epoch"),
            self._store(self._fields.get("live")),
            tuple([self._store(each) for each in self._list("in_sync")]),
            self._mark(self._fields.get("reached")),
            None if forced is None else self._mark(forced),
            self._store(self._fields.get("pair", "")),
        )
        return record, self._number("session")

    def lease(self) -> LockLease | None:
        fields = self._fields.get("lease")
        if fields is None:
            return None
        if not isinstance(fields, list) or len(fields) != 3:
            raise self._damaged(f"the lease {fields!r}")
        return LockLease(self._store(fields[0]), self._checked(fields[1]), self._checked(fields[2]))

    def sessions(self) -> dict[Store, int]:
        fields = self._fields.get("sessions")
        if not isinstance(fields, dict):
            raise self._damaged(f"the sessions {fields!r}")
        return {self._store(store): self._checked(session) for store, session in fields.items()}

    def begun(self) -> int:
        return self._number("begun")

    def _number(self, name: str) -> int:
        return self._checked(self._fields.get(name))

    def _checked(self, value: object) -> int:
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            raise self._damaged(f"{value!r} instead of a number")
        return value

    def _list(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        if not isinstance(value, list):
            raise self._damaged(f"{value!r} instead of a list")
        return value

    def _store(self, value: object) -> Store:
        try:
            return bytes.fromhex(value)  # type: ignore[arg-type]  # TypeError is handled
        except (TypeError, ValueError):
            raise self._damaged(f"{value!r} instead of the id of a store") from None

    def _mark(self, value: object) -> Mark:
        if not isinstance(value, list) or len(value) != 3:
            raise self._damaged(f"{value!r} instead of a mark")
        return Mark(*map(self._checked, value))


@dataclass
class LockState:
    """All of a lock that has no clock: a session ends when another one of its store begins, or on request."""

    record: LockRecord = NO_RECORD
    session: int = 0
    lease: LockLease | None = None
    sessions: dict[Store, int] = field(default_factory=dict)
    begun: int = 0

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """The state of these bytes, which are stored at a place. Raises StorageError, UnsupportedFormat."""
        found = _LockDecoder(data, where)
        return cls(*found.record(), found.lease(), found.sessions(), found.begun())

    def encode(self) -> bytes:
        lease = self.lease
        return _as_json({
            **_plain(self.record, self.session),
            "lease": None if lease is None else [lease.store.hex(), lease.session, lease.renewals],
            "sessions": {store.hex(): session for store, session in self.sessions.items()},
            "begun": self.begun,
        })  # fmt: skip

    def view(self) -> LockView:
        return LockView(self.record, self.lease)

    def swap(self, swap: Swap) -> bool:
        """Do a swap; whether it was accepted."""
        live = swap.record.live
        if not accepts(self.view(), swap, session_alive=self.sessions.get(live) == swap.session):
            return False
        renewals = 0 if self.lease is None else self.lease.renewals + 1
        self.record, self.session = swap.record, swap.session
        self.lease = LockLease(live, swap.session, renewals)
        return True

    def renew(self, store: Store, session: int | None) -> int | None:
        """Renew a session; None if it has ended. For None begin one, which ends the former one of the store."""
        if session is None:
            self.end(self.sessions.get(store))
            self.begun += 1
            self.sessions[store] = self.begun
            return self.begun
        if self.sessions.get(store) != session:
            return None
        if self.lease is not None and self.lease.session == session:
            self.lease = self.lease._replace(renewals=self.lease.renewals + 1)
        return session

    def end(self, session: int | None) -> None:
        """End a session and its lease, if it has not ended."""
        self.sessions = {store: each for store, each in self.sessions.items() if each != session}
        if self.lease is not None and self.lease.session == session:
            self.lease = None
