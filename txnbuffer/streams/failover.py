"""The failover log of a topic, the rollback point of a reader, and the resume token that says how far a reader is.

The failover log has the versions of the topic's history, and where each began.

A version is `(uuid, seqno)`: from `seqno` on, the history is that of `uuid`. A new version begins whenever the history
may have branched, so seqnos above it may be other mutations than before. The log is ordered newest first and has 25
versions; a reader that needs an older one starts over.

The owner of an embedded log begins a version at every takeover, as the log may have been restored from an older copy:
readers of the lost log then have versions that this log never had. It keeps up to 1,000 versions, of which readers get
the newest 25.

`rollback_point` returns the seqno to which a reader must go back before it can continue. The reader has everything up
to `start`, which is within the snapshot `[snapshot_start, snapshot_end]`: its data equaled the topic at
`snapshot_start`, and will at `snapshot_end`, once the snapshot is complete. `versions` are those of its data, newest
first.

1. A reader without data continues, unless it requires its version.
2. Deletions up to the purge seqno may be missing in the log. A reader that may have missed one starts over; one that
   sends the same purge seqno had everything when it received that, and has missed none.
3. The newest of its versions that the server knows determines the common history: up to the end of that version here,
   and up to the end of it at the reader. Without such a version, the reader starts over.
4. A reader that has begun a snapshot without receiving any of it is treated as having a complete one that ends at
   `start`.
5. If its snapshot is within the common history, it continues.
6. If it has all of its snapshot, its data is complete at `start`.
7. It goes back to the end of the common history, or to the start of the snapshot that it can't complete, if that is
   lower.

The result is always below `start`, so a reader that obeys never gets the same result again.

A reader stores its resume token with its data and continues from it. Its text is one JSON object, in this order,
without spaces, all members present:

- `v`           1, the version of this format
- `cluster`     the id of the topic's cluster; "" before the first answer
- `topic`       its name
- `incarnation` the id of the topic, which a new topic of the same name does not share; "" before the first answer
- `versions`    `[uuid, seqno]` pairs, newest first, at most 25: the versions of the reader's history
- `seqno`       the reader has all mutations up to it
- `snapshot`    `[start, end]`, `start <= seqno <= end`: the data was complete at `start`, and is again at `end`
- `purge`       the purge seqno received when the stream was last opened

Numbers are 0 to 2^63 - 1, a uuid 1 to 2^48 - 1. Anything else is rejected; a reader then has to start over.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from txnbuffer.errors import UnreadableToken

MAX_VERSIONS = 25
"""Maximum number of versions that a reader gets and stores."""
MAX_KEPT = 1000
"""Maximum number of versions that the owner of a topic keeps."""
MAX_UUID = 2**48 - 1
MAX_SEQNO = 2**63 - 1


class Version(NamedTuple):
    """A version of a topic's history: a random number from 1 to 2^48 - 1, and the seqno at which it began."""

    uuid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """1 to 1,000 versions, newest first, with descending or equal seqnos and distinct uuids.

    Raises ValueError otherwise.
    """

    versions: tuple[Version, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.versions) <= MAX_KEPT:
            raise ValueError(f"a failover log must have 1 to {MAX_KEPT} versions, got {len(self.versions)}")
        for version in self.versions:
            if not is_sound(version):
                raise ValueError(f"{version.uuid}@{version.seqno} is not a valid version of a failover log")
        for newer, older in itertools.pairwise(self.versions):
            if older.seqno > newer.seqno:
                raise ValueError(f"version {older.uuid}@{older.seqno} is newer than {newer.uuid}@{newer.seqno}")
        if len({version.uuid for version in self.versions}) < len(self.versions):
            raise ValueError("a version occurs twice in a failover log")

    @classmethod
    def initial(cls, uuid: int) -> FailoverLog:
        """The log of a new topic."""
        return cls((Version(uuid, 0),))

    @classmethod
    def sanitised(cls, versions: Iterable[Version], uuid: int) -> FailoverLog:
        """The log of the valid versions of a stored one, newest first; without any, a new log that begins with `uuid`.

        Invalid versions, versions after a newer one, and those whose uuid occurs again further back are dropped.
        """
        kept: list[Version] = []
        for version in versions:
            if is_sound(version) and (not kept or version.seqno <= kept[-1].seqno):
                kept = [other for other in kept if other.uuid != version.uuid]
                kept.append(version)
        return cls(tuple(kept[:MAX_KEPT])) if kept else cls.initial(uuid)

    @property
    def current(self) -> Version:
        return self.versions[0]

    def created(self, uuid: int, seqno: int) -> FailoverLog:
        """The log with a new version from `seqno` on, without those that began above it."""
        rest = dropped_above(self.versions, seqno)
        return FailoverLog((Version(uuid, seqno), *rest[: MAX_VERSIONS - 1]))

    def taken_over(self, uuid: int, seqno: int) -> FailoverLog:
        """The log of a new owner, with its version from `seqno` on, the newest mutation that it found.

        Versions that began at `seqno` have no mutations: all but the oldest are dropped, so that owners which write
        nothing add none. A reader with one of them also has an older one, which ends there.
        """
        *newer, oldest = self.versions
        rest = [version for version in newer if version.seqno < seqno][: MAX_KEPT - 2]
        return FailoverLog((Version(uuid, seqno), *rest, oldest))

    @property
    def for_readers(self) -> FailoverLog:
        """The versions that readers get."""
        return FailoverLog(self.versions[:MAX_VERSIONS])

    def ranges(self) -> Iterator[tuple[Version, int]]:
        """Each version, oldest first, with its last seqno: the start of the next newer one, or the highest possible."""
        oldest_first = self.versions[::-1]
        return zip(oldest_first, (*(version.seqno for version in oldest_first[1:]), MAX_SEQNO), strict=True)

    def end_of(self, uuid: int, high_seqno: int) -> int | None:
        """The end of a version: the start of the next newer one, or the high seqno; None for an unknown version."""
        end = high_seqno
        for version in self.versions:
            if version.uuid == uuid:
                return end
            end = version.seqno
        return None


