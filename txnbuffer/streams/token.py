"""The resume token of a change stream: a reader stores it with its data and continues from it.

Its text is one JSON object, in this order, without spaces, all members present:

- `v`           1, the version of this format
- `cluster`     where the topic is, as that says it; "" before the first answer
- `topic`       its name
- `incarnation` which of the topics that had this name; "" before the first answer
- `versions`    `[uuid, seqno]` pairs, newest first, at most 25: the versions of the history that the reader holds
- `seqno`       all mutations up to it are held
- `snapshot`    `[start, end]`, `start <= seqno <= end`: the data was complete at `start`, and is again at `end`
- `purge`       the purge seqno that was told when the stream was last opened

Numbers are 0 to 2^63 - 1, a uuid 1 to 2^48 - 1. Anything else is refused; a reader then has to start over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from txnbuffer.errors import UnreadableToken
from txnbuffer.streams.failover import MAX_SEQNO, MAX_VERSIONS, Version, dropped_above, is_sound

FORMAT = 1
_MEMBERS = ("v", "cluster", "topic", "incarnation", "versions", "seqno", "snapshot", "purge")


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """A place in a topic's history: `seqno`, in the snapshot `[snapshot_start, snapshot_end]`, on `versions`.

    Only where `complete` is the data up to `seqno` what the topic was at that seqno. Raises ValueError where
    the numbers can't be.
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
            raise ValueError(f"{self.purge_seqno} is not a purge seqno, 0 to 2^63 - 1")
        if len(self.versions) > MAX_VERSIONS or not all(map(is_sound, self.versions)):
            raise ValueError("its versions are not up to 25 versions of a failover log")

    @property
    def complete(self) -> bool:
        """No snapshot is held in part."""
        return self.seqno in (self.snapshot_start, self.snapshot_end)

    @property
    def uuid(self) -> int:
        """The version of history that the reader follows, 0 if it follows none yet."""
        return self.versions[0].uuid if self.versions else 0

    def entered(self, snapshot_end: int) -> ResumeToken:
        """A snapshot begins, or the end of the one that is held in part moves."""
        start = self.seqno if self.complete else self.snapshot_start
        return replace(self, snapshot_start=start, snapshot_end=snapshot_end)

    def reached(self, seqno: int) -> ResumeToken:
        """Mutations of the snapshot are held up to a seqno."""
        return replace(self, seqno=seqno)

    def completed(self, seqno: int) -> ResumeToken:
        """All of the snapshot is held: nothing else happened up to a seqno."""
        return replace(self, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)

    def rolled_back(self, seqno: int) -> ResumeToken:
        """The data is again what it was when it was complete at a seqno.

        Versions that began above it are not the reader's any more. One that holds nothing holds no version
        either: a server that insists on a known one would else send it back to 0 for ever. Data of then may
        lack deletions that were forgotten since, whatever purge seqno was told later.
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
        """Read what `str` gave. Raises UnreadableToken."""
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
