"""`txnbuf status`: what is at an address, and whether it needs attention"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import click

from broker_io import is_cluster
from broker_io.addresses import shown_address
from txnbuffer.cli.admin_client import ServiceResponses, call_all, service_at
from txnbuffer.cli.commands import AddressCommand, address_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import output_option, show_record

LONG_OPEN = 60.0
"""Seconds, the default timeout of a transaction, after which one that is still open needs attention."""


@click.command("status", cls=AddressCommand)
@address_argument
@log_options
@output_option
def status_command(log: LogAddress, output: str) -> None:
    """Show on one screen what is at ADDRESS, and what needs attention.

    With file:DIR it reads the log, also while another process owns it, and shows the free disk space. Otherwise it asks
    the service, or the services of all shards.

    Exit code 1 if something needs attention, which `problems` names: a service that does not answer, is not ready or
    drains; a topic with a problem or damage; a transaction that has been open for a minute; a disk with less free
    space than log.watermark_bytes. Exit code 3 if nothing answers.
    """
    log.check_not_in_memory()
    found = _of_directory(log) if log.address.startswith("file:") else _of_services(log)
    problems = found.pop("problems")
    found = {"address": shown_address(log.address), **found}
    if output == "json":
        show_record(found | {"problems": problems}, output)
    else:
        show_record(found, output)
        click.echo("\n".join(f"needs attention: {one}" for one in problems) or "nothing needs attention")
    if problems:
        raise click.exceptions.Exit(1)


def _of_directory(log: LogAddress) -> dict[str, Any]:
    from txnbuffer.service.stored import StoredAnswers

    with log.open_for_reading() as broker:
        ask = StoredAnswers(broker).answer
        found = _of_log(lambda method, **request: ServiceResponses([ask(method, **request)], {}))
    free, least = shutil.disk_usage(log.address.partition(":")[2]).free, log.config.log.watermark_bytes
    if free < least:
        found["problems"].append(f"the disk has {free:,} bytes free, less than log.watermark_bytes, {least:,}")
    return {"kind": "embedded log", **found, "disk_free_bytes": free, "watermark_bytes": least}


def _of_services(log: LogAddress) -> dict[str, Any]:
    service = service_at(log)
    status = call_all(service, "Status")
    found = _of_log(lambda method, **request: call_all(service, method, **request))
    found["problems"] = [*_problems(status), *found["problems"]]
    return {
        "kind": "cluster" if is_cluster(log.address) else "service",
        "services": len(status.each),
        "shards": status.each[0]["shards"],
        "epochs": [one["epoch"] for one in status.each],
        "clients": sum(one["connections"] for one in status.each),
        **found,
    }


def _problems(status: ServiceResponses) -> Iterator[str]:
    """What the services say of themselves."""
    yield from map(str, status.missing.values())
    for one in status.each:
        shard = f"shard {one['shard']}"
        if not one["ready"]:
            yield f"{shard} is not ready"
        if one["draining"]:
            yield f"{shard} drains"
        yield from (f"{shard} waits: {wait}" for wait in one["waits"])
        yield from (f"{shard}: {one[name]}" for name in ("snapshot_problem", "retention_problem") if one[name])
        for name in ("compaction_problems", "damaged", "policy_problems"):
            yield from (f"topic {topic!r}: {problem}" for topic, problem in one.get(name, {}).items())


def _of_log(ask: Callable[..., ServiceResponses]) -> dict[str, Any]:
    """Topics, open transactions and groups."""
    topics, groups = ask("List").rows("topic"), ask("Groups", group=None).rows("group", "topic")
    hanging = sorted(ask("FindHanging", seconds=0.0).rows("txn"), key=lambda row: -(row["open_seconds"] or 0))
    problems = [f"topic {row['topic']!r}: {row['problem']}" for row in topics if row["problem"]]
    oldest = hanging[0] if hanging else None
    if oldest is not None and (oldest["open_seconds"] or 0) >= LONG_OPEN:
        problems.append(
            f"transaction {oldest['txn']} has been open for {oldest['open_seconds']:g} s, and holds back readers of "
            f"{', '.join(oldest['topics'])}: `txnbuf abort {oldest['txn']}` aborts it"
        )
    lag: dict[str, int] = {}
    for row in groups:
        lag[row["group"]] = lag.get(row["group"], 0) + (row["lag"] or 0)
    return {
        "topics": len(topics),
        "bytes": sum(row["bytes"] or 0 for row in topics),
        "open_transactions": len({row["txn"] for row in hanging}),
        "oldest_open": None if oldest is None else oldest["txn"],
        "oldest_open_seconds": None if oldest is None else oldest["open_seconds"],
        "held_back": sum(row["held_back"]["messages"] for row in topics if row.get("held_back")),
        "groups": len(lag),
        "lag": lag,
        "problems": problems,
    }
