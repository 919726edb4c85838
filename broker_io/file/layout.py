"""Where the files of an embedded log stand.

    DIR/lock                                      locked by the owner; holds its pid as text
    DIR/manifest                                  which files count, and how far (see manifest.py)
    DIR/manifest.new                              a manifest that is being written
    DIR/journal-<n>                               what was appended since the last checkpoint (journal.py)
    DIR/topics/<topic>/<ledger>-<generation>.log    one ledger of a topic: blocks, nothing else (segment.py)
    DIR/topics/<topic>/<ledger>-<generation>.index  sparse index of it, may be missing (index.py)

Topics stand under their numbers; names are in the manifest only, so any name suits any file system. What
the manifest does not name is a leftover of something that was not finished, and the next owner removes it.
"""

from __future__ import annotations

import re

from broker_io.environment import Disk

LOCK = "lock"
MANIFEST = "manifest"
NEW_MANIFEST = "manifest.new"
TOPICS = "topics"

_JOURNAL = re.compile(r"journal-(0|[1-9]\d*)")
_FIRST_JOURNAL = "journal-1"


def join(directory: str, *names: str) -> str:
    return "/".join((directory.rstrip("/") or "", *names))


def journal_path(directory: str, number: int) -> str:
    return join(directory, f"journal-{number}")


def topic_path(directory: str, topic: int) -> str:
    return join(directory, TOPICS, str(topic))


def segment_path(directory: str, topic: int, ledger: int, generation: int) -> str:
    return join(directory, TOPICS, str(topic), f"{ledger}-{generation}.log")


def index_path(segment: str) -> str:
    """The path of the index that belongs to the segment of that path."""
    return segment.removesuffix(".log") + ".index"


def is_ours(name: str) -> bool:
    """Whether the root of a log may hold a file or directory of this name."""
    return name in (LOCK, MANIFEST, NEW_MANIFEST, TOPICS) or _JOURNAL.fullmatch(name) is not None


def may_be_unfinished(names: list[str]) -> bool:
    """Whether a directory without a manifest holds nothing but the beginnings of a log that was being made."""
    return set(names) <= {LOCK, NEW_MANIFEST, _FIRST_JOURNAL}


def remove_leftovers(disk: Disk, directory: str, journal: int, segments: dict[int, set[str]]) -> None:
    """Remove what a manifest does not name: it keeps one journal, and per topic number these segment files."""
    for name in disk.list(directory):
        if name == NEW_MANIFEST or (_JOURNAL.fullmatch(name) and name != f"journal-{journal}"):
            disk.remove(join(directory, name))
    if not disk.exists(join(directory, TOPICS)):
        return
    kept = {str(topic): files for topic, files in segments.items()}
    for topic in disk.list(join(directory, TOPICS)):
        named = kept.get(topic, set())
        for name in disk.list(join(directory, TOPICS, topic)):
            if name not in named and name.removesuffix(".index") + ".log" not in named:
                disk.remove(join(directory, TOPICS, topic, name))
