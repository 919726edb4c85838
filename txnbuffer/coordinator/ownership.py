"""How an owner of the decision log finds its epoch.

Opening the log's exclusive writer fences the older owners, but what one of them had under way may still land
before the new owner's first message, an `owner` entry too. So the new owner writes its entry, reads up to
it, and writes another one, higher, if an epoch as high stands there; nothing else is written before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from broker_io.batch import Message
from txnbuffer.coordinator.entries import Owner, Ownership, encode
from txnbuffer.coordinator.sizes import LARGEST_LIMIT
from txnbuffer.model import MAX_LEAST

KEPT = 1000
"""So many owners an entry tells of, if it may be as large as that."""
REST_BYTES = 2048
"""What an entry takes besides them, with an address and the name of its owner."""
SHARE_BITS = 24
"""An owner skips up to one part in 2**24 of the ids that are left: after as many owners three fifths are."""


class Acquisition:
    """The steps of one owner: append `entry()`, read up to it, tell `read` what stood before, until it is True.

    `seen` is the highest epoch in the log so far, 0 if there is none; `address` is where clients find the owner.
    `drawn` is its random id, `owners` are those that the log tells of, by epoch; the entry has the newest of them too,
    as many as a message of `max_bytes` has room for. `last` is the highest id of a transaction that they leased, as far
    as is known, where owners that are gone may have leased higher ones; None: none has.
    """

    def __init__(
        self,
        owner: str,
        seen: int,
        address: str = "",
        drawn: str = "",
        owners: Mapping[int, Ownership] | None = None,
        max_bytes: int = LARGEST_LIMIT,
        last: int | None = None,
    ) -> None:
        self._owner = owner
        self._address = address
        self.epoch = seen + 1
        self._id = drawn
        self._owners = dict(owners or {})
        self._max_bytes = max_bytes
        self._last = last

    def entry(self) -> Message:
        return encode(Owner(self.epoch, self._owner, self._address, self.owners))

    @property
    def owners(self) -> tuple[Ownership, ...]:
        """Those up to this one, which is the last."""
        if not self._id:
            return ()
        own = Ownership(self.epoch, self._id)
        if self._last is not None:
            own = own._replace(skipped=self._last + 1, first=first_id(self._last, self._id))
        older = sorted(one for one in self._owners.values() if one.epoch < self.epoch)
        kept = [*older[1 - KEPT :], own]
        while len(kept) > 1 and len(json.dumps(kept)) > self._max_bytes - REST_BYTES:
            del kept[: len(kept) // 8 + 1]
        return tuple(kept)

    def read(self, highest: int, owners: Mapping[int, Ownership] | None = None, last: int | None = None) -> bool:
        """What stands before our entry: the highest epoch of other owners, those, and `last`.

        False: append another entry.
        """
        others = {at: one for at, one in (owners or {}).items() if one.id != self._id and self._owners.get(at) != one}
        if highest < self.epoch and not others and last == self._last:
            return True
        self._last = last
        self._owners |= others
        self.epoch = max(highest, self.epoch) + 1
        return False


def first_id(last: int, drawn: str) -> int:
    """Where the ids of an owner begin that drew this id, behind `last`.

    Where an older copy of a log was put back, those of owners that are gone lie anywhere above `last`: the range is so
    wide that hardly one is leased again, and each owner takes a share of what is left, so ids never run out.
    """
    return last + 1 + int(drawn, 16) % (((MAX_LEAST - last) >> SHARE_BITS) + 1)
