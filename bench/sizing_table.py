"""The accepted figures of `sizing.`: the file `sizing.toml`, and the tables of docs/sizing.md that are made from it.

Rates and times are those of the machine that the file describes, so all figures are accepted together. Bytes, syncs and
descriptors depend on the machine little.
"""

from __future__ import annotations

import os
import platform
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.calls_table import put
from bench.disk import synced_write_ms
from txnbuffer.config import Config

TABLE = Path(__file__).with_name("sizing.toml")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "sizing.md"
ACCEPT = "make bench ONLY=sizing ARGS=--accept"
BEGIN = f"<!-- Made by bench/sizing_table.py ({{}}): run `{ACCEPT}`, don't edit. -->\n"
END = "<!-- End of what bench/sizing_table.py makes ({}). -->\n"

WAYS = ("file", "service")
IN_FLIGHT = (1, 64, 512)
BYTES = (100, 1000)
LOAD = {"per_s": "transactions/s", "p50_ms": "ms", "p99_ms": "ms", "syncs": "syncs"}
MANY = 100
"""Records of a larger transaction."""
LENGTHS = (10_000, 100_000, 1_000_000)
THINGS = {
    "service": "a service without clients",
    "program": "a program that owns a log (`file:`), with its imports",
    "session": "a connected client that is idle",
    "topic": "a topic",
    "transaction": "an open transaction with a record of 100 bytes",
    "aborted": "an aborted transaction",
    "stream": "a change stream that waits for records",
    "group": "a consumer group with a position on one topic",
}
RATES = (10, 100, 1_000, 10_000)
DAYS = (1, 30)
USE = {"session": 500, "topic": 1_000, "transaction": 10_000, "aborted": 10_000_000, "stream": 500, "group": 100}
"""The load of the example, in things that a service has."""
BOUNDS = {
    "service.max_clients": "connected clients",
    "service.max_connections": "connections, each with a descriptor",
    "service.client_bytes": "bytes of one client that are not on the disk yet",
    "service.total_bytes": "such bytes of all clients",
    "transactions.max_open_session": "open transactions of one client, with ids that it has reserved",
    "transactions.max_open": "open transactions of all clients, with reserved ids",
    "transactions.timeout": "seconds that a transaction is open, unless it has a timeout of its own",
    "streams.memory_bytes": "bytes of changes in memory for change streams",
    "streams.max_connections": "connections of change streams",
    "streams.max_streams": "change streams of one connection",
    "log.compaction_bytes": "bytes of keys while a compaction runs",
    "log.watermark_bytes": "bytes that stay free on the disk: below them, writes are refused",
    "retention.bytes": "bytes of one topic; 0: no limit",
    "retention.seconds": "age of records; 0: no limit",
}
"""What each setting bounds."""

Figures = Mapping[str, float]


def accepted() -> tuple[dict[str, str], dict[str, float]]:
    """The description of the machine, and figure → value."""
    found = tomllib.loads(TABLE.read_text()) if TABLE.exists() else {"machine": {}, "figures": {}}
    return found["machine"], found["figures"]


def machine() -> dict[str, str]:
    """What the rates depend on."""
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{len(os.sched_getaffinity(0))} cores, {processor[1] if processor else platform.machine()}",
        "memory": f"{memory:.0f} GiB",
        "synced write of a page": f"{synced_write_ms(100):.2g} ms",
        "software": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
    }


def write(values: Figures) -> None:
    """Accept all figures, which were measured on this machine. Raises ValueError if some are missing."""
    if missing := sorted({*accepted()[1]} - {*values}):
        raise ValueError(f"all figures are accepted together, and {', '.join(missing)} were not measured: run {ACCEPT}")
    described = machine()
    lines = [f"# Accepted figures, written by `{ACCEPT}`.", "", "[machine]"]
    lines += [f'"{name}" = "{text}"' for name, text in described.items()]
    lines += ["", "[figures]", *(f'"{name}" = {value:g}' for name, value in sorted(values.items()))]
    TABLE.write_text("\n".join([*lines, ""]))
    for section, text in sections(described, values).items():
        put(PAGE, BEGIN.format(section), text, END.format(section))


