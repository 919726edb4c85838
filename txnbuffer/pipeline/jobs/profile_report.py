"""A profile as JSON and as a page."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from txnbuffer.pipeline.jobs.profiling import OUTCOMES, Profile, Row
from txnbuffer.pipeline.report import Section, bars, page, shown, stacked, table, text


def as_json(found: Profile) -> dict[str, Any]:
    return asdict(found)


def as_page(found: Profile, address: str) -> str:
    records = sum(row[outcome] for row in found.topics for outcome in OUTCOMES)
    volume = sum(row[f"{outcome}_bytes"] for row in found.topics for outcome in OUTCOMES)
    verdict = f"{records:,} records of {len(found.topics)} topics, {volume:,} bytes of keys and values."
    hot = [(f"{shown(row['key'])} ({row['topic']})", float(row["records"])) for row in found.hot_keys]
    long = [(f"{row['txn']} ({row['outcome']})", row["duration"] / 1000) for row in found.long_transactions]
    sections = [
        Section(
            "Topics", [bars([(row["topic"], _bytes_of(row)) for row in found.topics], "bytes"), _table(found.topics)]
        ),
        Section(
            "Over time",
            [
                text(f"Bytes published, by what became of them; a column is {found.slice_ms / 1000:g} s."),
                stacked(
                    [_time(row["at"]) for row in found.over_time],
                    {outcome: [float(row[outcome]) for row in found.over_time] for outcome in OUTCOMES},
                    "bytes",
                ),
            ],
        ),
        Section("Long transactions", [bars(long[:10], "s"), _table(found.long_transactions)]),
        Section("Large transactions", [_table(found.large_transactions)]),
        Section("Late and duplicate records", [_table(found.late)]),
        Section("Hot keys", [bars(hot[:10], "records"), _table(found.hot_keys)]),
        Section("Ledgers", [_table(found.ledgers)]),
    ]
    return page(f"Profile of {address}", verdict, True, sections)


def _bytes_of(row: Row) -> float:
    return float(sum(row[f"{outcome}_bytes"] for outcome in OUTCOMES))


def _table(rows: list[Row]) -> str:
    return table([{name: _cell(name, item) for name, item in row.items()} for row in rows])


def _cell(name: str, item: Any) -> Any:
    if name.endswith("_at"):
        return _time(item)
    return ", ".join(item) if isinstance(item, list) else item


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
