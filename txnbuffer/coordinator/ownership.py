"""How an owner of the decision log finds its epoch.

Opening the log's exclusive writer fences the older owners, but what one of them had under way may still land
before the new owner's first message, an `owner` entry too. So the new owner writes its entry, reads up to
it, and writes another one, higher, if an epoch as high stands there; nothing else is written before.
"""

from __future__ import annotations

from broker_io.batch import Message
from txnbuffer.coordinator.entries import Owner, encode


class Acquisition:
    """The steps of one owner: append `entry()`, read up to it, tell `read` what stood before, until it is True.

    `seen` is the highest epoch in the log so far, 0 if there is none; `address` is where clients find the owner.
    """

    def __init__(self, owner: str, seen: int, address: str = "") -> None:
        self._owner = owner
        self._address = address
        self.epoch = seen + 1

    def entry(self) -> Message:
        return encode(Owner(self.epoch, self._owner, self._address))

    def read(self, highest: int) -> bool:
        """`highest`: the highest epoch of other owners before our entry. False: append another entry."""
        if highest < self.epoch:
            return True
        self.epoch = highest + 1
        return False
