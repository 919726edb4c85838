"""Bytes of memory, counted where they are taken and given back, and summed up to whoever has a budget."""

from __future__ import annotations


class Account:
    """A sum of bytes; what is added here is added to `parent` too."""

    __slots__ = ("bytes", "parent")

    def __init__(self, parent: Account | None = None) -> None:
        self.bytes = 0
        self.parent = parent

    def add(self, more: int) -> None:
        self.bytes += more
        if self.parent is not None:
            self.parent.add(more)
