"""The resume token of a change stream: a reader stores it with its data and continues from it.

Its text is one JSON object, in this order, without spaces, all members present:

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
