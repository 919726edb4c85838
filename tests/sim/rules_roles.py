"""Rules about what the roles of a simulated world did: relays, sinks, groups, late readers, rivals, branches.

Each rule is a promise of the documentation, and yields a sentence for each violation.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from sim.branch_apps import BranchCommit
from sim.checker import Topics, progress
from sim.copy_apps import Rows
from sim.history import Attempt, Fate, Shown
from sim.readers import Slice, Stretch


def newest_of_keys(records: Iterable[Shown]) -> dict[bytes | None, Shown]:
    """The newest record of each key, without positions, as change streams and tables have them."""
    return {record.key: record._replace(position=None) for record in records}


def relayed(source: Sequence[Shown], target: Sequence[Shown], *, trimmed: bool = False) -> Iterator[str]:
    """The target of a relay has the committed records of the source, each once and in order; or the last ones."""
    wanted, found = ([(record.key, record.value) for record in records] for records in (source, target))
    if trimmed:
        wanted = wanted[max(len(wanted) - len(found), 0) :]
    if found != wanted:
        pairs = enumerate(itertools.zip_longest(wanted, found))
        at, (right, wrong) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        yield f"a relay wrote {len(found)} records for {len(wanted)}, and no. {at + 1} is {wrong} instead of {right}"


def stored(rows: Rows, records: Sequence[Shown]) -> Iterator[str]:
    """A sink that says that it is complete has the newest change of each key as of its seqno, and nothing else."""
    wanted = newest_of_keys(records[: rows.seqno])
    if rows.seqno > len(records):
        yield f"{rows.sink} is at seqno {rows.seqno} of {rows.topic}, which has {len(records)}"
    elif rows.complete and rows.rows != wanted:
        keys = [key for key in wanted.keys() | rows.rows.keys() if wanted.get(key) != rows.rows.get(key)]
        pairs = {key: (rows.rows.get(key), wanted.get(key)) for key in sorted(keys, key=repr)}
        yield f"{rows.sink} at seqno {rows.seqno} of {rows.topic} has, and should have: {pairs}"


def each_once(who: str, changes: Sequence[Shown], records: Sequence[Shown]) -> Iterator[str]:
    """A sink was given each change at most once, in order, as it is in the log."""
    newest = 0
    for change in changes:
        seqno = change.seqno or 0
        found = records[seqno - 1]._replace(position=None) if 0 < seqno <= len(records) else None
        if found != change:
            yield f"{who} stored {change}, and seqno {seqno} is {found}"
            return
        if seqno <= newest:
            yield f"{who} stored {change} after seqno {newest}"
            return
        newest = seqno


def stretched(
    stretch: Stretch, records: Sequence[Shown], may_purge: Callable[[Shown], bool] = lambda record: False
) -> Iterator[str]:
    """A stream that starts in the middle shows the newest change of each key after its start, as it is in the log.

    It may leave out a deletion that may be purged, if it shows nothing older of its key either.
    """
    name = f"{stretch.follower}, from {stretch.start} of {stretch.topic},"
    for seqno, change in sorted(stretch.changes.items()):
        found = records[seqno - 1]._replace(position=None) if seqno <= len(records) else None
        if found != change:
            yield f"{name} was shown {change}, and seqno {seqno} is {found}"
            return
    if stretch.ended and stretch.to is not None and stretch.seqno < stretch.to:
        yield f"{name} ended at {stretch.seqno}, before {stretch.to}"
    if stretch.seqno > len(records):
        yield f"{stretch.follower} is at seqno {stretch.seqno} of {stretch.topic}, which has {len(records)}"
    elif stretch.complete:
        data = newest_of_keys(change for _, change in sorted(stretch.changes.items()))
        after = records[stretch.start : stretch.seqno]
        purged = {record.key for record in {record.key: record for record in after}.values() if may_purge(record)}
        wanted = {key: one for key, one in newest_of_keys(after).items() if key in data or key not in purged}
        if data != wanted:
            missing = {key: value for key, value in wanted.items() if data.get(key) != value}
            more = {key: value for key, value in data.items() if wanted.get(key) != value}
            yield f"{name} lacks {missing}, has too much {more} at seqno {stretch.seqno}"


def sliced(
    part: Slice, records: Sequence[Shown], sent: Callable[[Shown], float], may_miss: Callable[[Shown], bool]
) -> Iterator[str]:
    """A reader that starts in the middle shows everything from there on, in order, but for what it may miss.

    `sent`: when a record was first sent. What was sent after a reader had opened at the end is after its start.
    """
    plain = [record._replace(seqno=None) for record in records]
    found = [record._replace(seqno=None) for record in part.records]
    if part.first is not None:
        after = (at for at, record in enumerate(plain) if record.position and record.position >= part.first)
        begin = next(after, len(plain))
    elif found:
        begin = plain.index(found[0]) if found[0] in plain else len(plain)
        late = [record for record in records[:begin] if sent(record) > part.opened and not may_miss(record)]
        if late:
            yield f"{part.reader} opened {part.topic} at its end and was not shown {late}, which were sent later"
    else:
        return
    passed, wrong = progress(found, plain[begin:], may_miss)
    if wrong is not None:
        expected = plain[begin + passed : begin + passed + 1]
        yield f"{part.reader} was shown {found} of {part.topic}, and in the place of {wrong} it has {expected}"


def processed(
    sources: Mapping[str, Sequence[Shown]],
    results: Sequence[Shown],
    rejects: Sequence[Shown],
    source_of: Callable[[bytes], bytes | None],
    kind: Callable[[bytes], str],
) -> Iterator[str]:
    """A group made one result of each record, or put it aside, or skipped it, and kept the order of each topic.

    `kind`: "result", "reject" or "skip", by the value of a record of a source.
    """
    values = {topic: [record.value for record in records] for topic, records in sources.items()}
    found = {"result": [source_of(record.value) for record in results], "reject": [one.value for one in rejects]}
    for name, made in found.items():
        wanted = {topic: [value for value in of if kind(value) == name] for topic, of in values.items()}
        counts, all_made = Counter(value for of in wanted.values() for value in of), Counter(made)
        if counts != all_made:
            yield f"the group made no {name} of {[*(counts - all_made)]}, and too many of {[*(all_made - counts)]}"
        for topic, of in wanted.items():
            inside = set(of)
            if (order := [value for value in made if value in inside]) != of and Counter(order) == Counter(of):
                yield f"the {name}s of {topic} are {order}, and the records {of}"


def fenced(attempts: Sequence[Attempt], topics: Topics, committed: int) -> Iterator[str]:
    """Each number of a producer name was committed by one of its instances, and numbers commit one after another."""
    there = {record.value for records in topics.values() for record in records}
    visible: dict[int, set[str]] = defaultdict(set)
    for attempt in attempts:
        assert attempt.producer is not None
        if any(value in there for values in attempt.writes.values() for value in values):
            visible[attempt.producer[1]].add(attempt.producer[0])
        elif attempt.fate is Fate.COMMITTED:
            yield f"{attempt} committed, and none of its records is visible"
    for number, clients in visible.items():
        if len(clients) > 1:
            yield f"{sorted(clients)} have all committed no. {number}"
    if sorted(visible) != [*range(1, committed + 1)]:
        yield f"the numbers {sorted(visible)} are visible, and the newest committed one is {committed}"


def branched(commits: Sequence[BranchCommit], last: int, topics: Topics) -> Iterator[str]:
    """All branches that one commit of a number named are visible, and no others; each number up to `last` is visible.

    Of each branch by itself, `checker` compares the records and their order.
    """
    visible = {record.value for records in topics.values() for record in records}
    numbers: dict[int, list[BranchCommit]] = defaultdict(list)
    for commit in commits:
        numbers[commit.number].append(commit)
    for number, asked in numbers.items():
        named = dict.fromkeys(branch for commit in asked for branch in commit.branches)
        shown = [branch for branch in named if not visible.isdisjoint(itertools.chain(*branch.writes.values()))]
        committed = [commit for commit in asked if commit.fate is Fate.COMMITTED]
        possible = committed or [commit for commit in asked if commit.fate is not Fate.ABORTED]
        if (shown or committed or number <= last) and not any({*shown} == {*commit.branches} for commit in possible):
            wanted = [[*map(str, commit.branches)] for commit in possible]
            yield f"branches {[*map(str, shown)]} of no. {number} are visible, and its commits named {wanted}"
