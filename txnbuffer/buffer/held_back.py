"""What readers of a topic do not get yet because an older transaction is open, for readers, commands and metrics"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from txnbuffer.model import Position, TxnId


class HeldBack(NamedTuple):
    """The messages of a topic that readers do not get before a transaction has ended, the oldest open one.

    - `messages`: how many: all after `first`. Markers, record sets, and records of transactions that may abort count as
      one each.
    - `txn`: the transaction; `first`: its first record in this topic, before which readers stop.
    - `since`: when that record was written; None if it cannot be read.
    - `until`: when the transaction is aborted at the latest; None if that is unknown. The log does not say it, only its
      owner: commands on a service, and readers of a client that owns the log, once the transaction is open for a
      second. If the log has no owner, the next one decides.

    Times are milliseconds since 1970.
    """

    topic: str
    messages: int
    txn: TxnId
    first: Position
    since: int | None
    until: int | None

    def __str__(self) -> str:
        since = "" if self.since is None else f" since {time_text(self.since)}"
        until = "" if self.until is None else f", until {time_text(self.until)} at the latest"
        count = f"{self.messages} message{' is' if self.messages == 1 else 's are'}"
        held = f"topic {self.topic!r}: {count} held back by open transaction {self.txn}"
        return f"{held}{since}{until}"

    def as_json(self) -> dict[str, str | int | None]:
        """The value as an object of JSON."""
        return self._asdict() | {"txn": str(self.txn), "first": str(self.first)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> HeldBack:
        """The value of an object that `as_json` has returned, perhaps of a newer program. Raises ValueError."""
        found = {**found, "txn": TxnId.parse(found["txn"]), "first": Position.parse(found["first"])}
        return cls._make([found.get(name) for name in cls._fields])


def time_text(milliseconds: int) -> str:
    """A time as text, to the second, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
