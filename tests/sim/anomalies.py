"""Transaction anomalies by Adya's classes in a history of appends to keys and reads of them.

The method is that of Elle's list-append checker: an append adds to the list of its key, a read shows a prefix of it, so
the final lists give the order of versions, and each read names its place in it. Dependencies follow:

- ww: a transaction appended the version after that of another one;
- wr: it read the version of another one as the last of a list;
- rw: another one appended the version after the last that it read.

G0 is a cycle of ww, G1c one of ww and wr, G-single one with a single rw, G2 one with several. G1a is a read of an
aborted transaction, G1b a read of some of its appends to the key but not of all.

`ordered` is False for the keys whose lists are not an order of versions: transactions that run at the same time append
to a log alternately, and their appends take effect together when they commit. Such keys have no ww and rw.

Only what survives removing everything without a predecessor, or without a successor, is searched for cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
WW, WR, RW = 0, 1, 2
NAMES = ("ww", "wr", "rw")


class Anomaly(NamedTuple):
    """A class, and the transactions that show it: of G1a and G1b the reader and the writer, else a cycle."""

    kind: str
    transactions: tuple[int, ...]
    edges: tuple[str, ...] = ()

    def named(self, names: Sequence[str]) -> str:
        """The anomaly with the names of its transactions."""
        who = ", ".join(names[number] for number in self.transactions)
        return f"{self.kind} of {who} by {', '.join(self.edges) or 'a read'}"


@dataclass(slots=True)
class Columns:
    """A history. Transactions and keys are numbers from 0 on. Rows of appends of a key are in the order of its list."""

    aborted: Flags
    """By transaction."""
    append_keys: Longs
    append_by: Longs
    read_keys: Longs
    read_by: Longs
    read_lengths: Longs
    """How many appends of the key each read showed."""
    ordered: Flags
    """By key."""


class _Lists:
    """The appends, grouped by key: `starts` has the first row of each key, and the end."""

    def __init__(self, columns: Columns) -> None:
        keys = columns.append_keys
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.by = columns.append_by[order]
        self.starts = np.searchsorted(self.keys, np.arange(len(columns.ordered) + 1))


def judge(columns: Columns) -> list[Anomaly]:
    """One anomaly of each class that the history has."""
    lists = _Lists(columns)
    found = [*_reads_of_aborted(columns, lists), *_intermediate_reads(columns, lists)]
    core = _core(len(columns.aborted), *_edges(columns, lists))
    for kind, most in (("G0", WW), ("G1c", WR), ("G-single", WR), ("G2", RW)) if core else ():
        if (cycle := _shortest(core, kind, most)) is not None:
            found.append(cycle)
            break  # a cycle of a class is one of those after it as well
    return found


def _reads_of_aborted(columns: Columns, lists: _Lists) -> list[Anomaly]:
    """G1a: the rows of the list up to the length that was read include one of an aborted transaction."""
    bad = columns.aborted[lists.by]
    before = np.concatenate([[0], np.cumsum(bad)])
    first = lists.starts[columns.read_keys]
    hits = np.flatnonzero(before[first + columns.read_lengths] > before[first])
    for read in hits:
        rows = lists.by[first[read] : first[read] + columns.read_lengths[read]]
        writers = [int(writer) for writer in rows if columns.aborted[writer] and writer != columns.read_by[read]]
        if writers:
            return [Anomaly("G1a", (int(columns.read_by[read]), writers[0]))]
    return []


def _intermediate_reads(columns: Columns, lists: _Lists) -> list[Anomaly]:
    """G1b: a transaction appended both within what was read of the list and after it."""
    count = len(lists.by)
    if not count:
        return []
    pairs = lists.keys * (len(columns.aborted) + 1) + lists.by
    unique, place = np.unique(pairs, return_inverse=True)
    last = np.zeros(len(unique), np.int64)
    last[place] = np.arange(count)  # the last assignment stays
    reach = np.maximum.accumulate(last[place])  # rows of a key reach no row of the next one
    read = columns.read_lengths > 0
    first = lists.starts[columns.read_keys[read]]
    ends = first + columns.read_lengths[read]
    for at in np.flatnonzero(reach[ends - 1] >= ends):
        reader = int(columns.read_by[read][at])
        for row in range(int(first[at]), int(ends[at])):
            writer = int(lists.by[row])
            if last[place[row]] >= ends[at] and writer != reader:
                return [Anomaly("G1b", (reader, writer))]
    return []


def _edges(columns: Columns, lists: _Lists) -> tuple[Longs, Longs, Longs]:
    """All dependencies between different transactions."""
    same = (lists.keys[1:] == lists.keys[:-1]) & columns.ordered[lists.keys[1:]]
    parts = [(lists.by[:-1][same], lists.by[1:][same], WW)]
    first = lists.starts[columns.read_keys]
    ends = first + columns.read_lengths
    seen = columns.read_lengths > 0
    parts.append((lists.by[ends[seen] - 1], columns.read_by[seen], WR))
    more = (ends < lists.starts[columns.read_keys + 1]) & columns.ordered[columns.read_keys]
    following = lists.by[np.minimum(ends, max(len(lists.by) - 1, 0))] if more.any() else columns.read_by
    more &= ~seen | (following != lists.by[ends - 1])  # the rest of what was read in part is no later version
    parts.append((columns.read_by[more], following[more], RW))
    sources = np.concatenate([part[0] for part in parts])
    targets = np.concatenate([part[1] for part in parts])
    kinds = np.repeat(np.array([WW, WR, RW]), [len(part[0]) for part in parts])
    keep = (sources != targets) & ~columns.aborted[sources] & ~columns.aborted[targets]
    return sources[keep], targets[keep], kinds[keep]


Core = dict[int, list[tuple[int, int]]]
"""The successors of each transaction that may be on a cycle, each with the kind of its edge."""


def _core(count: int, sources: Longs, targets: Longs, kinds: Longs) -> Core:
    left = _peeled(count, sources, targets)
    if not left.any():
        return {}
    keep = left[sources] & left[targets]
    left = _peeled(count, targets[keep], sources[keep])
    core: Core = {}
    for source, target, kind in zip(sources.tolist(), targets.tolist(), kinds.tolist(), strict=True):
        if left[source] and left[target]:
            core.setdefault(source, []).append((target, kind))
    return core


def _peeled(count: int, sources: Longs, targets: Longs) -> Flags:
    """What is left after transactions without a predecessor were removed, again and again."""
    if not len(sources):
        return np.zeros(count, np.bool_)
    order = np.argsort(sources, kind="stable")
    following = targets[order].tolist()
    starts = np.searchsorted(sources[order], np.arange(count + 1)).tolist()
    waits = np.bincount(targets, minlength=count)
    free = np.flatnonzero(waits == 0).tolist()
    open_ = waits.tolist()
    while free:
        node = free.pop()
        for target in following[starts[node] : starts[node + 1]]:
            open_[target] -= 1
            if not open_[target]:
                free.append(target)
    return np.array(open_) > 0


def _shortest(core: Core, kind: str, most: int) -> Anomaly | None:
    """A short cycle whose edges after the first are of the kinds up to `most`."""
    first_kinds = (RW,) if kind in ("G-single", "G2") else (most,)
    for source, edges in core.items():
        for target, edge in edges:
            if edge in first_kinds and (path := _path(core, target, source, most)) is not None:
                nodes = (source, target, *(node for node, _ in path))
                return Anomaly(kind, nodes, (NAMES[edge], *(NAMES[step] for _, step in path)))
    return None


def _path(core: Core, start: int, end: int, most: int) -> list[tuple[int, int]] | None:
    """The steps of the shortest path between two transactions."""
    came: dict[int, tuple[int, int]] = {start: (start, 0)}
    queue = deque([start])
    while queue and end not in came:
        node = queue.popleft()
        for target, edge in core.get(node, ()):
            if edge <= most and target not in came:
                came[target] = node, edge
                queue.append(target)
    if end not in came:
        return None
    steps: list[tuple[int, int]] = []
    while end != start:
        before, edge = came[end]
        steps.append((end, edge))
        end = before
    return steps[::-1]


def columns(
    aborted: list[bool], appends: list[tuple[int, int]], reads: list[tuple[int, int, int]], ordered: list[bool]
) -> Columns:
    """A history of rows: appends are (key, transaction), reads (key, transaction, length)."""
    written = np.array(appends, np.int64).reshape(-1, 2)
    seen = np.array(reads, np.int64).reshape(-1, 3)
    return Columns(
        np.array(aborted, np.bool_), written[:, 0], written[:, 1], seen[:, 0], seen[:, 1], seen[:, 2],
        np.array(ordered, np.bool_),
    )  # fmt: skip


def random_history(transactions: int, *, keys: int = 100, seed: int = 0) -> Columns:
    """A serial history: each transaction reads two keys and appends to both."""
    choose = np.random.default_rng(seed)
    chosen = choose.integers(0, keys // 2, (transactions, 2)) * 2 + np.array([0, 1])
    by = np.repeat(np.arange(transactions), 2)
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[order], np.arange(keys))
    lengths = np.empty(len(flat), np.int64)
    lengths[order] = np.arange(len(flat)) - starts[flat[order]]
    return Columns(np.zeros(transactions, np.bool_), flat, by, flat, by, lengths, np.ones(keys, np.bool_))


def main() -> None:
    """Print how many transactions a second are judged."""
    import time

    history = random_history(200_000)
    began = time.perf_counter()
    assert judge(history) == []
    print(f"{len(history.aborted) / (time.perf_counter() - began):,.0f} transactions a second")


if __name__ == "__main__":
    main()
