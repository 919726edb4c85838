"""The rules of the broker plug-in in a JVM that reads commands, and what Python says of the same entries."""

from __future__ import annotations

import base64
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from buffer.buffer_driver import Owner
from histories import Log, place

from broker_io.batch import Message
from broker_io.position import NO_INDEX, Position
from broker_plugin.build import SOURCES, TEST_SOURCES, BuildFailed, classpath, compile_into
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.errors import ProtocolStopped
from txnbuffer.protocol import MAX_SET_RECORDS, RECORDS, number, removed_rows

ANSWERED = ("entry", "until", "ordinary", "all", "abort", "read", "resume", "partition", "refusal", "shards")
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


def pairs(properties: Mapping[str, str]) -> list[str]:
    return [f"{word(name)}.{word(text)}" for name, text in properties.items()]


def spaced(*numbers: int) -> str:
    return " ".join(map(str, numbers))


def message_command(position: Position, message: Message) -> str:
    value = "-" if message.value is None else word(message.value)
    return " ".join(["message", spaced(*position), value, *pairs(message.properties)])


def entries_of(log: Log) -> list[Entry]:
    keys = [event.position[:2] for event in log.events]
    return [(key, [*indexes]) for key, indexes in groupby(range(len(keys)), keys.__getitem__)]


def passed(log: Log, entry: Entry) -> Iterator[str]:
    """The commands that pass one entry to the rules; the last one is answered."""
    (ledger, number_), indexes = entry
    for index in indexes:
        yield message_command(log.events[index].position, log.messages[index])
    yield f"entry {spaced(ledger, number_, NO_INDEX)}"


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
