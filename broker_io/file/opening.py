"""Opening the directory of an embedded log as its owner: lock, manifest, recovery."""

from __future__ import annotations

import contextlib

from broker_io.environment import Disk, Environment
from broker_io.file import layout
from broker_io.file.journal import Journal
from broker_io.file.lock import Lock, take_lock
from broker_io.file.log import FileLog
from broker_io.file.manifest import Manifest, load_manifest, replace_manifest
from broker_io.file.options import Options, disk_error
from broker_io.file.recovery import Recovered, recover


def open_log(environment: Environment, directory: str, options: Options) -> tuple[FileLog, list[str]]:
    """The engine on a directory, made if missing, and what was found amiss in it, a sentence each.

    Raises Locked, ForeignDirectory, UnsupportedFormat, Damaged, DiskFull or DiskFailed.
    """
    disk = environment.disk
    try:
        # Before the lock, so that nothing is written to a directory that is somebody else's.
        load_manifest(disk, directory)
        disk.make_directory(directory)
        lock = take_lock(environment, directory)
        try:
            return _open_locked(environment, directory, options, lock)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise disk_error(error, directory, "the log can't be opened; nothing in it was lost") from error


def _sync_names(disk: Disk, directory: str) -> None:
    """Make the name of a directory durable, and those of all above it, which may be as new."""
    path = directory.rstrip("/") or "/"
    disk.sync_directory(path)
    while path not in ("", ".", "/"):
        path = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        # One that we may not even read we have not made, nor anything in it.
        with contextlib.suppress(PermissionError):
            disk.sync_directory(path)


def _open_locked(environment: Environment, directory: str, options: Options, lock: Lock) -> tuple[FileLog, list[str]]:
    disk = environment.disk
    manifest = load_manifest(disk, directory) or _create(environment, directory)
    recovered = recover(disk, directory, manifest)
    manifest, journal = _settle(environment, directory, manifest, recovered)
    try:
        layout.remove_leftovers(disk, directory, manifest.journal, _segments(manifest))
        return FileLog(environment, directory, options, manifest, journal, lock), recovered.report
    except BaseException:
        journal.close()
        raise


def _create(environment: Environment, directory: str) -> Manifest:
    token = environment.randomness.token
    manifest = Manifest(token(16).hex(), token(8).hex(), 1, 1, ())
    Journal.create(environment.disk, layout.journal_path(directory, 1), 1, token(8)).close()
    _sync_names(environment.disk, directory)
    replace_manifest(environment.disk, directory, manifest)
    return manifest


def _settle(
    environment: Environment, directory: str, manifest: Manifest, recovered: Recovered
) -> tuple[Manifest, Journal]:
    """Make what recovery found the new starting point; nothing is written if nothing had changed."""
    disk, number = environment.disk, manifest.journal
    if not recovered.changed:
        path = layout.journal_path(directory, number)
        return manifest, Journal.open_empty(disk, path, number, recovered.mark)
    number += 1
    journal = Journal.create(disk, layout.journal_path(directory, number), number, environment.randomness.token(8))
    disk.sync_directory(directory)
    manifest = manifest._replace(journal=number, topics=tuple(recovered.topics))
    replace_manifest(disk, directory, manifest)
    return manifest, journal


def _segments(manifest: Manifest) -> dict[int, set[str]]:
    return {
        topic.number: {f"{ledger.ledger}-{ledger.generation}.log" for ledger in topic.ledgers}
        for topic in manifest.topics
    }
