"""Setting aside what a directory has, so that an empty store can take its place

    DIR/aside-<token>/                the files of a former store, as they were: a directory that can be read

A member does this when a forced promotion of the other one has dropped records that it had applied. The manifest of the
empty store replaces the one of the former store first. Then the files are moved, and the manifest of the former store
gets its name in the directory last. So an aside directory with `manifest.new` and without a manifest is not complete:
the next opening moves what is left, or removes it if the former store is still in place.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress

from broker_io.environment import Disk, read_file
from broker_io.errors import Damaged
from broker_io.filelog.log import layout
from broker_io.filelog.log.layout import Manifest, decode_manifest, join, replace_manifest

_NAME = re.compile("aside-[0-9a-f]+")
_JOURNAL = re.compile(r"journal-(\d+)")


def set_aside(disk: Disk, directory: str, empty: Manifest, token: str) -> None:
    """Replace the manifest by that of an empty store, and move the files of the former one, which is closed.

    The journal of the empty store is there already; its number is above all others. Raises OSError.
    """
    aside = join(directory, f"aside-{token}")
    disk.make_directory(aside)
    disk.sync_directory(directory)
    with closing(disk.open(join(directory, layout.MANIFEST))) as manifest:
        text = read_file(manifest)
    with closing(disk.open(join(aside, layout.NEW_MANIFEST), write=True, create=True)) as file:
        file.truncate(0)
        file.write(0, [text])
        file.sync()
    disk.sync_directory(aside)
    replace_manifest(disk, directory, empty)
    _move(disk, directory, aside, empty.journal)


def finish_aside(disk: Disk, directory: str) -> None:
    """Finish what a crash has interrupted, before the log is opened. Raises UnsupportedFormat, OSError."""
    for name in disk.list(directory) if disk.exists(join(directory, layout.MANIFEST)) else []:
        aside = join(directory, name)
        if not _NAME.fullmatch(name) or disk.exists(join(aside, layout.MANIFEST)):
            continue
        new = join(aside, layout.NEW_MANIFEST)
        current = _read(disk, join(directory, layout.MANIFEST))
        former = _read(disk, new) if disk.exists(new) else None
        if current is not None and former is not None and former.pair.store != current.pair.store:
            _move(disk, directory, aside, current.journal)
        else:
            disk.remove(new)
            disk.sync_directory(aside)


def _read(disk: Disk, path: str) -> Manifest | None:
    """A manifest; None if it was not written as a whole."""
    with closing(disk.open(path)) as file, suppress(Damaged):
        return decode_manifest(read_file(file), path)
    return None


def _move(disk: Disk, directory: str, aside: str, journal: int) -> None:
    """Move all segments, and the journals below a number."""
    topics, target = join(directory, layout.TOPICS), join(aside, layout.TOPICS)
    found = disk.list(topics) if disk.exists(topics) else []
    for topic in found:
        disk.make_directory(join(target, topic))
    for path in (target, aside) if found else ():
        disk.sync_directory(path)  # before anything is in it that is nowhere else
    for topic in found:
        _move_all(disk, join(topics, topic), join(target, topic))
    for name in disk.list(directory):
        if (number := _JOURNAL.fullmatch(name)) and int(number[1]) < journal:
            disk.rename(join(directory, name), join(aside, name))
    disk.sync_directory(aside)
    disk.sync_directory(directory)
    disk.rename(join(aside, layout.NEW_MANIFEST), join(aside, layout.MANIFEST))
    disk.sync_directory(aside)


def _move_all(disk: Disk, source: str, target: str) -> None:
    for name in disk.list(source):
        disk.rename(join(source, name), join(target, name))
    disk.sync_directory(target)
    disk.sync_directory(source)
