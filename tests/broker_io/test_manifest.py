"""The manifest: round trip, golden file, damage, and directories without one."""

import google_crc32c
import pytest
from golden_files import GOLDEN, committed

from broker_io.compaction import CompactionPolicy, CompactionState
from broker_io.errors import Damaged, ForeignDirectory, StorageError, UnsupportedFormat
from broker_io.filelog.log.layout import (
    LedgerEntry,
    Manifest,
    PairEntry,
    PreparedFile,
    TopicEntry,
    TopicTexts,
    decode_manifest,
    encode_manifest,
    load_manifest,
    replace_manifest,
)
from broker_io.filelog.log.records import Fork, Mark
from broker_io.testing import Crash, SimulatedDisk, Unsynced

MANIFEST = Manifest(
    "00112233445566778899aabbccddeeff",
    "0123456789abcdef",
    7,
    4,
    (
        TopicEntry(
            1,
            "persistent://public/default/größe",
            "ffeeddccbbaa99887766554433221100",
            (2, 40),
            (LedgerEntry(3, 2, 100, 8000, 1_700_000_000_000, 1_700_000_000_900), LedgerEntry(4, 0, 5, 512, 1, 2)),
        ),
        TopicEntry(3, 'a "quoted" name', "0" * 32, (0, 0), (LedgerEntry(1),)),
    ),
    9,
)


def test_golden() -> None:
    data = committed("broker_io/manifest.txt", encode_manifest(MANIFEST))
    assert decode_manifest(data, "manifest") == MANIFEST


DIGEST = "00000000000000000123456789abcdef"
COMPACTED = MANIFEST._replace(
    topics=(
        MANIFEST.topics[0]._replace(
            ledgers=(MANIFEST.topics[0].ledgers[0]._replace(digest=DIGEST), MANIFEST.topics[0].ledgers[1]),
            compaction=CompactionState(3, 2, CompactionPolicy(0.25, 1000, 60_000, 3_600_000)),
        ),
        MANIFEST.topics[1]._replace(compaction=CompactionState(0, 0, CompactionPolicy())),
    )
)


def test_golden_of_compacted_topics() -> None:
    data = committed("broker_io/manifest-compacted.txt", encode_manifest(COMPACTED))
    assert decode_manifest(data, "manifest") == COMPACTED


PAIRED = MANIFEST._replace(
    topics=(MANIFEST.topics[0]._replace(operations=17), MANIFEST.topics[1]),
    last_journal=9,
    mark=Mark(3, 41, 2**64 - 2),
    pair=PairEntry(
        b"\x01store\xff",
        True,
        40,
        12,
        (Fork(2, Mark(1, 20, 5)), Fork(3, Mark(2, 30, 2**63))),
        (PreparedFile(11, 1, 3, 3, 700, "ab" * 16),),
    ),
)


def test_golden_of_a_member_of_a_pair() -> None:
    data = committed("broker_io/manifest-pair.txt", encode_manifest(PAIRED))
    assert decode_manifest(data, "manifest") == PAIRED


def test_golden_of_a_member_with_the_id_of_its_pair() -> None:
    manifest = PAIRED._replace(pair=PairEntry(b"\x01store\xff", id=b"\x02pair\xfe"))
    data = committed("broker_io/manifest-pair-id.txt", encode_manifest(manifest))
    assert decode_manifest(data, "manifest") == manifest


def test_version_1_is_refused_with_the_release_that_converts_it() -> None:
    with pytest.raises(UnsupportedFormat, match=r"dir/manifest.*version 1;.*0\.2\.0, which converts.*0\.1\.0"):
        decode_manifest((GOLDEN / "broker_io/manifest-v1.txt").read_bytes(), "dir/manifest")


LARGE_MARK = f'[0,{2**64},"0000000000000000"]'


@pytest.mark.parametrize("mark", ["[0,0]", '[0,"0","0000000000000000"]', "[0,-1,5]", '[0,0,"x"]', "null", LARGE_MARK])
def test_a_mark_that_is_none_is_damage(mark: str) -> None:
    rest = encode_manifest(MANIFEST).partition(b"\n")[2].replace(b'[0,0,"0000000000000000"]', mark.encode())
    with pytest.raises(Damaged, match="parsed"):
        decode_manifest(f"txnbuffer-log 2 {google_crc32c.value(rest):08x}\n".encode() + rest, "manifest")


def test_a_member_without_a_store_is_damage() -> None:
    """It must not be opened as a log without a pair."""
    rest = encode_manifest(PAIRED).partition(b"\n")[2].replace(PAIRED.pair.store.hex().encode(), b"")
    with pytest.raises(Damaged, match="store of a pair has no id"):
        decode_manifest(f"txnbuffer-log 2 {google_crc32c.value(rest):08x}\n".encode() + rest, "manifest")


def changed(old: str, new: str) -> bytes:
    """The manifest of the compacted topics with another text and a valid checksum."""
    rest = encode_manifest(COMPACTED).partition(b"\n")[2].replace(old.encode(), new.encode())
    return f"txnbuffer-log 2 {google_crc32c.value(rest):08x}\n".encode() + rest


