"""The broker plug-in reads the snapshots that Python writes, refuses the same ones, and continues as Python does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from buffer.buffer_driver import Owner
from golden_files import GOLDEN
from histories import History, histories, place
from hypothesis import given, settings
from hypothesis import strategies as st
from java_rules import JavaRules, Python, pairs, passed, spaced, word

from broker_io.batch import Message
from broker_io.port import Ledger
from broker_io.position import NO_INDEX, Position
from snapshots.errors import AppliedPositionTrimmed, SnapshotDamaged, SnapshotMissing, UnsupportedSnapshot
from snapshots.format import (
    END,
    MUTATIONS,
    OVERFLOW,
    SEGMENT,
    ChainRange,
    EndEntry,
    EntryKey,
    chain_start,
    digest,
    gone,
    message,
    no_segments,
    owner_message,
    record,
    sealed,
    unsealed,
)
from snapshots.scan import SnapshotTable, TopicEntries
from snapshots.shards import Shard, shard_of
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.recovery.codec import EncodedSegment, TopicState, encode_segment, encode_state
from txnbuffer.recovery.restore import read_snapshot, restore

SOAK = settings.get_current_profile_name() == "soak"
T, INCARNATION, EPOCH = "orders", "7c9e größe", 7


def written(
    owner: Owner, *, pieces: int = 0, origin_ledger: int = 1, following_ledger: int = -1, deleted: bool = False
) -> list[Message]:
    """The messages of a snapshot; its state is in so many overflow entries, or inline."""
    state = owner.buffer.snapshot_state()
    topic_state = TopicState(state, Sequencer(state.applied).snapshot_state(), origin_ledger, following_ledger)
    first = before = chain_start(T, INCARNATION) if state.segments.first == 1 else digest(b"earlier")
    messages: list[Message] = []
    for number in range(state.segments.first, state.segments.end):
        value = encode_segment(EncodedSegment(T, EPOCH - 1, before, owner.segments[number]))
        messages.append(message(EntryKey(T, SEGMENT, number), EPOCH - 1, value))
        before = value[-16:]
    chains = {
        SEGMENT: ChainRange(state.segments.first, state.segments.end, first, before),
        MUTATIONS: no_segments(T, INCARNATION, MUTATIONS),
    }
    encoded = encode_state(topic_state)
    end = EndEntry(T, INCARNATION, EPOCH, 3, chains, next_overflow=5 + pieces, state=encoded, deleted=deleted)
    if pieces:
        size = -(-len(encoded) // pieces)
        parts = [encoded[at * size : (at + 1) * size] for at in range(pieces)]
        messages += [message(EntryKey(T, OVERFLOW, 5 + at), EPOCH, part) for at, part in enumerate(parts)]
        end = replace(end, overflow=tuple(map(digest, parts)), state=b"")
    return [*messages, message(EntryKey(T, END), EPOCH, end.encode())]


def replaced(applied: Position | None):
    return Sequencer(position=applied).snapshot_state()


def among_others(messages: Sequence[Message], rnd: random.Random) -> list[Message]:
    """The messages of a snapshot between those of other owners and topics, which change nothing."""
    older = Message(messages[-1].key, b"older", {**messages[-1].properties, "tb.epoch": "1"})
    others = [owner_message(1), older, message(EntryKey(f"{T}-1", SEGMENT, 1), 1, b"x"), Message(None, b"x", {})]
    others += [message(EntryKey(T, SEGMENT, 99), 1, b"x"), gone(EntryKey(T, SEGMENT, 99), 1), owner_message(EPOCH)]
    fenced = [Message(one.key, b"fenced", {**one.properties, "tb.epoch": "2"}) for one in messages]
    later = [
        *fenced,
        message(EntryKey("order", END), EPOCH, b"x"),
        Message(b"\xff-end", b"x", {}),
        owner_message(EPOCH),
    ]
    segments = [*messages[:-1]]  # of an owner before that, so they are before the entry of this one
    return [*others[:-1], *segments, others[-1], *later[: rnd.randint(0, len(later))], messages[-1], *later]


def put_commands(messages: Sequence[Message]) -> list[str]:
    commands = [f"snapshot {word(T)}"]
    for one in messages:
        key = "-" if one.key is None else word(one.key.decode(errors="replace"))
        value = "-" if one.value is None else word(one.value)
        commands.append(" ".join(["put", key, value, *pairs(one.properties)]))
    return commands


def table_of(messages: Sequence[Message]) -> SnapshotTable:
    table = SnapshotTable()
    if messages:
        table.feed(place(messages, [Position(1, row) for row in range(len(messages))]))
    return table


def python_reads(messages: Sequence[Message], incarnation: str | None) -> str:
    entries = table_of(messages).topics.get(T, TopicEntries())
    try:
        if not entries:
            return "NONE"
        snapshot = read_snapshot(T, entries)
    except UnsupportedSnapshot:
        return "newer"
    except SnapshotDamaged:
        return "damaged"
    except SnapshotMissing:
        return "DELETED"
    if snapshot.end.incarnation != incarnation:
        return "NONE"
    state = snapshot.state
    applied = ",".join(map(str, state.buffer.applied or (-1, -1, -1)))
    return f"STATE {applied} {state.origin_ledger} {state.following_ledger}"


def java_reads(java: JavaRules, messages: Sequence[Message], incarnation: str | None) -> str:
    named = "-" if incarnation is None else word(incarnation)
    words = java.answers(["new", *put_commands(messages), f"read {named}"])[0].split(" ")
    return " ".join(words[:4] if words[0] == "STATE" else words[:1])


def without_bound(answer: str, python: Python) -> str:
    """An answer with the number of entries that may be delivered in place of the last one of them."""
    bound, _, rest = answer.partition(" ")
    last = tuple(map(int, bound.split(",")))[:2]
    return f"{sum(key <= last for key, _ in python.entries)} {rest}"


@settings(max_examples=2_000 if SOAK else 200)
@given(history=histories(odd=True), data=st.data())
def test_the_log_after_a_snapshot_is_the_same_to_both(java: JavaRules, history: History, data: st.DataObject) -> None:
    python = Python(history.log, data.draw(st.sampled_from([1, 2, 3, 8000])))
    cut = data.draw(st.integers(0, len(python.entries)))
    trims = [*history.trims]
    commands, checked = ["new", "start"], [False] * cut

    def trim(number: int) -> None:
        while trims and trims[0][0] <= python.entries[number][1][-1] + 1:
            python.owner.trim(trims.pop(0)[1])
            commands.append(f"trim {python.owner.buffer.first_ledger}")

    for number in range(cut):
        commands.append(passed(history.log, python.entries[number]))
        python.entry(number)
        trim(number)
    messages = among_others(written(python.owner, pieces=data.draw(st.sampled_from([0, 1, 3]))), random.Random(cut))
    commands += [*put_commands(messages), f"read {word(INCARNATION)}"]
    checked.append(False)
    applied = python.owner.buffer.applied
    start = 0 if applied is None else [key for key, _ in python.entries].index(applied[:2])
    expected: list[str] = []
    for number in range(start, len(python.entries)):
        commands.append(passed(history.log, python.entries[number]))
        checked.append(number >= cut - 1)
        if number >= cut:
            expected.append(python.entry(number))
            trim(number)
        elif number == cut - 1:
            expected.append(python.state(cut))
    answers = java.answers([*commands, "all"])
    assert answers[cut].startswith("STATE"), answers[cut]
    answers, final = answers[:-1], answers[-1]
    found = [without_bound(answer, python) for answer, known in zip(answers, checked, strict=True) if known]
    assert found == [without_bound(answer, python) for answer in expected], "\n".join(commands)
    assert final == python.everything(), "\n".join(commands)


def test_damaged_and_newer_snapshots_are_refused_as_python_does(java: JavaRules) -> None:
    rnd = random.Random(3)
    seen: dict[str, int] = {}
    sound = [golden(), golden(2), golden(version="1")]
    for number in range(4_000 if SOAK else 400):
        messages = [*sound[number % 3]]
        row = rnd.randrange(len(messages))
        one = messages[row]
        assert one.value is not None
        match rnd.randrange(6):
            case 0:
                del messages[row]
            case 1:
                at = rnd.randrange(len(one.value))
                changed = one.value[:at] + bytes([one.value[at] ^ 1 << rnd.randrange(8)]) + one.value[at + 1 :]
                messages[row] = one._replace(value=changed)
            case 2:
                messages[row] = one._replace(value=one.value[: rnd.randrange(len(one.value))])
            case 3:
                name = rnd.choice([*one.properties])
                text = rnd.choice(["0", "1", "2", "3", "9", "", "x", "01", "end", "part", "spill", "1" * 19])
                messages[row] = one._replace(properties={**one.properties, name: text})
            case 4:
                other = rnd.randrange(len(messages))
                messages[row], messages[other] = (
                    messages[row]._replace(key=messages[other].key),
                    messages[other]._replace(key=messages[row].key),
                )
            case 5:
                messages[row] = one._replace(value=None)
        wanted = python_reads(messages, "incarnation-1")
        seen[wanted.split(" ")[0]] = seen.get(wanted.split(" ")[0], 0) + 1
        assert java_reads(java, messages, "incarnation-1") == wanted, messages
    assert {"STATE", "damaged", "newer"} <= {*seen}


def golden(pieces: int = 0, version: str = "2") -> list[Message]:
    """The committed segment and state as a whole snapshot, with an end entry of a version."""
    part, state = ((GOLDEN / "snapshots" / f"{name}-1.bin").read_bytes() for name in ("part", "state"))
    chains = {
        SEGMENT: ChainRange(1, 2, chain_start(T, "incarnation-1"), part[-16:]),
        MUTATIONS: no_segments(T, "incarnation-1", MUTATIONS),
    }
    size = len(state) // max(pieces, 1) + 1
    parts = [state[at : at + size] for at in range(0, len(state), size)] if pieces else []
    end = EndEntry(T, "incarnation-1", 7, 3, chains, 1 + len(parts), tuple(map(digest, parts)), b"" if parts else state)
    overflow = [message(EntryKey(T, OVERFLOW, 1 + at), 7, piece) for at, piece in enumerate(parts)]
    stored = message(EntryKey(T, END), 7, end.encode(), raw=version == "3")
    if version == "1":
        codec = record("end-1", "snapshots")
        values = unsealed(record("end-2", "snapshots"), end.encode())
        stored = stored._replace(
            value=sealed(codec, {name: values[name] for name, _ in codec.fields}, "digest"),
            properties={**stored.properties, "tb.v": "1"},
        )
    return [message(EntryKey(T, SEGMENT, 1), 7, part), *overflow, stored]


@pytest.mark.parametrize(("pieces", "version"), [(0, "2"), (1, "2"), (3, "2"), (0, "1"), (2, "1"), (1, "3")])
def test_golden_segment_and_state(java: JavaRules, pieces: int, version: str) -> None:
    messages = golden(pieces, version)
    assert python_reads(messages, "incarnation-1") == "STATE 5,77,-1 1 6"
    commands = ["new", *put_commands(messages), f"read {word('incarnation-1')}", "entry 5 77 -1"]
    # Two are open since 5:1, and one commit was damaged.
    assert java.answers(commands) == ["STATE 5,77,-1 1 6 5,0,-1 1", "5,0,-1 0:20 1 runs - -"]


ENDS = sorted(path.name for path in (GOLDEN / "snapshots").glob("end-*.bin"))


@pytest.mark.parametrize("name", ENDS)
def test_golden_end_entries(java: JavaRules, name: str) -> None:
    """Alone they are not whole, but for those of a deleted topic."""
    value = (GOLDEN / "snapshots" / name).read_bytes()
    messages = [Message(b"orders-end", value, {"tb.v": name[4], "tb.kind": "end", "tb.epoch": "7"})]
    wanted = python_reads(messages, "i")
    assert (
        wanted == ("DELETED" if "deleted" in name else "NONE" if "spilled" in name else "damaged")
        or wanted == "damaged"
    )
    incarnation = "incarnation-1" if "spilled" in name else "i"
    assert java_reads(java, messages, incarnation) == wanted
    assert java_reads(java, messages, None) == "NONE"


def test_a_snapshot_of_another_incarnation_counts_as_none(java: JavaRules) -> None:
    for messages in (golden(), written(Owner(), deleted=True), []):
        for incarnation in ("another", None):
            assert java_reads(java, messages, incarnation) == "NONE"
    assert java_reads(java, written(Owner(), deleted=True), INCARNATION) == "DELETED"
    assert python_reads(written(Owner(), deleted=True), INCARNATION) == "DELETED"


@dataclass
class Stub:
    """What `restore` asks a broker. `unused`: its log has held nothing."""

    existing: list[int]
    unused: bool

    def incarnation(self, _: str) -> str:
        return INCARNATION

    def ledgers(self, _: str) -> list[Ledger]:
        return [Ledger(number, 1, 1, closed=True) for number in self.existing]

    def last_position(self, _: str) -> Position | None:
        return None if self.unused else Position(10**6, 0)


numbers = st.integers(0, 4)


@settings(max_examples=200)
@given(
    applied=st.none() | st.builds(Position, numbers, numbers, st.sampled_from([NO_INDEX, 0, 3])),
    origin=st.integers(-1, 4),
    following=st.integers(-1, 4),
    existing=st.sets(numbers, min_size=1),
    unused=st.booleans(),
)
def test_a_gap_between_snapshot_and_log_is_refused_as_python_does(
    java: JavaRules, applied: Position | None, origin: int, following: int, existing: set[int], unused: bool
) -> None:
    owner = Owner()
    owner.buffer.applied = applied
    messages = written(owner, origin_ledger=origin, following_ledger=following)
    try:
        loaded = restore(Stub(sorted(existing), unused), table_of(messages), T, owned=False)  # type: ignore[arg-type]  # a part of it
        wanted = f"{'anew' if loaded.snapshot is None else 'snapshot'} {','.join(map(str, loaded.resume))}"
    except AppliedPositionTrimmed:
        wanted = "refused"
    place_ = spaced(*(applied or (-1, -1, -1)))
    command = f"resume {int(unused)} {place_} {origin} {following} {spaced(*sorted(existing))}"
    assert java.answers([command]) == [wanted]


def test_golden_partitions(java: JavaRules) -> None:
    for name, shards in json.loads((GOLDEN / "shards" / "shard-of.json").read_text()).items():
        counts = SHARDS[: len(shards)]
        assert [shard_of(name, count) for count in counts] == shards
        for count, shard in zip(counts, shards, strict=True):
            partition = Shard(shard, count).topic("__txnbuffer_snapshots")
            assert java.answers([f"partition {word(name)} {count}"]) == [f"{partition} {shard}"]


SHARDS = (1, 2, 3, 7, 256)


@pytest.mark.parametrize(
    ("annotation", "partitions", "shards"),
    [("-", 0, 1), ("-", 3, 3), ("shards=2", 3, 2), ("shards=2", 0, 1), ("shards=0", 4, 4), ("shards=x", 4, 4)],
)
def test_the_number_of_shards_is_the_annotation_or_that_of_partitions(
    java: JavaRules, annotation: str, partitions: int, shards: int
) -> None:
    named = annotation if annotation == "-" else word(annotation)
    assert java.answers([f"shards {named} {partitions}"]) == [str(shards)]
