"""Compares the history of a simulated world with the committed records that are left in the end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter

from sim.anomalies import Columns, columns, judge
from sim.history import NEVER, Attempt, Fate, Following, History, Reading, Shown

from txnbuffer.model import TxnId

Topics = Mapping[str, Sequence[Shown]]
"""The committed records of each topic, in the order of its log."""


def violations(history: History, topics: Topics) -> list[str]:
    """A sentence for each violation of a rule; `rules_roles` has the rules of roles."""
    visible = Counter(record.value for records in topics.values() for record in records)
    doubled = {value: count for value, count in visible.items() if count > 1 and not history.may_double(value)}
    found = [f"the topics have {value!r} {count} times" for value, count in doubled.items()]
    found += _numbered(history, topics)
    found += _ids(history)
    found += _transactions(history, topics)
    found += _order(history, topics)
    found += _decided(history, topics)
    for reading in history.readings:
        found += _reading(reading, topics.get(reading.topic, ()), history)
    for following in history.followings:
        found += followed(following, topics.get(following.topic, ()), history)
    transactions, names = dependencies(history, topics)
    found += [f"anomaly {anomaly.named(names)}" for anomaly in judge(transactions)]
    return found


def dependencies(history: History, topics: Topics) -> tuple[Columns, list[str]]:
    """The history for the search of anomalies, and the names of its transactions.

    They are its attempts, one for each record that a consumer group made, and one that reads all topics at the end.

    A topic is a key without an order of versions, which the last transaction reads. Each record that a consumer group
    handled is a key to which its writer appends, and a second key, with an order, for its handling: the group reads
    that key as empty and appends to it. So a record that is handled twice is a lost update.

    Writers read nothing, and a handling reads one record. So of Adya's classes only G1a and G-single can be found.
    """
    numbers = {id(attempt): number for number, attempt in enumerate(history.attempts)}
    aborted = [not attempt.fate.may_be_visible for attempt in history.attempts]
    names = [*map(str, history.attempts)]
    keys: dict[tuple[str, object], int] = {}
    appends: list[tuple[int, int]] = []
    reads: list[tuple[int, int, int]] = []

    def key(kind: str, name: object) -> int:
        return keys.setdefault((kind, name), len(keys))

    def append(kind: str, name: object, value: bytes) -> None:
        writers = sorted(history.writers(value), key=lambda writer: not writer.fate.may_be_visible)
        appends.extend((key(kind, name), numbers[id(writer)]) for writer in writers[:1])

    for topic, records in topics.items():
        for record in records:
            source = history.source(record.value)
            if source is None:
                append("topic", topic, record.value)
            elif not history.may_double(source):
                aborted.append(False)
                names.append(f"the handling of {source!r}")
                append("record", (topic, record.value), source)
                reads += [(key("record", (topic, record.value)), len(aborted) - 1, 1)] * bool(history.writers(source))
                reads.append((key("handled", (topic, source)), len(aborted) - 1, 0))
                appends += [(key("handled", (topic, source)), len(aborted) - 1)]
                appends += [(key("topic", topic), len(aborted) - 1)]
    aborted.append(False)
    names.append("the reader at the end")
    lengths = Counter(number for number, _ in appends)
    reads += [(number, len(aborted) - 1, lengths[number]) for (kind, _), number in keys.items() if kind == "topic"]
    return columns(aborted, appends, reads, [kind == "handled" for kind, _ in keys]), names


def _numbered(history: History, topics: Topics) -> Iterator[str]:
    """Seqnos count the records of a topic, and positions grow."""
    for reading in history.readings if history.numbered else ():
        if None in {record.seqno for record in reading.records}:
            yield f"{reading.reader} showed records of {reading.topic} without seqnos: {reading.records}"
    for topic, records in topics.items():
        numbers = [record.seqno for record in records]
        unnumbered = not history.numbered and numbers == [None] * len(numbers)
        if numbers != [*range(1, len(numbers) + 1)] and not unnumbered:
            yield f"the seqnos of {topic} do not count its records: {numbers}"
        positions = [record.position for record in records if record.position is not None]
        if any(second <= first for first, second in pairwise(positions)):
            yield f"the positions of {topic} do not grow: {positions}"


def _ids(history: History) -> Iterator[str]:
    """No two transactions have one id, whatever was lost between them."""
    known: dict[TxnId, Attempt] = {}
    for attempt in history.attempts:
        if attempt.txn is not None and known.setdefault(attempt.txn, attempt) is not attempt:
            yield f"{attempt} and {known[attempt.txn]} have one id"


def _transactions(history: History, topics: Topics) -> Iterator[str]:
    """A committed transaction is there as a whole and in its order, an aborted one not at all."""
    there = {topic: [record.value for record in records] for topic, records in topics.items()}
    numbered: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
    for attempt in history.attempts:
        if attempt.producer is not None:
            numbered[attempt.producer].append(attempt)
        else:
            yield from _end(attempt, [attempt], there)
    for attempts in numbered.values():
        yield from _end(max(attempts, key=lambda attempt: sum(map(len, attempt.writes.values()))), attempts, there)


def _end(attempt: Attempt, attempts: list[Attempt], there: dict[str, list[bytes]]) -> Iterator[str]:
    committed = any(one.fate is Fate.COMMITTED for one in attempts)
    possible = any(one.fate.may_be_visible for one in attempts)
    found = {topic: _in_order(there.get(topic, ()), set(values)) for topic, values in attempt.writes.items()}
    if attempt.doubles:
        found = {topic: [*dict.fromkeys(values)] for topic, values in found.items()}
    whole = all(found[topic] == values for topic, values in attempt.writes.items())
    if committed and not whole:
        yield f"{attempt} sent {dict(attempt.writes)}, and the topics have {found}"
    elif possible and any(found.values()) and not whole:
        yield f"{attempt} is visible in part: it sent {dict(attempt.writes)}, and the topics have {found}"
    elif not possible and any(found.values()):
        yield f"{attempt} must not be visible, and the topics have {found}"


def _in_order(values: Sequence[bytes], wanted: set[bytes]) -> list[bytes]:
    return [value for value in values if value in wanted]


def _order(history: History, topics: Topics) -> Iterator[str]:
    """A transaction that began after another one had committed is after it in each log."""
    for topic, records in topics.items():
        earliest, who = NEVER, ""
        for record in reversed(records):
            for writer in history.writers(record.value):
                if writer.producer is None and writer.first_sent > earliest:
                    yield f"{writer} is before {who} in {topic}, and began after its commit"
                if writer.fate is Fate.COMMITTED and writer.producer is None and writer.ended < earliest:
                    earliest, who = writer.ended, str(writer)


def _decided(history: History, topics: Topics) -> Iterator[str]:
    """What was decided stays decided, at all readers: a commit that was requested later is after that position.

    A reader has been shown a record only if everything up to it was decided.
    """
    for topic, records in topics.items():
        known = history.decided_at.get(topic, ())
        for record in records:
            asked = min((writer.asked for writer in history.writers(record.value)), default=0.0)
            before = bisect_left(known, asked, key=itemgetter(0))
            if before and record.position is not None and record.position <= known[before - 1][1]:
                _, position, who = known[before - 1]
                yield f"{record} of {topic} was committed after {who} knew that all up to {position} is decided"


def progress(
    found: Sequence[Shown], records: Sequence[Shown], may_miss: Callable[[Shown], bool]
) -> tuple[int, Shown | None]:
    """How many records a reader that showed `found` has passed, and the first of these that is not the next record.

    It leaves out only what it may miss. A topic may get numbers later.
    """
    at = 0
    for shown in found:
        while at < len(records) and may_miss(records[at]) and not _same(shown, records[at]):
            at += 1
        if at == len(records) or not _same(shown, records[at]):
            return at, shown
        at += 1
    while at < len(records) and may_miss(records[at]):
        at += 1
    return at, None


def _same(shown: Shown, record: Shown) -> bool:
    return shown in (record, record._replace(seqno=None))


def _skipped(reading: Reading, records: Sequence[Shown]) -> int:
    """The number of records before the first one that a reader showed."""
    first = reading.records[0].position if reading.records else None
    if first is None:
        return 0
    return next((at for at, record in enumerate(records) if record.position == first), 0)


def _reading(reading: Reading, records: Sequence[Shown], history: History) -> Iterator[str]:
    """A reader shows everything that retention and compaction had left, without gaps, as it is in the end."""
    topic, may_miss = reading.topic, partial(history.may_miss, reading.topic)
    begin = _skipped(reading, records)
    left = (record for record in records[:begin] if not may_miss(record))
    kept = [record for record in left if not history.dropped(topic, record, reading.began)]
    if kept:
        yield f"{reading.reader} began {topic} with {reading.records[0]}, after {kept}, which are still there"
        return
    passed, wrong = progress(reading.records, records[begin:], may_miss)
    if wrong is not None:
        found = records[begin + passed] if begin + passed < len(records) else None
        yield f"{reading.reader} was shown {wrong} as record {begin + passed + 1} of {topic}, and it is {found}"


def followed(following: Following, records: Sequence[Shown], history: History) -> Iterator[str]:
    """A stream shows changes as they are in the log.

    It leaves out only what a later change of the key replaced, what retention had dropped when it began, and deletions
    that compaction may have purged, but not if it shows an older change of such a key.
    """
    for seqno, change in sorted(following.changes.items()):
        expected = records[seqno - 1] if seqno <= len(records) else None
        if expected is None or (expected.key, expected.value) != (change.key, change.value):
            yield f"{following.follower} was shown {change} of {following.topic}, and seqno {seqno} is {expected}"
            return
    now = [(following.seqno, following.data)] if following.complete else []
    for seqno, data in [*following.states, *now]:
        newest = {record.key: record for record in records[:seqno]}
        wanted = {
            key: record.value
            for key, record in newest.items()
            if key in data
            or not (
                history.may_purge(following.topic, record) or history.dropped(following.topic, record, following.began)
            )
        }
        if data != wanted or seqno > len(records):
            missing = {key: value for key, value in wanted.items() if data.get(key) != value}
            yield f"{following.follower} lacks {missing} of {following.topic} at seqno {seqno}"
            return


def behind(history: History, topics: Topics) -> Iterator[str]:
    """Readers and followers that were not shown all records yet; only the newest reading of each topic counts."""
    newest = {}
    for reading in history.readings:
        records = topics.get(reading.topic, ())
        begin = _skipped(reading, records)
        passed, _ = progress(reading.records, records[begin:], partial(history.may_miss, reading.topic))
        newest[reading.reader, reading.topic] = begin + passed
    newest |= {(following.follower, following.topic): following.seqno for following in history.followings}
    for (who, topic), count in newest.items():
        if count < len(topics.get(topic, ())):
            yield f"{who} was shown {count} of the {len(topics[topic])} records of {topic}"