@pytest.mark.parametrize(("old", "new"), [("dirty_ratio", "dirty_ratios"), (DIGEST, DIGEST[1:]), (f'"{DIGEST}"', "5")])
def test_a_policy_or_a_digest_that_is_none_is_damage(old: str, new: str) -> None:
    with pytest.raises(Damaged, match="parsed"):
        decode_manifest(changed(old, new), "manifest")


def test_an_older_manifest_has_no_digests() -> None:
    without = decode_manifest(changed(f',"digest":"{DIGEST}"', ""), "manifest").topics[0]
    assert [ledger.digest for ledger in without.ledgers] == ["", ""]
    assert without._replace(ledgers=COMPACTED.topics[0].ledgers) == COMPACTED.topics[0]


def test_flipped_bits_and_truncation_are_damage() -> None:
    data = encode_manifest(MANIFEST)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError, match="dir/manifest"):
            decode_manifest(bytes(flipped), "dir/manifest")
    for size in range(len(data)):
        with pytest.raises(Damaged):
            decode_manifest(data[:size], "dir/manifest")


def test_another_version_is_named() -> None:
    data = encode_manifest(MANIFEST).replace(b"txnbuffer-log 2 ", b"txnbuffer-log 12 ", 1)
    with pytest.raises(UnsupportedFormat, match="version 12"):
        decode_manifest(data, "manifest")


@pytest.mark.parametrize("rest", [b"", b"[]", b"{}", b'{"log":1}', b"\xff", b'{"topics":[{}]}', b'{"topics":5}'])
def test_unparsable_manifest_is_damaged(rest: bytes) -> None:
    data = f"txnbuffer-log 2 {google_crc32c.value(rest):08x}\n".encode() + rest
    with pytest.raises(Damaged, match="parsed"):
        decode_manifest(data, "manifest")


def test_an_entry_grows_from_its_first_message_on() -> None:
    empty = LedgerEntry(1, first_time=5, last_time=5)
    once = empty.grown(2, 100, 10, 20)
    assert once == LedgerEntry(1, 0, 2, 100, 10, 20)
    assert once.grown(1, 50, 30, 30) == LedgerEntry(1, 0, 3, 150, 10, 30)


def test_ledgers_are_found_by_number() -> None:
    topic = MANIFEST.topics[0]
    assert [entry and entry.ledger for entry in map(topic.find, (0, 3, 4, 5))] == [3, 3, 4, None]


def test_places_are_distinct() -> None:
    one, other = MANIFEST.topics
    places = {one.place(one.ledgers[0]), one.place(one.ledgers[1]), other.place(other.ledgers[0])}
    places |= {one.place(one.ledgers[0]._replace(generation=3)), other.place(one.ledgers[0])}
    assert len(places) == 5


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ([], None),
        (["lock"], None),
        (["lock", "journal-1", "manifest.new"], None),
        (["photo.jpg"], ForeignDirectory),
        (["lock", "journal-1", "notes.txt"], ForeignDirectory),
        (["lock", "journal-2"], Damaged),
        (["topics"], Damaged),
    ],
)
def test_a_directory_without_a_manifest(names: list[str], error: type[StorageError] | None) -> None:
    disk = SimulatedDisk()
    disk.make_directory("/log")
    for name in names:
        disk.open(f"/log/{name}", write=True, create=True)
    before = len(disk.history)
    if error is None:
        assert load_manifest(disk, "/log") is None
        assert load_manifest(disk, "/missing") is None
    else:
        with pytest.raises(error):
            load_manifest(disk, "/log")
    assert len(disk.history) == before, "loading changes nothing"


def test_cached_texts_are_those_of_the_present_topics() -> None:
    texts = TopicTexts()
    first, second = MANIFEST.topics
    third = second._replace(number=4, name="new")
    renamed = first._replace(name="other")
    for topics in ((first, second), (first, second, third), (renamed, third), (first,), (), (third, second), (second,)):
        manifest = MANIFEST._replace(topics=topics)
        assert encode_manifest(manifest, texts) == encode_manifest(manifest)
        assert decode_manifest(encode_manifest(manifest, texts), "manifest") == manifest


def test_replacing_is_all_or_nothing() -> None:
    newer = MANIFEST._replace(journal=8)
    outcomes = set()
    for operation in range(1, 8):
        for written in (0, 50):
            for unsynced in Unsynced:
                disk = SimulatedDisk()
                disk.make_directory("/log")
                disk.sync_directory("/")
                replace_manifest(disk, "/log", MANIFEST)
                disk.stop_at(operation, written=written)
                try:
                    replace_manifest(disk, "/log", newer)
                    finished = True
                except Crash:
                    finished = False
                found = load_manifest(disk.crash(unsynced, operation), "/log")
                assert found in (MANIFEST, newer)
                assert found == newer or not finished
                outcomes.add(found == newer)
    assert outcomes == {False, True}
