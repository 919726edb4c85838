"""The log protocol in Java says the same as that in Python, after each entry of generated logs.

A line of an answer has the last entry that may be delivered, the oldest open transaction, the number of damaged
commits, whether the topic stopped, and how many rows of each newly decided message are hidden.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import takewhile

import numpy as np
import pulsar_entries
import pytest
from golden_files import GOLDEN, committed
from histories import DAMAGES, History, Log, damage, histories, marker, record
from hypothesis import given, settings
from hypothesis import strategies as st
from java_rules import ANSWERED, JavaRules, Python, check_delivered, compared, content, passed, set_of, spaced, word

from broker_io.batch import Batch, Blobs, Labels, Message, Numbers
from broker_io.block import encode_block
from broker_io.position import NO_INDEX, Int64s, Position
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import MARKER, RECORDS, REMOVED, SEQ, TXN, VERSION, any_transactional, encode_marker
from txnbuffer.recordset import unpack

SOAK = settings.get_current_profile_name() == "soak"
T1, T2, T3 = TxnId(0, 1), TxnId(0, 2), TxnId(0, 3)


def of_log(log: Log) -> tuple[list[str], list[str]]:
    """Commands that pass a whole log from its start, and what Python answers."""
    python = Python(log)
    commands, expected = ["new", "start"], []
    for number, entry in enumerate(python.entries):
        commands.append(passed(log, entry))
        expected.append(python.entry(number))
    return [*commands, "all"], [*expected, python.everything()]


def of_history(history: History) -> tuple[list[str], list[str]]:
    """As `of_log`, with the trims, and what is hidden in the ledgers that are left after each."""
    python = Python(history.log)
    commands, expected = ["new", "start"], []
    trims = [*history.trims]
    for number, entry in enumerate(python.entries):
        commands.append(passed(history.log, entry))
        expected.append(python.entry(number))
        while trims and trims[0][0] <= entry[1][-1] + 1:
            first_ledger = trims.pop(0)[1]
            python.owner.trim(first_ledger)
            commands += [f"trim {first_ledger}", "all"]
            expected.append(python.everything())
    return [*commands, "all"], [*expected, python.everything()]


@pytest.mark.timeout(3600 if SOAK else 300)
@settings(max_examples=10_000 if SOAK else 1_000)
@given(history=histories(30 if SOAK else 20, odd=True))
def test_generated_histories(java: JavaRules, history: History) -> None:
    commands, expected = of_history(history)
    compared(java.answers(commands), expected, commands)
    check_deliveries(java, history)


def check_deliveries(java: JavaRules, history: History) -> None:
    """Assert that plain consumers get what is visible of each entry of the ledgers that the JVM still has."""
    log, python = history.log, Python(history.log)
    first_ledger = max((first for _, first in history.trims), default=0)
    for number in range(len(python.entries)):
        python.entry(number)
    left = [number for number in range(python.decided) if python.entries[number][0][0] >= first_ledger]
    answers = java.answers([f"delivered {spaced(*python.entries[number][0], NO_INDEX)}" for number in left])
    for answer, number in zip(answers, left, strict=True):
        check_delivered(answer, log, python.entries[number], python.hidden(number, number + 1))


def golden_history() -> History:
    """Each rule once, with a batch of several transactions and a record set of which some rows are duplicates."""
    log = Log()
    log.records(None, 0, 1)
    log.record(T1, 1, 3)
    for index, (txn, seq) in enumerate([(T2, 1), (None, 0), (T3, 1), (T2, 2), (T1, 4)]):
        log.member(txn, seq, index)
    log.next_entry()
    log.record(T1, 3, 4)  # rows 3 and 4 are duplicates, 5 and 6 are new
    log.end(T2, Outcome.ABORT, epoch=2)
    log.records(T2, 3, 2)  # late
    log.end(T3, Outcome.ABORT, epoch=1, decided=False)  # void: of an older epoch
    log.new_ledger()
    log.end(T3, Outcome.COMMIT, 2, epoch=1)  # damaged: it has one record
    log.end(T3, Outcome.ABORT, epoch=2)  # ignored
    log.bad(Message(b"k", b"v", {VERSION: "1", TXN: "junk", SEQ: "1"}))
    log.bad(Message(b"k", b"v", {VERSION: "1", RECORDS: "2"}), size=2)
    log.mark(marker((T1, Outcome.COMMIT, 6), epoch=3, lwm=7))
    trims = [(len(log.events), 2)]
    log.records(TxnId(0, 7), 1, 1)  # late: at the low-water mark
    log._add(Message(None, b"", {VERSION: "1", TXN: "0:9", SEQ: "1", REMOVED: "1"}))
    log.end(TxnId(0, 9), Outcome.COMMIT, 1)
    log._add(Message(b"k", b"v", {VERSION: "2"}))
    log.records(None, 0, 1)
    return History(log, tuple(trims))


def test_golden_history(java: JavaRules) -> None:
    commands, expected = of_history(golden_history())
    answered = iter(expected)
    lines = [f"{command}\n  {next(answered)}" if command.startswith(ANSWERED) else command for command in commands]
    committed("broker_plugin/history.txt", "\n".join([*lines, ""]).encode())
    compared(java.answers(commands), expected, commands)


def test_golden_rewritten_entries(java: JavaRules) -> None:
    """Cursors store places in rewritten batches, so these bytes are a format."""
    records = [record(T1, 1), record(T2, 1), record(None), record(T2, 2), record(T1, 2)]
    batch = [one._replace(key=b"key %d" % row, value=b"value %d" % row) for row, one in enumerate(records)]
    sets = [Message(None, set_of(4), record(T1, seq, size=4).properties) for seq in (3, 5)]  # two rows are there twice
    ends = [encode_marker(marker((T1, Outcome.COMMIT, 8))), encode_marker(marker((T2, Outcome.ABORT, 2)))]
    entries = [
        pulsar_entries.entry(batch),
        pulsar_entries.entry(batch[1:], broker_data=b"\x08\x05\x10\x07"),
        *(pulsar_entries.entry([one], batched=False) for one in [*sets, *ends]),
    ]
    commands = ["new", "start", *(f"entry 1 {at} -1 {word(data)}" for at, data in enumerate(entries))]
    java.answers(commands)
    asked = [f"delivered 1 {at} -1" for at in range(len(entries))]
    answers = [answer.replace("remembered", "unchanged") for answer in java.answers(asked)]
    lines = [*commands, *(f"{command}\n  {answer}" for command, answer in zip(asked, answers, strict=True))]
    committed("broker_plugin/rewritten.txt", "\n".join([*lines, ""]).encode())
    first, second, whole, cut, *markers = answers
    assert (whole, markers) == ("unchanged", ["hidden", "hidden"])
    assert content(first) == pulsar_entries.entry([batch[0], batch[2], batch[4]])
    assert content(second) == pulsar_entries.entry([batch[2]], broker_data=b"\x08\x05\x10\x07")  # 4 is there twice
    value = pulsar_entries.parts(content(cut)).payload
    left = Message(None, value, record(T1, 7, size=2).properties)
    assert content(cut) == pulsar_entries.entry([left], batched=False)
    assert [one.value for one in unpack(Position(1, 3), left)] == [b"2", b"one"]


def test_entries_that_are_wholly_visible_are_remembered_until_their_ledger_is_deleted(java: JavaRules) -> None:
    """So their messages are not looked at again for each subscription."""
    log = Log()
    for number in range(100):
        log.member(T1, number + 1, 0)
        log.member(None, 0, 1)
        log.next_entry()
    log.end(T1, Outcome.COMMIT, 100)
    entries = Python(log).entries
    asked = [f"delivered {spaced(*key, NO_INDEX)}" for key, _ in entries]
    commands = ["new", "start", *(passed(log, entry) for entry in entries), *asked, "trim 2", *asked[:1]]
    answers = java.answers(commands)[len(entries) :]
    assert answers == ["remembered"] * 100 + ["hidden", "unchanged"]


FIELDS = [b"", *(pulsar_entries.field(tag, 2**40) for tag in (5, 8, 99)), *(pulsar_entries.field(7, b"order"),)]
FIELDS += [pulsar_entries.varint(99 << 3 | 1) + b"8 bytes ", pulsar_entries.varint(99 << 3 | 5) + b"four"]
FIELDS += [pulsar_entries.properties_of(1, {"app": "x", "tb": "y", "tb_": "z", "": "", "t" * 300: ""})]


@pytest.mark.parametrize("more", FIELDS)
def test_other_fields_of_messages_change_nothing_and_stay(java: JavaRules, more: bytes) -> None:
    batch = [record(T1, 1), record(None), record(T2, 1), record(T1, 2)]
    end = encode_marker(marker((T1, Outcome.ABORT, 2), (T2, Outcome.COMMIT, 1)))
    entries = [pulsar_entries.entry(batch, more=more), pulsar_entries.entry([end], batched=False)]
    commands = ["new", "start", *(f"entry 1 {at} -1 {word(data)}" for at, data in enumerate(entries))]
    answers = java.answers([*commands, "delivered 1 0 -1"])
    assert content(answers[-1]) == pulsar_entries.entry(batch[1:3], more=more)


def test_messages_with_damage_are_read_as_the_broker_reads_them(java: JavaRules) -> None:
    rnd = random.Random(7)
    messages = [record(T1, 1), record(None), record(TxnId(0, 10**17), 12), Message(b"k", b"v", {"tb.x": "1"})]
    commands = [f"scan {word(pulsar_entries.member(one, more))}" for one in messages for more in FIELDS]
    assert java.answers(commands) == ["same"] * (3 * len(FIELDS)) + ["other"] * len(FIELDS)
    seen: set[str] = set()
    for number in range(50_000 if SOAK else 5_000):
        damaged = bytearray(pulsar_entries.member(rnd.choice(messages), rnd.choice(FIELDS)))
        for _ in range(rnd.randint(1, 3)):
            damage(damaged, rnd.choice(["change", "change", "add", "cut"]), rnd.randrange(64), rnd.choice(BYTES))
        commands.append(f"scan {word(bytes(damaged))}")
        if number % 1000 == 999:  # the JVM waits for a reader of its answers
            seen |= {*java.answers(commands)}
            commands.clear()
    assert seen == {"same", "other"}


@settings(max_examples=500 if SOAK else 100)
@given(data=st.data())
def test_record_sets_without_their_first_records(java: JavaRules, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    hidden = data.draw(st.integers(1, size - 1))
    texts, numbers = st.none() | st.binary(max_size=9), st.integers(-(2**63), 2**63 - 1)
    rows = st.lists(texts, min_size=size, max_size=size)
    mask = st.none() | st.lists(st.booleans(), min_size=size, max_size=size).map(
        lambda flags: np.array(flags, np.bool_)
    )
    labels = st.lists(st.sampled_from([None, "", "größe"]), min_size=size, max_size=size).map(Labels.of)
    columns = st.builds(Numbers, st.lists(numbers, min_size=size, max_size=size).map(int64s), mask) | labels
    records = Batch(
        Blobs.of(data.draw(rows)),
        Blobs.of(data.draw(rows)),
        data.draw(st.dictionaries(st.sampled_from(["a", "é", "long"]), columns)),
        data.draw(st.none() | st.lists(st.integers(0, 2**50), min_size=size, max_size=size).map(int64s)),
    )
    compress = {name: data.draw(st.booleans()) for name in ("compress", "compress_keys", "hashed")}
    times = data.draw(st.sampled_from([None, int64s(range(size))]))
    block = encode_block(records, first_entry=3, publish_time=5, publish_times=times, **compress)
    stored = b"".join(block.chunks)
    found = content(java.answers([f"cut {hidden} {size} {word(stored)}"])[0])
    properties = {VERSION: "1", RECORDS: str(size - hidden)}
    assert [*unpack(Position(1, 0), Message(None, found, properties))] == [*records.take(slice(hidden, None))]
    damaged = bytearray(stored)
    damage(damaged, *data.draw(DAMAGES))
    answer = java.answers([f"cut {hidden} {size} {word(bytes(damaged))}"])[0]
    assert answer.startswith("refused") or content(answer) == found  # the padding has no checksum


def int64s(numbers: Iterable[int]) -> Int64s:
    return np.array([*numbers], np.int64)


def test_golden_markers_with_damage(java: JavaRules) -> None:
    """Each is read by both as the same marker, or refused by both."""
    rnd = random.Random(39)
    names = sorted(path.name for path in GOLDEN.glob("marker-*.avro"))
    assert len(names) >= 5
    for number in range(10_000 if SOAK else 1_500):
        value = bytearray((GOLDEN / names[number % len(names)]).read_bytes())
        for _ in range(rnd.randint(0, 3) if number >= len(names) else 0):
            damage(value, rnd.choice(["change", "change", "add", "cut"]), rnd.randrange(64), rnd.choice(BYTES))
        log = Log()
        log.records(T1, 1, 2)
        log.records(TxnId(0, 12), 1, 1)
        log._add(Message(None, bytes(value), {VERSION: "1", MARKER: "1"}))
        log.records(T2, 1, 1)
        commands, expected = of_log(log)
        compared(java.answers(commands), expected, commands)


BYTES = [*range(256), *[0x80, 0xFF, 0x81, 0, 1, 2] * 40]
ODD_PROPERTIES: list[dict[str, str]] = [
    {VERSION: "1", TXN: f"{most}:{least}", SEQ: seq}
    for most, least, seq in [
        ("00", "01", "1"),
        ("0", "1" + "0" * 18, "0001"),
        ("0", str(2**63 - 1), str(2**63 - 1)),
        ("0", str(2**63), "1"),
        (str(2**63), "1", "1"),
        ("0", "0" * 4290 + "7", "1"),
        ("0", "0" * 4300 + "7", "1"),
        ("0", "1:1", "1"),
        ("", "1", "1"),
        ("+0", "1", "1"),
        ("\u0660", "1", "1"),
        ("0", "1 ", "1"),
        ("0", "1", "1" * 20),
        ("0", "1", "0" * 19 + "1"),
        ("0", "1", "\u0661"),
    ]
]
ODD_PROPERTIES += [
    {VERSION: "1", TXN: "0:1", SEQ: str(2**63 - 2), RECORDS: "2"},
    {VERSION: "1", TXN: "0:1", SEQ: str(2**63 - 2), RECORDS: "3"},
    {VERSION: "1", RECORDS: str(2**31 - 1)},
    {VERSION: "1", RECORDS: "2", TXN: "x"},
    {RECORDS: "2"},
    {VERSION: "1", MARKER: "2"},
    {VERSION: "1", MARKER: ""},
    {MARKER: "1"},
    {VERSION: "1"},
    {"tb.unknown": "1"},
]


@pytest.mark.parametrize("properties", ODD_PROPERTIES, ids=lambda found: " ".join(map("=".join, found.items()))[:40])
@pytest.mark.parametrize("batch", [NO_INDEX, 0])
def test_odd_properties(java: JavaRules, properties: dict[str, str], batch: int) -> None:
    log = Log()
    log._add(Message(b"k", b"v", properties), batch)
    log.next_entry()
    log.end(T1, Outcome.COMMIT, 1)
    commands, expected = of_log(log)
    compared(java.answers(commands), expected, commands)


def test_a_replay_moves_the_bound_at_its_end(java: JavaRules) -> None:
    log = Log()
    log.records(None, 0, 2)
    log.records(T1, 1, 1)
    log.end(T1, Outcome.ABORT)
    commands = ["new", "start", "until 1 2 -1", *(passed(log, entry) for entry in Python(log).entries)]
    bounds = [answer.split(" ")[0] for answer in java.answers(commands)]
    assert bounds == ["-1,-1,-1"] * 3 + ["1,1,-1", "1,3,-1"]


def test_nothing_is_known_before_the_start_is(java: JavaRules) -> None:
    with pytest.raises(AssertionError, match="the start of the log is not known"):
        java.answers(["new", "entry 1 0 -1"])


@settings(max_examples=1_000 if SOAK else 100)
@given(history=histories(odd=True))
def test_unregistered_topics_stop_before_what_says_that_a_snapshot_was_lost(java: JavaRules, history: History) -> None:
    """There readers in Python refuse the topic."""
    log, python = history.log, Python(history.log)
    commands, expected = ["new", "unregistered 0 5 -1"], []
    bound, lost = (0, 5), False
    for number, entry in enumerate(python.entries):
        commands.append(passed(log, entry))
        messages = [log.messages[index] for index in entry[1] if not log.events[index].unreadable]
        ran = not python.stopped
        if lost or any_transactional(_before_the_stop(messages)):
            lost = lost or ran
        else:
            python.entry(number)
        if not lost and not python.stopped:
            bound = entry[0]
        expected.append(f"{spaced(*bound)} {lost}")
    answers = [answer.split(" ") for answer in java.answers(commands)]
    found = [f"{spaced(*map(int, words[0].split(',')[:2]))} {words[4] == 'questioned'}" for words in answers]
    compared(found, expected, commands)


def _before_the_stop(messages: list[Message]) -> Batch:
    """Those before the first one of another version of the protocol."""
    return Batch.of(takewhile(lambda message: message.properties.get(VERSION, "1") == "1", messages))


def test_epoch_markers_in_an_unregistered_topic_are_hidden(java: JavaRules) -> None:
    """An owner that crashes while it registers a topic may leave one."""
    log = Log()
    log.records(None, 0, 1)
    log.mark(marker(epoch=2))
    log.records(None, 0, 1)
    log.records(T1, 1, 1)
    log.records(None, 0, 1)
    answers = java.answers(["new", "unregistered -1 -1 -1", *(passed(log, entry) for entry in Python(log).entries)])
    assert answers[1:] == ["1,1,-1 - 0 runs - 1", "1,2,-1 - 0 runs - 0", *["1,2,-1 - 0 runs questioned -"] * 2]


def test_memory_of_aborts_is_given_back_with_their_ledgers(java: JavaRules) -> None:
    """At most 8 bytes an abort, whether all, one in ten or one in a hundred transactions abort."""
    count = 10_000_000 if SOAK else 1_000_000
    java.answers(["new", "start", "abort 1 1 1", "abort 1 1 1"])  # the JVM needs some itself
    for step in (1, 10, 100):
        used, left = map(int, java.answers(["new", "start", f"abort {count} {step} 20"])[0].split(" "))
        assert used <= 8 * count
        assert left < 100_000


def test_messages_that_a_marker_ends_in_the_same_batch(java: JavaRules) -> None:
    log = Log()
    log.member(T1, 1, 0)
    log._add(Message(None, (GOLDEN / "marker-border.avro").read_bytes(), {VERSION: "1", MARKER: "1"}), 1)
    log._add(record(None), 2)
    log.next_entry()
    commands, expected = of_log(log)
    compared(java.answers(commands), expected, commands)
