"""The rules of the broker plug-in in a JVM that reads commands, and what Python says of the same entries."""

from __future__ import annotations

import base64
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import pulsar_entries
import pytest
from buffer.buffer_driver import Owner
from histories import Log, place

from broker_io.batch import Batch, Message
from broker_io.position import NO_INDEX, Position
from broker_plugin.build import SOURCES, TEST_SOURCES, BuildFailed, classpath, compile_into
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.errors import ProtocolStopped
from txnbuffer.protocol import MAX_SET_RECORDS, RECORDS, REMOVED, SEQ, number, removed_rows
from txnbuffer.recordset import pack, unpack

ANSWERED = (
    *("entry", "delivered", "scan", "cut", "until", "all", "abort"),
    *("read", "resume", "partition", "refusal", "lacking", "shards"),
)
Indexes = list[int]
Entry = tuple[tuple[int, int], Indexes]
"""Ledger and entry, and the indexes of its messages in the log."""


class JavaRules:
    """A JVM with `Contract`; a list of commands is one round trip."""

    def __init__(self) -> None:
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.classes = Path(scratch.name)
        try:
            compile_into(self.classes, (SOURCES, TEST_SOURCES))
        except BuildFailed as error:
            pytest.fail(f"the broker plug-in cannot be built: {error}")
        command = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:MarkSweepDeadRatio=0", "-XX:TieredStopAtLevel=1", "-cp"]
        self._process = subprocess.Popen(
            [*command, classpath(self.classes), "txnbuffer.broker.Contract"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, end_of, self._process, scratch)

    def answers(self, commands: Sequence[str]) -> list[str]:
        """Run commands; the answers of those that have one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n".join([*commands, ""]))
        self._process.stdin.flush()
        expected = sum(command.startswith(ANSWERED) for command in commands)
        found = [self._process.stdout.readline().rstrip("\n") for _ in range(expected)]
        assert not [answer for answer in found if answer.startswith("error") or not answer], found
        return found

    def close(self) -> None:
        self._end()


def end_of(process: subprocess.Popen[str], scratch: tempfile.TemporaryDirectory[str]) -> None:
    if process.stdin is not None and process.stdout is not None:
        process.stdin.close()
        process.stdout.close()
    process.wait(60)
    scratch.cleanup()


def word(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return "_" + base64.urlsafe_b64encode(data).decode()


def content(found: str) -> bytes:
    """The bytes of a word."""
    return base64.urlsafe_b64decode(found.removeprefix("_"))


def pairs(properties: Mapping[str, str]) -> list[str]:
    return [f"{word(name)}.{word(text)}" for name, text in properties.items()]


def spaced(*numbers: int) -> str:
    return " ".join(map(str, numbers))


def entries_of(log: Log) -> list[Entry]:
    keys = [event.position[:2] for event in log.events]
    return [(key, [*indexes]) for key, indexes in groupby(range(len(keys)), keys.__getitem__)]


MOST_ROWS = 10
"""Records of a set that is made whole; others have values that cannot be unpacked."""


def messages_of(log: Log, entry: Entry) -> list[Message]:
    """The messages of an entry; record sets have records."""
    messages = [log.messages[index] for index in entry[1]]
    sizes = [rows_of(log.messages[index], log.events[index].position) for index in entry[1]]
    sound = [RECORDS in one.properties and REMOVED not in one.properties for one in messages]
    return [
        one._replace(value=set_of(size)) if is_set and size <= MOST_ROWS else one
        for one, size, is_set in zip(messages, sizes, sound, strict=True)
    ]


@cache
def set_of(size: int) -> bytes:
    """The value of a record set."""
    rows = [
        Message(*[(b"key", b"one", {"n": "7"}), (None, None, {"text": "a"}), (b"", b"%d" % row, {})][row % 3], row)
        for row in range(size)
    ]
    return pack(Batch.of(rows), compress=size > 3).value or b""


def compression(entry: Entry) -> int:
    return pulsar_entries.COMPRESSIONS[entry[0][1] % 3]


def packed(messages: Sequence[Message], log: Log, entry: Entry) -> bytes:
    """Messages packed as those of an entry, in a way that depends on its place."""
    first = log.events[entry[1][0]]
    if first.unreadable:
        return messages[0].value or b""
    batched = first.position.batch != NO_INDEX
    broker_data = b"\x08\x05" if entry[0][0] % 2 else b""
    return pulsar_entries.entry(messages, batched=batched, compression=compression(entry), broker_data=broker_data)


def passed(log: Log, entry: Entry) -> str:
    """The command that passes an entry to the rules."""
    return f"entry {spaced(*entry[0], NO_INDEX)} {word(packed(messages_of(log, entry), log, entry))}"


def check_delivered(answer: str, log: Log, entry: Entry, hidden: Sequence[int]) -> None:
    """Assert that an answer to `delivered` is what plain consumers have to get of an entry."""
    messages = messages_of(log, entry)
    sizes = [rows_of(log.messages[index], log.events[index].position) for index in entry[1]]
    if not any(hidden) or [*hidden] == sizes:
        assert answer in (("hidden",) if any(hidden) else ("remembered", "unchanged"))
        return
    found = pulsar_entries.parts(content(answer), compression(entry))
    if len(sizes) == 1:
        kept = [_without_first(hidden[0], messages[0], found.payload)]
    else:
        kept = [message for message, rows in zip(messages, hidden, strict=True) if not rows]
    assert found == pulsar_entries.parts(packed(kept, log, entry), compression(entry))


def _without_first(hidden: int, message: Message, value: bytes) -> Message:
    """The message of a record set without its first records, which has this value."""
    count = number(message.properties[RECORDS], MAX_SET_RECORDS) - hidden
    changed = {**message.properties, RECORDS: str(count)}
    if SEQ in changed:
        changed[SEQ] = str(int(changed[SEQ]) + hidden)
    found = message._replace(value=value, properties=changed)
    assert [*unpack(Position(0, 0), found)] == [*unpack(Position(0, 0), message)][hidden:]
    return found


def rows_of(message: Message, position: Position) -> int:
    text = message.properties.get(RECORDS)
    return max(1, number(text, MAX_SET_RECORDS)) if text is not None and position.batch == NO_INDEX else 1


class Python:
    """An owner's buffer, which says what the rules in Java have to say after each entry."""

    def __init__(self, log: Log, segment_size: int = 3) -> None:
        self.log = log
        self.entries = entries_of(log)
        self.owner = Owner(segment_size)
        self.stopped = False
        self.decided = 0
        """Entries that are decided whole."""

    def entry(self, number_: int) -> str:
        """Apply an entry; the answer that Java has to give."""
        indexes = self.entries[number_][1]
        buffer = self.owner.buffer
        if self.log.events[indexes[0]].unreadable:
            self.stopped = True
        if not self.stopped:
            messages = [self.log.messages[index] for index in indexes]
            try:
                buffer.apply_batch(place(messages, [self.log.events[index].position for index in indexes]))
            except ProtocolStopped:
                self.stopped = True
            for segment in buffer.segments.take_sealed():
                self.owner.segments[segment.number] = segment
        return self.state(number_ + 1)

    def state(self, passed_entries: int) -> str:
        """The answer after so many entries, of which those newly decided are listed."""
        buffer, decided = self.owner.buffer, self.decided
        limit = buffer.max_read_position
        while limit is not None and self.decided < passed_entries:
            if self.log.events[self.entries[self.decided][1][-1]].position > limit:
                break
            self.decided += 1
        bound = (*self.entries[self.decided - 1][0], NO_INDEX) if self.decided else (-1, -1, NO_INDEX)
        oldest = buffer.ongoing.oldest()
        return " ".join(
            [
                ",".join(map(str, bound)),
                "-" if oldest is None else str(oldest.txn),
                str(buffer.counters.damaged),
                "stopped" if self.stopped else "runs",
                "-",
                ",".join(map(str, self.hidden(decided, self.decided))) or "-",
            ]
        )

    def hidden(self, start: int, stop: int) -> list[int]:
        """How many rows of each message of some decided entries are hidden, in ledgers that exist."""
        first_ledger = self.owner.buffer.first_ledger
        chosen = [indexes for (ledger, _), indexes in self.entries[start:stop] if ledger >= first_ledger]
        indexes = [index for some in chosen for index in some]
        hidden: list[int] = []
        for _, of_ledger in groupby(indexes, lambda index: self.log.events[index].position.ledger):
            rows = [*of_ledger]
            messages = [self.log.messages[row] for row in rows]
            positions = [self.log.events[row].position for row in rows]
            placed = place(messages, positions)
            counts = visible_counts(placed, self.owner.buffer, decided=True)
            removed = removed_rows(placed.messages)
            if removed is not None:
                counts[removed] = 0
            sizes = map(rows_of, messages, positions)
            hidden += [size - count for size, count in zip(sizes, counts.tolist(), strict=True)]
        return hidden

    def everything(self) -> str:
        """The answer to `all`: what is hidden of all that is decided."""
        return ",".join(["-", *map(str, self.hidden(0, self.decided))])


def compared(answers: Iterable[str], expected: Iterable[str], commands: Sequence[str]) -> None:
    """Assert that both say the same; the commands are shown if not."""
    for number_, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert answer == wanted, f"answer {number_}: Java says {answer}, Python {wanted}, of\n" + "\n".join(commands)
