"""Connections to a cluster in a forked child: they are detached and never used.

The child inherits the objects of the client library, but not its threads, and its locks as they were at the fork. A
call, or the end of an object, would wait for ever and then abort the child.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from broker_io.errors import Closed, Error


class ForkedResource(Protocol):
    def detach(self, why: Error) -> None:
        """Make every later call fail with `why`; closing does nothing then."""


_open: weakref.WeakSet[ForkedResource] = weakref.WeakSet()


def watch(one: ForkedResource) -> None:
    """Detach a resource in forked children of this process."""
    _open.add(one)


def keep(one: Any) -> None:
    """Keep an object alive for ever, even at the end of Python."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _forked() -> None:
    why = Closed("the connection to the cluster was opened before this process was forked: open another one here")
    for one in [*_open]:
        one.detach(why)
    _open.clear()


os.register_at_fork(after_in_child=_forked)
