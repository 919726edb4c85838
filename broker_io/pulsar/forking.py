"""What a forked child does with what its parent has open at a cluster: nothing.

The objects of the client library come along, without its threads, and its locks as they were: a call, or the end of an
object, waits for what never comes, and then aborts the child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from broker_io.errors import Closed, Error


class ForkedResource(Protocol):
    def detach(self, why: Error) -> None:
        """From now on every call fails with `why`, and closing it does nothing."""


_open: weakref.WeakSet[ForkedResource] = weakref.WeakSet()


def watch(one: ForkedResource) -> None:
    """Have it leave in children of this process."""
    _open.add(one)


def keep(one: Any) -> None:
    """Never let it end, not even when Python does."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _forked() -> None:
    why = Closed("the connection to the cluster was opened before this process was forked: open another one in it")
    for one in [*_open]:
        one.detach(why)
    _open.clear()


os.register_at_fork(after_in_child=_forked)