def is_sound(version: Version) -> bool:
    return 1 <= version.uuid <= MAX_UUID and 0 <= version.seqno <= MAX_SEQNO


def dropped_above(versions: tuple[Version, ...], seqno: int) -> tuple[Version, ...]:
    """The versions that began at or below `seqno`."""
    return tuple(version for version in versions if version.seqno <= seqno)


def rollback_point(
    start: int,
    snapshot_start: int,
    snapshot_end: int,
    versions: tuple[Version, ...],
    log: FailoverLog,
    high_seqno: int,
    *,
    purge_seqno: int = 0,
    known_purge_seqno: int = 0,
    strict: bool = False,
) -> int | None:
    """The highest seqno to which the client can go back, None if it can continue."""
    if start == 0 and not (strict and versions):
        return None
    if 0 < start < purge_seqno and known_purge_seqno != purge_seqno:
        return 0
    common = common_seqno(versions, log, high_seqno)
    if common is None:
        return 0
    if start == snapshot_start:
        snapshot_end = start
    if snapshot_end <= common:
        return None
    if start == snapshot_end:
        snapshot_start = start
    return min(common, snapshot_start)


def common_seqno(versions: tuple[Version, ...], log: FailoverLog, high_seqno: int) -> int | None:
    """The end of the common history of the log and `versions`, newest first; None if they have no common version."""
    left = MAX_SEQNO
    for version in versions:
        end = log.end_of(version.uuid, high_seqno)
        if end is not None:
            return min(end, left)
        left = min(left, version.seqno)
    return None


