"""What the log of a Delta table says of files: those that a run adds, those that a version has, what a commit did.

Of each file it gets the number of records, and the lowest and highest of topic, place and times, by which readers leave
files out; times are rounded outwards to milliseconds, which is what Delta keeps of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction

BOUNDED = (
    "topic", "position.ledger", "position.entry", "seqno", "event_time", "publish_time",
)  # fmt: skip
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def add_action(root: str, path: str, footer: Any) -> AddAction:
    """Adds the Parquet file at a path below `root`, of which pyarrow read the footer."""
    from deltalake.transaction import AddAction

    status = os.stat(os.path.join(root, path))
    stats = {"numRecords": footer.num_rows, **_bounds(footer)}
    return AddAction(path, status.st_size, {}, status.st_mtime_ns // 1_000_000, True, json.dumps(stats))


def files_of(table: DeltaTable) -> dict[str, int | None]:
    """The files of a version, and how many rows each has; None: it does not say."""
    import pyarrow as pa

    actions = pa.table(table.get_add_actions(flatten=True))
    return dict(zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True))


def is_mark(action: Mapping[str, Any], app: str, version: int) -> bool:
    """Whether an action of the log is this application transaction."""
    found = action.get("txn") or {}
    return bool(found.get("appId") == app and found.get("version") == version)


def changes_data(action: Mapping[str, Any]) -> bool:
    """Whether an action of the log adds or removes records, instead of moving them from file to file."""
    files = [found for name in ("add", "remove") if (found := action.get(name)) is not None]
    return any(found.get("dataChange", True) for found in files)


def _bounds(footer: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}}
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    for index, path in enumerate(paths):
        if path not in BOUNDED:
            continue
        parts = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        if any(part is None or not part.has_min_max for part in parts):
            continue
        ends = [_ends(path, part) for part in parts]
        if any(end is None for pair in ends for end in pair):
            continue
        _put(found["minValues"], path, min(low for low, _ in ends))
        _put(found["maxValues"], path, max(high for _, high in ends))
    return found


def _ends(path: str, part: Any) -> tuple[Any, Any]:
    if path.endswith("_time"):
        return _moment(part.min_raw // 1000), _moment(-(-part.max_raw // 1000))
    return part.min, part.max


def _moment(milliseconds: int) -> str | None:
    """A time as Delta writes it, which sorts as text; None before the year 1 and behind the year 9999."""
    try:
        return (EPOCH + milliseconds * MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return None


def _put(found: dict[str, Any], path: str, value: Any) -> None:
    *outer, name = path.split(".")
    for one in outer:
        found = found.setdefault(one, {})
    found[name] = value
