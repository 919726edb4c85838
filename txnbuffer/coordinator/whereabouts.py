"""Where the newest owner of a decision log is: the note that it leaves beside the log, for clients in a hurry.

    EPOCH ADDRESS

The epoch of its `owner` entry in decimal digits, a space, and HOST:PORT, or nothing where it tells no address. It is
written once that entry is durable. It may be missing or out of date: whoever gets nowhere with it reads the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NOTE = re.compile(r"([1-9][0-9]{0,18}) (\S+:[0-9]+|)", re.ASCII)


class Whereabouts(NamedTuple):
    epoch: int
    address: str


def encode_note(whereabouts: Whereabouts) -> str:
    return f"{whereabouts.epoch} {whereabouts.address}"


def decode_note(text: str) -> Whereabouts | None:
    """None for what is no such note, as one of a version that comes later."""
    found = _NOTE.fullmatch(text)
    return None if found is None else Whereabouts(int(found[1]), found[2])
