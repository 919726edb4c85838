"""The names of producers that a client holds: each is opened once, however many of its tasks use it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from txnbuffer.coordinator.messages import NameOpened, Naming
from txnbuffer.errors import AlreadyCommitted


class Names:
    """Opening a name fences whoever had it, this client too."""

    def __init__(self) -> None:
        self._held: dict[str, NameOpened] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def naming(self, name: str, number: int, opening: Callable[[str], Awaitable[object]]) -> Naming:
        """The name as it is held; where it isn't, `opening` has it held. Raises AlreadyCommitted."""
        held = self._held.get(name)
        if held is None:
            async with self._turns.setdefault(name, asyncio.Lock()):
                if name not in self._held:
                    await opening(name)
                held = self._held[name]
        if number <= held.committed:
            raise AlreadyCommitted(name, number, held.committed)
        return Naming(name, number, held.opening)

    def opened(self, name: str, opened: NameOpened) -> None:
        """It is held from now on."""
        self._held[name] = opened

    def committed(self, naming: Naming) -> None:
        """A transaction of a name has committed."""
        held = self._held.get(naming.name)
        if held is not None and held.opening == naming.opening:
            self._held[naming.name] = held._replace(committed=naming.number)

    def lost(self, naming: Naming) -> None:
        """Another producer opened the name after this one did; its next use opens it anew."""
        held = self._held.get(naming.name)
        if held is not None and held.opening == naming.opening:
            del self._held[naming.name]

    def forget(self, name: str) -> None:
        """Its next use opens it anew."""
        self._held.pop(name, None)
