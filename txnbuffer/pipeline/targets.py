"""Where an export goes, by the format that is asked for or found there."""

from __future__ import annotations

import os

from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.delta import DeltaDirectory, kind_at
from txnbuffer.pipeline.exports import DELTA_LOG, LATEST, VERSIONS, ExportDirectory, local_path

PARQUET, DELTA = "parquet", "delta"


def target(path: str, kind: str, form: str) -> ExportDirectory:
    """Where to export to. Raises MissingDependency for Delta without the package deltalake."""
    return DeltaDirectory(path, kind) if form == DELTA else ExportDirectory(path, kind)


def check_apart(export: ExportDirectory, address: str) -> None:
    """Raises InvalidRequest for an export into the directory of the log that it reads, which is the log's own."""
    if address.startswith("file:"):
        log, place = (os.path.realpath(path) for path in (local_path(address), export.path))
        if os.path.commonpath([log, place]) == log:
            raise InvalidRequest(f"{export.path} is in the directory of the log {address}: export to another directory")


def find(path: str) -> ExportDirectory:
    """The export at a path, of whichever kind and format. Raises InvalidRequest if there is none."""
    path = local_path(path)
    if os.path.isdir(os.path.join(path, DELTA_LOG)):
        found: ExportDirectory = DeltaDirectory(path, kind_at(path) or VERSIONS)
    else:
        found = ExportDirectory(path, LATEST if os.path.lexists(os.path.join(path, LATEST)) else VERSIONS)
    if found.last() is None:
        raise InvalidRequest(f"there is no export at {path}: `txnbuf pipeline export` makes one")
    return found
