"""Tells a client that it is in a child process: its connection and threads stayed in the parent."""

from __future__ import annotations

import os

from txnbuffer.errors import UsedAfterFork

ADVICE = "fork before you connect to a service, or start the process in another way (spawn)"


class _Process:
    """`generation` is another one in each child."""

    generation = 0
    grpc: int | None = None
    """The generation that first used gRPC."""


def generation() -> int:
    """A number to remember, and to hand to `check`."""
    return _Process.generation


def inherited(remembered: int) -> bool:
    """Whether this is a child of the process that took the number: its blocks then end by their own exceptions."""
    return remembered != _Process.generation


def check(remembered: int) -> None:
    """Raises UsedAfterFork in a child of the process that took the number."""
    if inherited(remembered):
        raise UsedAfterFork(f"this client was made before the process forked: {ADVICE}")


def about_to_use_grpc() -> None:
    """Raises UsedAfterFork in a child of a process that used gRPC: no connection of the child would ever be ready."""
    if _Process.grpc is None:
        _Process.grpc = _Process.generation
        # Its handlers of forks are for programs that go on with gRPC in the child, and crash there now and then.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    elif _Process.grpc != _Process.generation:
        raise UsedAfterFork(f"gRPC was used before this process was forked, and can't be used in it: {ADVICE}")


def _forked() -> None:
    _Process.generation += 1


os.register_at_fork(after_in_child=_forked)
