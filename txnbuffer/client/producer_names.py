"""The producer names of a client: their epochs and numbers, and the order of their commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from txnbuffer.coordinator.messages import NameOpened, ProducerSequence
from txnbuffer.errors import AlreadyCommitted, Fenced, NotVisible, ProducerFenced, TransactionAborted
from txnbuffer.model import TxnId


@dataclass(eq=False)
class ProducerNames:
    """The producer names that a client has opened, with their epochs and last committed numbers.

    Opening a name fences its previous holder, which may be this client; so each name is opened once. After another
    client has opened it, its program has to ask for the committed number first: a transaction that was built before
    would repeat what the other one has committed under other numbers.
    """

    _opened: dict[str, NameOpened] = field(default_factory=dict)
    _fenced: set[str] = field(default_factory=set)
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _commits: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    _failures: dict[str, int] = field(default_factory=dict)
    """How many commits of each name have failed, so that those that waited for one notice it."""

    async def sequence(self, name: str, number: int, open_name: Callable[[str], Awaitable[object]]) -> ProducerSequence:
        """Return the sequence of a transaction; open the name with `open_name` first if necessary.

        Raises AlreadyCommitted, and ProducerFenced after another client has opened the name.
        """
        if name in self._fenced:
            raise ProducerFenced(
                f"another client has opened producer {name!r}: stop, or continue after what it has committed: call "
                f"committed_number({name!r}) and continue after that number"
            )
        held = self._opened.get(name)
        if held is None:
            async with self._turns.setdefault(name, asyncio.Lock()):
                if name not in self._opened:
                    await open_name(name)
                held = self._opened[name]
        if number <= held.committed:
            raise AlreadyCommitted(name, number, held.committed)
        return ProducerSequence(name, number, held.epoch)

    @asynccontextmanager
    async def committing(self, txn: TxnId, name: str) -> AsyncIterator[None]:
        """Commit transactions of a name one after the other; after one that fails those that wait for it fail, too.

        Otherwise a number could commit without the one before it, which could then not be committed any more. Raises
        TransactionAborted.
        """
        lock, failures = self._commits.setdefault(name, asyncio.Lock()), self._failures.get(name, 0)
        try:
            async with lock:
                if self._failures.get(name, 0) != failures:
                    raise TransactionAborted(txn, f"an earlier commit of producer {name!r} failed")
                yield
        except NotVisible:
            raise
        except BaseException:  # also if it was cancelled while it waited
            if self._failures.get(name, 0) == failures:
                self._failures[name] = failures + 1
            raise

    def opened(self, name: str, opened: NameOpened) -> None:
        """A name was opened."""
        self._fenced.discard(name)
        self._opened[name] = opened

    def committed(self, sequence: ProducerSequence) -> None:
        """A transaction of the name has committed."""
        held = self._opened.get(sequence.name)
        if held is not None and held.epoch == sequence.epoch:
            self._opened[sequence.name] = held._replace(committed=sequence.number)

    def lost(self, sequence: ProducerSequence, error: Fenced) -> None:
        """A transaction of the name was fenced."""
        held = self._opened.get(sequence.name)
        if held is not None and held.epoch == sequence.epoch:
            del self._opened[sequence.name]
            if isinstance(error, ProducerFenced):
                self._fenced.add(sequence.name)

    def forget(self, name: str) -> None:
        """Release a name; the next use opens it again."""
        self._fenced.discard(name)
        self._opened.pop(name, None)