def sections(described: Mapping[str, str], figures: Figures) -> dict[str, str]:
    """The tables of the page, by the names in their markers."""
    made: dict[str, Callable[[Figures], list[list[str]]]] = {
        "load": load, "disk": disk, "days": days, "memory": memory, "example": example, "recovery": recovery,
    }  # fmt: skip
    machine_rows = [["", "measured on"], *([name, text] for name, text in described.items())]
    fixed = {"machine": _table(machine_rows), "bounds": _table(bounds())}
    return fixed | {name: _table(rows(figures)) for name, rows in made.items()}


def bounds() -> list[list[str]]:
    """The settings with their defaults."""
    rows, config = [["setting", "default", "bounds"]], Config()
    for name, bounded in BOUNDS.items():
        section, key = name.split(".")
        rows.append([f"`{name}`", f"{getattr(getattr(config, section), key):,.10g}", bounded])
    return rows


def load(figures: Figures) -> list[list[str]]:
    rows = [["log", "in flight", "bytes", "transactions/s", "ms (p50)", "ms (p99)", "syncs per transaction"]]
    for way in WAYS:
        for in_flight in IN_FLIGHT:
            for size in BYTES:
                shown = [_short(figures[f"sizing.load.{way}.{in_flight}.{size}.{what}"]) for what in LOAD]
                rows.append([f"`{way}`", str(in_flight), str(size), *shown])
    return rows


def disk(figures: Figures) -> list[list[str]]:
    rows = [["records of a transaction", "in flight", "bytes of a value", "bytes per transaction", "bytes per record"]]
    for records, in_flight in (*((1, number) for number in IN_FLIGHT), (MANY, 1)):
        for size in BYTES:
            each = figures[f"sizing.disk.{in_flight}.{records}.{size}"]
            rows.append([str(records), str(in_flight), str(size), _short(each), _short(each / records)])
    return rows


def days(figures: Figures) -> list[list[str]]:
    """The disk that records need, from the bytes of a record in the transactions of `disk`."""
    rows = [["records/s", *(f"{size} bytes, {count} d" for size in BYTES for count in DAYS)]]
    for rate in RATES:
        sizes = [
            rate * 86_400 * count * figures[f"sizing.disk.1.{MANY}.{size}"] / MANY for size in BYTES for count in DAYS
        ]
        rows.append([f"{rate:,}", *(_gigabytes(each) for each in sizes)])
    return rows


def memory(figures: Figures) -> list[list[str]]:
    rows = [["what", "memory", "descriptors"]]
    for thing, described in THINGS.items():
        descriptors = figures.get(f"sizing.descriptors.{thing}")
        shown = "" if descriptors is None else f"{descriptors:.0f}"
        rows.append([described, _bytes(figures[f"sizing.memory.{thing}"]), shown])
    return rows


def example(figures: Figures) -> list[list[str]]:
    """What a service with the things of USE takes."""
    rows, whole = [["a service with", "memory"]], figures["sizing.memory.service"]
    for thing, count in USE.items():
        part = count * figures[f"sizing.memory.{thing}"]
        whole += part
        rows.append([f"{count:,} × {THINGS[thing]}", _bytes(part)])
    return [*rows, ["all of it, and the service", _bytes(whole)]]


def recovery(figures: Figures) -> list[list[str]]:
    rows = [["records in the log", "seconds"]]
    return rows + [[f"{count:,}", _short(figures[f"sizing.recovery.{count}"])] for count in LENGTHS]


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(["", lines[0], "|---" * len(rows[0]) + "|", *lines[1:], "", ""])


def _short(figure: float) -> str:
    """A figure with two significant digits."""
    rounded = float(f"{figure:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{_short(count)} bytes"


def _gigabytes(count: float) -> str:
    return f"{_short(count / 1e9)} GB"
