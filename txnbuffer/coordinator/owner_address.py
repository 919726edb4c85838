"""The address of the newest owner of a decision log, as it stands in a property of the topic.

    EPOCH ADDRESS [no-topics]

The epoch of its `owner` entry in decimal digits, a space, and HOST:PORT, or nothing if it has no address; then, if
clients may not create missing topics, a space and that word. The owner writes it once its entry is durable. It may be
missing or out of date, so a client that can't connect there reads the log.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NOTE = re.compile(r"([1-9][0-9]{0,18}) (\S+:[0-9]+|)( no-topics)?", re.ASCII)


class OwnerAddress(NamedTuple):
    """`makes_topics`: clients may create missing topics."""

    epoch: int
    address: str
    makes_topics: bool = True


def encode_owner_address(owner: OwnerAddress) -> str:
    return f"{owner.epoch} {owner.address}{'' if owner.makes_topics else ' no-topics'}"


def decode_owner_address(text: str) -> OwnerAddress | None:
    """None for any other text, for example that of a later version."""
    found = _NOTE.fullmatch(text)
    return None if found is None else OwnerAddress(int(found[1]), found[2], found[3] is None)
