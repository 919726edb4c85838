"""State that modules of the product keep for their process: each simulated process gets its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from broker_io import environment, waits
from txnbuffer.client.sync import portal

if TYPE_CHECKING:
    from sim.world import Process

Find = Callable[[], "Process | None"]


class ProcessDict(MutableMapping[Any, Any]):
    """A dict of the running process; the world itself has one too."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._outside: dict[Any, Any] = {}

    @property
    def _own(self) -> dict[Any, Any]:
        process = self._find()
        found: dict[Any, Any] = self._outside if process is None else process.state.setdefault(self, {})
        return found

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class ProcessObject:
    """An object of the running process, made when it is first used."""

    def __init__(self, find: Find, make: Callable[[], Any]) -> None:
        self._own = ProcessDict(find)
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if "object" not in self._own:
            self._own["object"] = self._make()
        return getattr(self._own["object"], name)


@contextlib.contextmanager
def state_of_processes(find: Find) -> Iterator[None]:
    """Give each process its own state of modules for a block."""
    before = waits._waits, waits._failed, portal.CLOSED_AT_EXIT
    grpc = environment._Grpc.used, environment._Grpc.inherited
    environment._Grpc.inherited = False  # the simulated one works in forked processes
    waits._waits, waits._failed = ProcessDict(find), ProcessDict(find)
    portal.CLOSED_AT_EXIT = ProcessObject(find, type(before[2]))
    try:
        yield
    finally:
        waits._waits, waits._failed, portal.CLOSED_AT_EXIT = before
        environment._Grpc.used, environment._Grpc.inherited = grpc
