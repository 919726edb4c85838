"""Key compaction of the closed ledgers of a topic.

First every block is read once and its checksums are verified; the column of key hashes shows the newest message of
each key. A message is dropped only if the newest one of the same hash has the very same key, so two keys with one
hash can't hide each other: the older message then stays. Messages without a key are dropped too, and so is the
newest message of a key if it has no value (nothing older of that key is left then).

Ledgers that lose messages are rewritten under the next generation, every message with its entry number and publish
time. The manifest that names the new files is the swap; the old files are removed after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs
from broker_io.block import (
    Decoded,
    EncodedBlock,
    absent_values,
    decode_blocks,
    decode_hashes,
    decode_keys,
    encode_block,
)
from broker_io.environment import Disk
from broker_io.file import layout
from broker_io.file.commit import BLOCK_BYTES
from broker_io.file.layout import LedgerEntry, TopicEntry, damage_at
from broker_io.file.recovery import open_segment
from broker_io.file.segment import SparseIndex, headers, read_block

Mask = NDArray[np.bool_]


class Rewrite(NamedTuple):
    """A closed ledger before and after compaction."""

    old: LedgerEntry
    new: LedgerEntry


class _Keys(NamedTuple):
    """The key columns of all closed ledgers, n messages in log order; `counts` has the messages per ledger."""

    hashes: NDArray[np.uint64]
    keys: Blobs
    deleted: Mask
    counts: list[int]


def compact_ledgers(disk: Disk, directory: str, topic: TopicEntry, *, seed: int, compress: bool) -> list[Rewrite]:
    """Rewrite every closed ledger that loses messages; the files are durable when this returns.

    Raises Damaged for an invalid block, or OSError; what was written by then is removed.
    """
    columns = _key_columns(disk, directory, topic)
    if columns is None:
        return []
    keep = _survivors(columns)
    rewrites: list[Rewrite] = []
    start = 0
    try:
        for ledger, count in zip(topic.ledgers[:-1], columns.counts, strict=True):
            mask = keep[start : start + count]
            start += count
            if not mask.all():
                rewrites.append(Rewrite(ledger, ledger._replace(generation=ledger.generation + 1)))
                new = _rewrite(disk, directory, topic, ledger, mask, seed=seed, compress=compress)
                rewrites[-1] = Rewrite(ledger, new)
        if rewrites:
            disk.sync_directory(layout.topic_path(directory, topic.number))
    except Exception:
        discard(disk, directory, topic, rewrites)
        raise
    return rewrites


def discard(disk: Disk, directory: str, topic: TopicEntry, rewrites: list[Rewrite]) -> None:
    """Remove files that were written but will not be used."""
    for _, new in rewrites:
        path = layout.segment_path(directory, topic, new)
        with contextlib.suppress(OSError):
            disk.remove(path)
            disk.remove(layout.index_path(path))


def _key_columns(disk: Disk, directory: str, topic: TopicEntry) -> _Keys | None:
    hashes: list[NDArray[np.uint64]] = []
    keys: list[Blobs] = []
    deleted: list[Mask] = []
    counts: list[int] = []
    for ledger in topic.ledgers[:-1]:
        counts.append(0)
        path = layout.segment_path(directory, topic, ledger)
        file = open_segment(disk, path)
        try:
            for found in headers(file, path, 0, ledger.bytes, topic.place(ledger)):
                block = read_block(file, path, found)
                with damage_at(path, found.offset):
                    hashes.append(decode_hashes(block))
                    keys.append(decode_keys([block], [found.header.rows]))
                    deleted.append(absent_values(block))
                counts[-1] += found.header.rows
        finally:
            file.close()
    if not hashes:
        return None
    return _Keys(np.concatenate(hashes), Blobs.concat(keys), np.concatenate(deleted), counts)


def _survivors(columns: _Keys) -> Mask:
    """The messages that stay."""
    count = len(columns.deleted)
    keep = ~columns.keys.absent_mask()
    order = np.lexsort((np.arange(count), columns.hashes[:, 1], columns.hashes[:, 0]))
    order = order[keep[order]]
    if not len(order):
        return keep
    sorted_hashes = columns.hashes[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = (sorted_hashes[1:] != sorted_hashes[:-1]).any(axis=1)
    group_ends = np.flatnonzero(last)
    newest = order[np.repeat(group_ends, np.diff(group_ends, prepend=-1))]
    older = ~last
    same = _same_keys(columns.keys, order[older], newest[older])
    keep[order[older][same]] = False
    winners = order[last]
    keep[winners[columns.deleted[winners]]] = False
    return keep


def _same_keys(keys: Blobs, some: NDArray[np.intp], others: NDArray[np.intp]) -> Mask:
    """The pairs of messages with the same key."""
    data, offsets = bytes(keys.data), keys.offsets.tolist()
    pairs = zip(some.tolist(), others.tolist(), strict=True)
    equal = (data[offsets[a] : offsets[a + 1]] == data[offsets[b] : offsets[b + 1]] for a, b in pairs)
    return np.fromiter(equal, np.bool_, len(some))


def _rewrite(
    disk: Disk, directory: str, topic: TopicEntry, old: LedgerEntry, keep: Mask, *, seed: int, compress: bool
) -> LedgerEntry:
    new = old._replace(generation=old.generation + 1)
    path = layout.segment_path(directory, topic, new)
    index = SparseIndex()
    offset = 0
    file = disk.open(path, write=True, create=True)
    try:
        file.truncate(0)
        for block in _encoded(_groups(disk, directory, topic, old, keep), seed, topic.place(new), compress):
            file.write(offset, block.chunks)
            index.add(block.first_entry, offset, block.publish_time)
            offset += block.length
        file.sync()
    finally:
        file.close()
    if len(index):
        index.save(disk, layout.index_path(path))
    return new._replace(bytes=offset)


def _groups(disk: Disk, directory: str, topic: TopicEntry, old: LedgerEntry, keep: Mask) -> Iterator[list[Decoded]]:
    """The messages that stay, in groups of about one block."""
    path = layout.segment_path(directory, topic, old)
    file = open_segment(disk, path)
    try:
        group: list[Decoded] = []
        at, size = 0, 0
        for found in headers(file, path, 0, old.bytes, topic.place(old)):
            mask = keep[at : at + found.header.rows]
            at += found.header.rows
            if not mask.any():
                continue
            with damage_at(path, found.offset):
                entries, times, messages = decode_blocks([read_block(file, path, found)])
            group.append(Decoded(entries[mask], times[mask], messages.take(mask)))
            size += found.header.length * int(mask.sum()) // len(mask)
            if size >= BLOCK_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group
    finally:
        file.close()


def _encoded(groups: Iterator[list[Decoded]], seed: int, place: int, compress: bool) -> Iterator[EncodedBlock]:
    for group in groups:
        entries = np.concatenate([part.entries for part in group])
        times = np.concatenate([part.publish_times for part in group])
        yield encode_block(
            Batch.concat([part.messages for part in group]),
            first_entry=int(entries[0]),
            publish_time=int(times[0]),
            seed=seed,
            place=place,
            compress=compress,
            entries=entries,
            publish_times=None if (times == times[0]).all() else times,
        )
