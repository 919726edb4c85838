"""The names on a simulated disk: as a process sees them, and as a power loss may leave them."""

from __future__ import annotations

import errno
import os
import posixpath
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from broker_io.testing.inode import Inode, Unsynced


class _Directory(Enum):
    DIRECTORY = "directory"


DIRECTORY: Final = _Directory.DIRECTORY
Node: TypeAlias = Inode | Literal[_Directory.DIRECTORY]
Names: TypeAlias = dict[str, Node]

ROOTS = ("/", "")


def normal(path: str) -> str:
    text = posixpath.normpath(path)
    return "" if text == "." else text


def parent(path: str) -> str:
    return posixpath.dirname(path)


def os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


@dataclass(frozen=True, slots=True)
class NameChange:
    """One change of names: `removed` goes, then `path` stands for `node`; each may be none."""

    removed: str | None
    path: str | None
    node: Node | None

    def directories(self) -> set[str]:
        return {parent(path) for path in (self.removed, self.path) if path is not None}

    def apply(self, names: Names) -> None:
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.path is not None and self.node is not None:
            names[self.path] = self.node


class Tree:
    """`now` is what a process sees, `stable` what was synced, `pending` the changes between, in order."""

    def __init__(self) -> None:
        self._now: Names = dict.fromkeys(ROOTS, DIRECTORY)
        self._stable: Names = dict(self._now)
        self._pending: list[NameChange] = []
        self._made = 0

    def find(self, path: str) -> Node | None:
        return self._now.get(normal(path))

    def file(self, path: str) -> Inode:
        found = self.find(path)
        if not isinstance(found, Inode):
            raise os_error(errno.ENOENT if found is None else errno.EISDIR, path)
        return found

    def files(self) -> Iterator[tuple[str, Inode]]:
        return ((path, node) for path, node in self._now.items() if isinstance(node, Inode))

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        place = normal(path)
        if self.find(place) is not DIRECTORY:
            raise os_error(errno.ENOENT if self.find(place) is None else errno.ENOTDIR, path)
        return sorted(posixpath.basename(name) for name in self._now if name not in ROOTS and parent(name) == place)

    def check_parent(self, path: str) -> None:
        if self._now.get(parent(normal(path))) is not DIRECTORY:
            raise os_error(errno.ENOENT, path)

    def missing_directories(self, path: str) -> list[str]:
        """The directories that have to be made for this one to exist, outermost first."""
        missing: list[str] = []
        place = normal(path)
        while (found := self._now.get(place)) is None:
            missing.append(place)
            place = parent(place)
        if found is not DIRECTORY:
            raise os_error(errno.ENOTDIR, path)
        return missing[::-1]

    def create(self, path: str) -> Inode:
        self._made += 1
        inode = Inode(self._made)
        self._change(NameChange(None, normal(path), inode))
        return inode

    def create_directory(self, path: str) -> None:
        self._change(NameChange(None, normal(path), DIRECTORY))

    def rename(self, source: str, target: str) -> None:
        self._change(NameChange(normal(source), normal(target), self.file(source)))

    def remove(self, path: str) -> None:
        self.file(path)
        self._change(NameChange(normal(path), None, None))

    def sync(self, path: str) -> None:
        """Make the changes of one directory stable."""
        place = normal(path)
        for change in [change for change in self._pending if place in change.directories()]:
            change.apply(self._stable)
            self._pending.remove(change)

    def copy(self) -> Tree:
        copies: dict[int, Inode] = {}

        def copied(node: Node) -> Node:
            return copies.setdefault(node.number, node.copy()) if isinstance(node, Inode) else node

        other = Tree()
        other._made = self._made
        other._now = {path: copied(node) for path, node in self._now.items()}
        other._stable = {path: copied(node) for path, node in self._stable.items()}
        other._pending = [
            NameChange(change.removed, change.path, None if change.node is None else copied(change.node))
            for change in self._pending
        ]
        return other

    def after_power_loss(self, unsynced: Unsynced, choose: random.Random) -> Tree:
        names = dict(self._stable)
        for change in _kept(self._pending, unsynced, choose):
            change.apply(names)
        other = Tree()
        other._made = self._made
        for path in sorted(names):
            node = names[path]
            if path in ROOTS or other._now.get(parent(path)) is DIRECTORY:  # else its directory got lost
                other._now[path] = node.after_power_loss(unsynced, choose) if isinstance(node, Inode) else node
        other._stable = dict(other._now)
        return other

    def _change(self, change: NameChange) -> None:
        change.apply(self._now)
        self._pending.append(change)


def _kept(pending: list[NameChange], unsynced: Unsynced, choose: random.Random) -> Iterable[NameChange]:
    if unsynced is Unsynced.LOST:
        return []
    if unsynced is Unsynced.KEPT:
        return pending
    if unsynced is Unsynced.PREFIX:
        return pending[: choose.randint(0, len(pending))]
    return [change for change in pending if choose.random() < 0.5]
