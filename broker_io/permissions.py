"""The permissions that files must have whose content others must not change, or not even read

New files of a log are closed to others, see `Disk`. Those of older releases are not: `exposure` says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from broker_io.environment import Disk, current

LOOSE = stat.S_IWGRP | stat.S_IWOTH
"""Permissions that no such file may have: others could change it."""
LOOSE_SECRET = LOOSE | stat.S_IRWXO
"""Permissions that no secret may have: all users of the machine could read it."""


def read_checked(path: str, *, secret: bool) -> bytes:
    """The content of a file. Raises PermissionError, which says what to do, for loose permissions; other OSErrors."""
    loose = current().disk.permissions(path) & (LOOSE_SECRET if secret else LOOSE)
    if loose:
        reads, writes = loose & stat.S_IROTH, loose & LOOSE
        may = "read and change" if reads and writes else "change" if writes else "read"
        remedy = "chmod o-rwx,g-w" if secret else "chmod go-w"
        raise PermissionError(errno.EACCES, f"other users may {may} it: {remedy} {path}", path)
    return current().disk.read(path)


def exposure(disk: Disk, directory: str) -> str | None:
    """A sentence that says what to do if other users of the machine may read what is in the directory of a log."""
    if disk.permissions(directory) & stat.S_IRWXO:
        for name in disk.list(directory):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if disk.permissions(os.path.join(directory, name)) & stat.S_IRWXO:
                    return (
                        f"other users of this machine may read the log in {directory}: chmod -R go-rwx {directory}, or "
                        "only o-rwx if its group may read it"
                    )
    return None
