"""Where the newest owner of a decision log is: the note that it leaves beside the log, for clients in a hurry.

    EPOCH ADDRESS [no-topics]

The epoch of its `owner` entry in decimal digits, a space, and HOST:PORT, or nothing where it tells no address; then,
where topics that are missing are not to be made, a space and that word. It is
written once that entry is durable. It may be missing or out of date: whoever gets nowhere with it reads the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NOTE = re.compile(r"([1-9][0-9]{0,18}) (\S+:[0-9]+|)( no-topics)?", re.ASCII)


class Whereabouts(NamedTuple):
    """`makes_topics`: clients may make topics that are missing."""

    epoch: int
    address: str
    makes_topics: bool = True


def encode_note(whereabouts: Whereabouts) -> str:
    return f"{whereabouts.epoch} {whereabouts.address}{'' if whereabouts.makes_topics else ' no-topics'}"


def decode_note(text: str) -> Whereabouts | None:
    """None for what is no such note, as one of a version that comes later."""
    found = _NOTE.fullmatch(text)
    return None if found is None else Whereabouts(int(found[1]), found[2], found[3] is None)
