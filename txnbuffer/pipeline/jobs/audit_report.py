"""What an audit found, as JSON and as a page."""

from __future__ import annotations

from typing import Any

from txnbuffer.pipeline.digests import Tally
from txnbuffer.pipeline.jobs.auditing import Audit, Range
from txnbuffer.pipeline.report import Section, bars, page, shown, stacked, table, text


def as_json(found: Audit) -> dict[str, Any]:
    """Digests are 16 hexadecimal digits."""
    return {
        "same": found.same,
        "kind": found.run.kind,
        "run": found.run.number,
        "unproven_keys": found.unproven,
        "deleted_topics": [*found.gone],
        "topics": [{"topic": one.topic, "up_to": _up_to(found, one.topic), **_sums(one)} for one in found.topics()],
        "ranges": [{"topic": one.topic, "from_key": one.first, **_sums(one)} for one in found.ranges],
        "differences": [
            {
                "topic": one.topic,
                "key": one.key,
                "what": one.what,
                "log_records": one.log_records,
                "export_records": one.export_records,
            }
            for one in found.differences
        ],
    }


def _up_to(found: Audit, topic: str) -> str | None:
    reached = found.run.offset.topics.get(topic)
    return None if reached is None else str(reached.at)


def _sums(one: Range) -> dict[str, Any]:
    return {**_side("log", one.log), **_side("export", one.export), "different_keys": one.different}


def _side(name: str, tally: Tally) -> dict[str, Any]:
    return {
        f"{name}_keys": tally.keys,
        f"{name}_records": tally.records,
        f"{name}_digest": f"{tally.digest:016x}",
    }


def as_page(found: Audit, directory: str, address: str) -> str:
    report = as_json(found)
    verdict = "The export says of every key what the log says."
    if found.gone:
        verdict = f"Topics were deleted since they were exported; of the others {found.different:,} keys differ."
    elif not found.same:
        verdict = f"The export and the log differ in {found.different:,} keys."
    what = f"Run {found.run.number} ({found.run.kind}) of {directory}, beside {address}. "
    if found.unproven:
        what += f"Of {found.unproven:,} keys the log holds nothing any more: nothing tells of them. "
    if found.gone:
        what += f"Deleted since, and not compared: {', '.join(found.gone)}."
    sections = [
        Section("What was compared", [text(what), table(report["topics"])]),
        Section("First different keys", [table([{**row, "key": shown(row["key"])} for row in report["differences"]])]),
    ]
    for topic in [one.topic for one in found.topics()]:
        ranges = [one for one in found.ranges if one.topic == topic]
        names = ["the first keys" if one.first is None else shown(one.first) for one in ranges]
        series = {
            "log": [float(one.log.records) for one in ranges],
            "export": [float(one.export.records) for one in ranges],
        }
        parts = [stacked(names, series, "records of both")]
        if differing := [
            (name, float(one.different)) for name, one in zip(names, ranges, strict=True) if one.different
        ]:
            parts += [text("Different keys by range, named by its first key:"), bars(differing, "keys")]
        sections.append(Section(f"{topic} by range of keys", parts))
    return page("Audit of an export", verdict, found.same, sections)
