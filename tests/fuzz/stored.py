"""Targets: what is stored on disk and on topics."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import pairwise

import google_crc32c
import numpy as np
from fuzz.mutations import seal_blocks, seal_digest, seal_index, seal_journal, seal_manifest, size_of_blocks
from fuzz.target import Target
from golden_files import GOLDEN

from broker_io import block
from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.environment import Environment
from broker_io.errors import Damaged, ForeignDirectory, StorageError, UnsupportedFormat
from broker_io.filelog.log import FileBroker, backup, journal, layout, operations, segment
from broker_io.filelog.pair.lock_state import LockState, decode_record
from broker_io.position import EARLIEST, Position, Positions
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk
from snapshots import format as snapshot_format
from snapshots.errors import SnapshotDamaged, SnapshotMissing, UnsupportedSnapshot
from snapshots.format import END, MUTATIONS, SEGMENT, BadRecord, EntryKey, Stored
from snapshots.scan import SnapshotTable, TopicEntries
from txnbuffer import protocol, recordset
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.buffer import decode as decode_items
from txnbuffer.coordinator import decisions
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.shard_messages import decode_shard_message
from txnbuffer.errors import ProtocolStopped, UndecodableRecordSet, UnreadableDecision
from txnbuffer.follow import unpacked
from txnbuffer.recovery import codec
from txnbuffer.recovery.bounds import readable_bounds
from txnbuffer.recovery.restore import read_index, read_snapshot

T = "orders"
PATH = "/log/file"


def golden(*patterns: str) -> Callable[[], list[bytes]]:
    """The golden files of these patterns."""
    return lambda: [path.read_bytes() for pattern in patterns for path in sorted(GOLDEN.glob(pattern))]


# --- messages as bytes: lines `key`, `name=value` …, an empty line, then the value; `\0` alone: no value ---


def to_bytes(message: Message) -> bytes:
    lines = [message.key or b"", *(f"{name}={text}".encode() for name, text in (message.properties or {}).items())]
    return b"\n".join(lines) + b"\n\n" + (b"\0" if message.value is None else message.value)


def to_message(data: bytes) -> Message:
    head, _, value = data.partition(b"\n\n")
    key, *lines = head.split(b"\n")
    texts = [line.decode(errors="replace").partition("=") for line in lines]
    return Message(key or None, None if value == b"\0" else value, {name: text for name, _, text in texts if name})


def joined(parts: Sequence[bytes]) -> bytes:
    """Several inputs as one: each after its length in two bytes."""
    return b"".join([struct.pack("<H", min(len(part), 0xFFFF)) + part[:0xFFFF] for part in parts])


def parted(data: bytes) -> list[bytes]:
    """The parts of an input; any bytes have some."""
    parts: list[bytes] = []
    while len(data) >= 2:
        (size,) = struct.unpack_from("<H", data)
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return parts


def placed(messages: Sequence[Message]) -> PlacedBatch:
    count = len(messages)
    return PlacedBatch(
        Positions.consecutive(3, 0, count), np.full(count, 1_700_000_000_000, np.int64), Batch.of(messages)
    )


# --- blocks, segments, journals, the manifest, a whole directory ---


def _block(data: bytes) -> None:
    header = block.parse_header(data)
    raw = block.open_block(data, 0, header)
    block.property_names(raw)
    block.decode_keys([raw], [header.rows])
    block.decode_keys_parts([raw])
    block.decode_hashes([raw])
    block.absent_values([raw], [raw.header.rows])
    block.decode_blocks([raw, raw])


def _backup(data: bytes) -> None:
    disk = SimulatedDisk()
    _write(disk, PATH, data)
    backup.check_backup(disk, PATH, lambda done, total: None)


def _seal_backup(data: bytes) -> bytes:
    """The head of an input with its length, its manifest and its blocks with valid checksums."""
    if len(data) < backup.HEAD_BYTES:
        return data
    end = backup.HEAD_BYTES + int.from_bytes(data[8:16], "little")
    head = data[:16] + len(data).to_bytes(8, "little") + bytes(4)
    head += int(google_crc32c.value(head)).to_bytes(4, "little")
    return head + seal_manifest(data[backup.HEAD_BYTES : end]) + seal_blocks(data[end:])


def _operations(data: bytes) -> None:
    for operation in operations.decode_operations(data):
        if isinstance(operation.body, operations.AppendBlocks):
            list(operations.blocks_of(operation.body))


def compressed_blocks() -> list[bytes]:
    messages = [
        Message(b"k%d" % (number % 7), b"value " * 20, {"colour": "red", "n": str(number)}) for number in range(50)
    ]
    made = block.encode_block(Batch.of(messages), first_entry=0, publish_time=5, compress=True, hashed=False)
    return [b"".join(made.chunks)]


def _write(disk: SimulatedDisk, path: str, data: bytes) -> None:
    made = ""
    for part in path.split("/")[1:-1]:
        made += f"/{part}"
        if not disk.exists(made):
            disk.make_directory(made)
    with closing(disk.open(path, write=True, create=True)) as file:
        file.truncate(0)
        file.write(0, [data])


def _segment(data: bytes) -> None:
    disk = SimulatedDisk()
    _write(disk, PATH, data)
    file = disk.open(PATH)
    segment.whole_blocks(file, layout.LedgerEntry(1), len(data), 0, contents=True)
    segment.verified_index(disk, file, PATH, len(data))
    segment.check_blocks(disk, PATH, len(data), 0)
    for found in segment.headers(file, PATH, 0, len(data)):
        segment.read_block(file, PATH, found)


def segments() -> list[bytes]:
    chunks: list[bytes] = []
    for first, end in pairwise((0, 2, 5, 6)):
        batch = Batch.of([Message(b"k", b"v%d" % at) for at in range(first, end)])
        chunks += block.encode_block(batch, first_entry=first, publish_time=9).chunks
    return [b"".join(chunks)]


DIRECTORY = GOLDEN / "directory-v2"
FILES = sorted(str(path.relative_to(DIRECTORY)) for path in DIRECTORY.rglob("*") if path.is_file())


def _directory(data: bytes) -> None:
    """Open and read a log with one file replaced; the first byte names the file."""
    disk = SimulatedDisk()
    for name in FILES:
        _write(disk, f"/log/{name}", (DIRECTORY / name).read_bytes())
    if data:
        _write(disk, f"/log/{FILES[data[0] % len(FILES)]}", data[1:])
    environment = Environment(SimulatedClock(), disk, SeededRandomness(1), process="4711")
    with FileBroker.open("/log", environment, committer=False) as broker:
        for topic in broker.topics():
            broker.last_position(topic)
            with broker.reader(topic, EARLIEST) as reader:
                while reader.read() is not None:
                    pass


def _seal_directory(data: bytes) -> bytes:
    name = FILES[data[0] % len(FILES)] if data else ""
    kinds = {"manifest": seal_manifest, "index": seal_index, "log": seal_blocks}
    return data[:1] + kinds.get(name.rpartition(".")[2], seal_journal)(data[1:])


def directories() -> list[bytes]:
    return [bytes([number]) + (DIRECTORY / name).read_bytes() for number, name in enumerate(FILES)]


# --- the snapshot topic ---


def stored(kind: str, data: bytes, version: str = "1") -> Stored:
    return Stored(Position(1, 0), version, kind, 7, data)


def _end(data: bytes) -> None:
    with suppress(SnapshotDamaged):
        snapshot_format.decode_end(T, stored(END, data, "1"))
    snapshot_format.decode_end(T, stored(END, data, "2"))


def _snapshot(data: bytes) -> None:
    """A snapshot of entries `end`, `part`, `mutations`, each as it is or replaced, restored and its index read."""
    parts = parted(data)
    entries = TopicEntries()
    for kind, number, value in zip((END, SEGMENT, MUTATIONS), (0, 1, 1), parts, strict=False):
        entries.put(EntryKey(T, kind, number), stored(kind, value, "2" if kind == END else "1"))
    readable_bounds(T, "incarnation-1", entries)
    snapshot = read_snapshot(T, entries)
    read_index(T, snapshot, entries)
    snapshot.buffer.snapshot_state()


def _seal_snapshot(data: bytes) -> bytes:
    """Repair the digests, and make the end entry name what is there."""
    parts = [seal_digest(part) for part in parted(data)]
    return joined(parts)


def snapshots() -> list[bytes]:
    end, part, mutations = (GOLDEN / f"snapshots/{name}.bin" for name in ("end-2", "part-1", "mutations-1"))
    return [joined([path.read_bytes() for path in (end, part, mutations)]), _whole_snapshot()]


def _whole_snapshot() -> bytes:
    """A snapshot whose entries name one another."""
    part = (GOLDEN / "snapshots/part-1.bin").read_bytes()
    state = codec.decode_state((GOLDEN / "snapshots/state-1.bin").read_bytes())
    before = snapshot_format.chain_start(T, "incarnation-1")
    chains = {
        SEGMENT: snapshot_format.ChainRange(1, 2, before, part[-16:]),
        MUTATIONS: snapshot_format.no_segments(T, "incarnation-1", MUTATIONS),
    }
    end = snapshot_format.EndEntry(T, "incarnation-1", 7, 1, chains, state=codec.encode_state(state))
    return joined([end.encode(), part])


def _scan(data: bytes) -> None:
    table = SnapshotTable(history={})
    table.feed(placed([*map(to_message, parted(data))]))
    for topic, entries in table.topics.items():
        entries.keys(topic)


def scans() -> list[bytes]:
    entries = [("end", "end-2", "2"), ("1", "part-1", "1"), ("m1", "mutations-1", "1")]
    messages = [snapshot_format.owner_message(7)]
    for suffix, name, version in entries:
        value = (GOLDEN / f"snapshots/{name}.bin").read_bytes()
        kind = name.partition("-")[0]
        messages.append(Message(f"{T}-{suffix}".encode(), value, {"tb.v": version, "tb.kind": kind, "tb.epoch": "7"}))
    messages.append(snapshot_format.gone(EntryKey(T, SEGMENT, 1), 7))
    return [joined([*map(to_bytes, messages)])]


# --- data topics ---


def _topic(data: bytes) -> None:
    """What a reader does with any messages of a data topic: nothing that a producer writes may break it."""
    messages = [*map(to_message, parted(data))]
    if not messages:
        return
    batch = placed(messages)
    decode_items(batch)
    unpacked(batch)
    list(recordset.batch_slices(batch))
    buffer = TransactionBuffer()
    buffer.apply_batch(batch)
    buffer.snapshot_state()


def topics() -> list[bytes]:
    marker = (GOLDEN / "marker-group.avro").read_bytes()
    properties = {"tb.v": "1", "tb.txn": "0:3"}
    records = [Message(b"k", b"v", properties | {"tb.seq": str(seq)}) for seq in range(1, 10)]
    messages = [
        *records,
        Message(None, marker, {"tb.v": "1", "tb.marker": "1"}),
        recordset.pack(Batch.of([Message(b"a", b"1"), Message(b"b", b"2")]), compress=True),
        Message(b"plain", b"value", {"colour": "red"}),
    ]
    return [joined([*map(to_bytes, messages)]), joined([*map(to_bytes, messages[-4:])])]


def _record_set(data: bytes) -> None:
    message = to_message(data)
    list(recordset.unpack(Position(3, 4), message))


def record_sets() -> list[bytes]:
    batch = Batch.of([Message(b"k%d" % number, b"v", {"a": "b", "n": str(number)}, 5) for number in range(20)])
    return [to_bytes(recordset.pack(batch, compress=compress)) for compress in (False, True)]


def _seal_record_set(data: bytes) -> bytes:
    head, _, value = data.partition(b"\n\n")
    return head + b"\n\n" + seal_blocks(value)


# --- the decision log, messages of shards ---


def decision_messages() -> list[bytes]:
    made: list[bytes] = []
    for path in sorted((GOLDEN / "decisions").glob("*.avro")):
        kind, value = path.stem, path.read_bytes()
        keys = {"owner": "__owner", "ended": "ended"}
        record = decisions.avro.decode(decisions._PARSED[kind], value)
        named = record.get("number") or record.get("first") or record.get("topic") or record.get("name")
        key = keys.get(kind, f"{kind}-{record.get('group', '') if kind == 'consumers' else named}")
        properties = {"tb.v": "1", "tb.kind": kind}
        if kind == "owner":
            properties["tb.owners"] = '[[6,"aa"],[7,"bb",3,4]]'
        made.append(to_bytes(Message(key.encode(), value, properties)))
    return [*made, to_bytes(decisions.tombstone("lease-1"))]


def _history(data: bytes) -> None:
    history = History.read(map(to_message, parted(data)))
    history.gaps(history.next_id(history.epoch))


def _shard_message(data: bytes) -> None:
    decode_shard_message(Message(None, data, {"tb.v": "1", "tb.kind": "letter"}))


STORED = (
    Target(
        "block",
        _block,
        (
            "broker_io.block.parse_header",
            "broker_io.block.open_block",
            "broker_io.block.decode_blocks",
            "broker_io.block.decode_keys",
            "broker_io.block.decode_keys_parts",
            "broker_io.block.decode_hashes",
            "broker_io.block.decode_entries",
            "broker_io.block.decode_publish_times",
            "broker_io.block._read_labels",
            "broker_io.block._read_numbers",
        ),
        (block.BadBlock, UnsupportedFormat),
        lambda: golden("broker_io/block-*.bin", "record-set.block")() + compressed_blocks(),
        seal_blocks,
        size_of_blocks,
    ),
    Target(
        "foreign-block",
        block.decode_foreign_block,
        ("broker_io.block.decode_foreign_block", "broker_io.block.check_columns"),
        (block.BadBlock, UnsupportedFormat),
        golden("broker_io/block-*.bin", "record-set.block"),
        seal_blocks,
        size_of_blocks,
    ),
    Target(
        "journal",
        lambda data: journal.read_journal(data, 5, PATH),
        (
            "broker_io.filelog.log.journal.read_journal",
            "broker_io.filelog.log.journal.decode_file_head",
            "broker_io.filelog.log.journal.decode_head",
            "broker_io.filelog.log.journal.decode_record",
        ),
        (Damaged, UnsupportedFormat),
        golden("broker_io/journal.bin"),
        seal_journal,
    ),
    Target(
        "lock-file",
        lambda data: LockState.decode(data, PATH),
        ("broker_io.filelog.pair.lock_state.LockState.decode",),
        (StorageError,),
        golden("pair/lock-file.json"),
    ),
    Target(
        "lock-record",
        lambda data: decode_record(data, PATH),
        ("broker_io.filelog.pair.lock_state.decode_record",),
        (StorageError,),
        golden("pair/lock-record.json"),
    ),
    Target(
        "segment",
        _segment,
        (
            "broker_io.filelog.log.segment.headers",
            "broker_io.filelog.log.segment.read_block",
            "broker_io.filelog.log.segment.whole_blocks",
            "broker_io.filelog.log.segment.check_blocks",
            "broker_io.filelog.log.segment.verified_index",
        ),
        (Damaged, UnsupportedFormat),
        segments,
        seal_blocks,
        size_of_blocks,
    ),
    Target(
        "index",
        lambda data: segment.decode_index(data, 2**40),
        ("broker_io.filelog.log.segment.decode_index",),
        (),
        golden("broker_io/index.bin"),
        seal_index,
    ),
    Target(
        "operations",
        _operations,
        (
            "broker_io.filelog.log.operations.decode_operations",
            "broker_io.filelog.log.operations._decode_body",
            "broker_io.filelog.log.operations.blocks_of",
            "broker_io.filelog.log.layout.read_ledger",
        ),
        (block.BadBlock, UnsupportedFormat),
        golden("broker_io/operations.bin"),
        seal_blocks,
    ),
    Target(
        "manifest",
        lambda data: layout.decode_manifest(data, PATH),
        ("broker_io.filelog.log.layout.decode_manifest", "broker_io.filelog.log.layout._read_topic"),
        (Damaged, UnsupportedFormat),
        golden("broker_io/manifest.txt", "directory-v2/manifest"),
        seal_manifest,
    ),
    Target(
        "directory",
        _directory,
        ("broker_io.filelog.log.layout.load_manifest", "broker_io.filelog.log.broker.FileBroker.open"),
        (Damaged, ForeignDirectory, UnsupportedFormat),
        directories,
        _seal_directory,
        size_of_blocks,
    ),
    Target(
        "backup",
        _backup,
        (
            "broker_io.filelog.log.backup.check_backup",
            "broker_io.filelog.log.backup.open_backup",
            "broker_io.filelog.log.backup.checked_chunks",
        ),
        (Damaged, UnsupportedFormat),
        golden("broker_io/backup.bin"),
        _seal_backup,
        size_of_blocks,
    ),
    Target(
        "entry-key",
        lambda data: EntryKey.parse(data),
        ("snapshots.format.EntryKey.parse",),
        (),
        lambda: [b"a-1", b"a-m7", b"a-s3", b"a-end"],
    ),
    Target(
        "snapshot-end",
        _end,
        (
            "snapshots.format.decode_end",
            "snapshots.format.EndEntry.decode",
            "snapshots.format.unsealed",
            "snapshots.format.RecordCodec.decode",
            "snapshots.format.decode_long",
            "snapshots.format._decode_field",
            "snapshots.format._decode_count",
        ),
        (SnapshotDamaged, UnsupportedSnapshot),
        golden("snapshots/end-*.bin"),
        seal_digest,
    ),
    Target(
        "snapshot-segment",
        lambda data: codec.decode_segment(T, 1, stored(SEGMENT, data)),
        (
            "txnbuffer.recovery.codec.decode_segment",
            "txnbuffer.recovery.codec._decode",
            "snapshots.format.decode_column",
            "snapshots.format.decode_longs",
            "snapshots.format.expanded",
        ),
        (SnapshotDamaged, UnsupportedSnapshot),
        golden("snapshots/part-1.bin"),
        seal_digest,
    ),
    Target(
        "snapshot-mutations",
        lambda data: codec.decode_mutations(T, 1, stored(MUTATIONS, data)),
        ("txnbuffer.recovery.codec.decode_mutations", "txnbuffer.recovery.codec._decode_mutations"),
        (SnapshotDamaged, UnsupportedSnapshot),
        golden("snapshots/mutations-1.bin"),
        seal_digest,
    ),
    Target(
        "snapshot-state",
        codec.decode_state,
        ("txnbuffer.recovery.codec.decode_state", "txnbuffer.buffer.state.bitmap_of_bytes"),
        (BadRecord,),
        golden("snapshots/state-*.bin"),
    ),
    Target(
        "snapshot-owner",
        lambda data: snapshot_format.record("owner-1", "snapshots").decode(data),
        ("snapshots.format.RecordCodec.decode",),
        (BadRecord,),
        golden("snapshots/owner-1.bin"),
    ),
    Target(
        "snapshot",
        _snapshot,
        (
            "txnbuffer.recovery.restore.read_snapshot",
            "txnbuffer.recovery.restore.read_index",
            "txnbuffer.recovery.bounds.readable_bounds",
        ),
        (SnapshotDamaged, SnapshotMissing, UnsupportedSnapshot),
        snapshots,
        _seal_snapshot,
    ),
    Target("snapshot-scan", _scan, ("snapshots.scan.SnapshotTable.feed", "snapshots.scan._epoch"), (), scans),
    Target(
        "marker",
        protocol.decode_marker,
        ("txnbuffer.protocol.decode_marker", "txnbuffer.avro.decode"),
        (ValueError,),
        golden("marker-*.avro"),
    ),
    Target(
        "topic",
        _topic,
        (
            "txnbuffer.buffer.buffer.decode_rows",
            "txnbuffer.buffer.buffer.decode_columns",
            "txnbuffer.follow.unpacked",
            "txnbuffer.recordset.expand",
            "txnbuffer.recordset.batch_slices",
            "txnbuffer.buffer.buffer.TransactionBuffer.apply_batch",
        ),
        (ProtocolStopped,),
        topics,
        None,
        size_of_blocks,
    ),
    Target(
        "record-set",
        _record_set,
        ("txnbuffer.recordset.unpack",),
        (UndecodableRecordSet,),
        record_sets,
        _seal_record_set,
        size_of_blocks,
    ),
    Target(
        "decision",
        lambda data: decisions.decode(to_message(data)),
        (
            "txnbuffer.coordinator.decisions.decode",
            "txnbuffer.coordinator.decisions._of_bytes",
            "txnbuffer.coordinator.decisions._of_record",
        ),
        (UnreadableDecision,),
        decision_messages,
    ),
    Target(
        "decision-log",
        _history,
        ("txnbuffer.coordinator.history.History.read", "txnbuffer.coordinator.history.History.apply"),
        (UnreadableDecision,),
        lambda: [joined(decision_messages())],
    ),
    Target(
        "shard-message",
        _shard_message,
        ("txnbuffer.coordinator.shard_messages.decode_shard_message",),
        (),
        golden("shards/letter.avro"),
    ),
)