FORMAT = 1
_MEMBERS = ("v", "cluster", "topic", "incarnation", "versions", "seqno", "snapshot", "purge")


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """A place in a topic's history: `seqno`, in the snapshot `[snapshot_start, snapshot_end]`, on `versions`.

    Only if `complete`, the reader's data equals the topic at `seqno`. Raises ValueError for invalid numbers.
    """

    topic: str
    cluster: str = ""
    incarnation: str = ""
    versions: tuple[Version, ...] = ()
    seqno: int = 0
    snapshot_start: int = 0
    snapshot_end: int = 0
    purge_seqno: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.snapshot_start <= self.seqno <= self.snapshot_end <= MAX_SEQNO:
            raise ValueError(f"seqno {self.seqno} is not within [{self.snapshot_start}, {self.snapshot_end}]")
        if not 0 <= self.purge_seqno <= MAX_SEQNO:
            raise ValueError(f"purge seqno must be 0 to 2^63 - 1, got {self.purge_seqno}")
        if len(self.versions) > MAX_VERSIONS or not all(map(is_sound, self.versions)):
            raise ValueError("its versions must be up to 25 versions of a failover log")

    @property
    def complete(self) -> bool:
        """Whether the reader has no partial snapshot."""
        return self.seqno in (self.snapshot_start, self.snapshot_end)

    @property
    def uuid(self) -> int:
        """The uuid of the newest version of the reader's history, 0 if it has none yet."""
        return self.versions[0].uuid if self.versions else 0

    def entered(self, snapshot_end: int) -> ResumeToken:
        """A snapshot begins, or the end of the partial one moves."""
        start = self.seqno if self.complete else self.snapshot_start
        return replace(self, snapshot_start=start, snapshot_end=snapshot_end)

    def reached(self, seqno: int) -> ResumeToken:
        """The reader has the mutations of the snapshot up to `seqno`."""
        return replace(self, seqno=seqno)

    def completed(self, seqno: int) -> ResumeToken:
        """The reader has the whole snapshot, and with it everything up to `seqno`."""
        return replace(self, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)

    def rolled_back(self, seqno: int) -> ResumeToken:
        """The reader has rolled its data back to `seqno`, where it was complete.

        Versions that began above it are removed. At 0 all are removed, else a server that requires a known one would
        roll the reader back to 0 again and again. The data may lack deletions purged since, so `purge_seqno` is reset.
        """
        versions = dropped_above(self.versions, seqno) if seqno else ()
        return replace(self.completed(seqno), versions=versions, purge_seqno=0)

    def __str__(self) -> str:
        values = (
            *(FORMAT, self.cluster, self.topic, self.incarnation, self.versions, self.seqno),
            *((self.snapshot_start, self.snapshot_end), self.purge_seqno),
        )
        return json.dumps(dict(zip(_MEMBERS, values, strict=True)), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> ResumeToken:
        """The token with the text `text`. Raises UnreadableToken."""
        try:
            return _read(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise UnreadableToken(f"not a resume token ({error}); start the stream from its beginning") from None


def _read(members: Any) -> ResumeToken:
    if not isinstance(members, dict) or "v" not in members:
        raise ValueError("it is not a JSON object with a version")
    if members["v"] != FORMAT:
        raise ValueError(f"it has version {members['v']!r}, this release reads {FORMAT}")
    if set(members) != set(_MEMBERS):
        raise ValueError(f"its members are not {', '.join(_MEMBERS)}")
    texts = members["topic"], members["cluster"], members["incarnation"]
    if not all(isinstance(text, str) for text in texts) or not isinstance(members["versions"], list):
        raise ValueError("a member has the wrong type")
    for text in texts:
        text.encode()  # JSON can name surrogates, which nothing that carries a token can write
    versions = tuple(Version(*map(_number, pair)) for pair in members["versions"])
    start, end = map(_number, members["snapshot"])
    return ResumeToken(*texts, versions, _number(members["seqno"]), start, end, _number(members["purge"]))


def _number(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value
