"""Tells a client that it is in a child process: its connection and threads stayed in the parent."""

from __future__ import annotations

import os

from txnbuffer.errors import UsedAfterFork


class _Process:
    """`generation` is another one in each child."""

    generation = 0


def generation() -> int:
    """A number to remember, and to hand to `check`."""
    return _Process.generation


def check(remembered: int) -> None:
    """Raises UsedAfterFork in a child of the process that took the number."""
    if remembered != _Process.generation:
        raise UsedAfterFork("this client was made before the process forked: connect again in the child")


def _forked() -> None:
    _Process.generation += 1


os.register_at_fork(after_in_child=_forked)
