"""`txnbuf replication`: the pair of an embedded log, seen and commanded by operators"""

from __future__ import annotations

from typing import Any

import click

from broker_io.errors import Error, NotLive
from txnbuffer.cli.admin_client import ServiceAddress, ServiceResponses, call, service_option
from txnbuffer.cli.output import output_option, show_rows
from txnbuffer.errors import InvalidRequest, ServiceUnavailable

COLUMNS = (
    *("service", "role", "in_sync", "epoch", "end", "commit", "applied", "lag_records", "lag_bytes", "lag_seconds"),
    *("linked", "lease_left", "problem"),
)
"""The columns of the table of `txnbuf replication status`."""
TIMEOUT = 120.0
"""Seconds to wait for a switch: open transactions get a second, and the backup may have to catch up."""
STORE_DIGITS = 8
"""Digits of a store that the table shows."""


@click.group("replication")
def replication_command() -> None:
    """Show and command the pair of an embedded log: a live service and its backup."""


@replication_command.command("status")
@service_option
@output_option
def status_command(service: ServiceAddress, output: str) -> None:
    """Show the machines of a pair: which one is live, and how far its backup is.

    Give the addresses of both as --service HOST:PORT,HOST:PORT. `in_sync` are the stores that have every acknowledged
    record. `lag_records`, `lag_bytes` and `lag_seconds` say how far the backup is behind; `lease_left` is how many
    seconds the live may serve without another answer of the lock. --output json has all facts.

    Exit code 1 if no machine is live, or if the backup is not in sync; 3 if a machine does not answer.
    """
    responses = ServiceResponses([], {})
    for one in service.each:
        try:
            responses.each.append({"service": one.address} | call(one, "Replication"))
        except ServiceUnavailable as error:
            responses.missing[one.address] = error
    rows = responses.each
    show_rows(rows if output == "json" else [_short(row) for row in rows], output, title="pair", empty="no answer")
    responses.check()
    if not any(row["role"] in ("live", "switching") and len(row["in_sync"]) > 1 for row in rows):
        raise click.exceptions.Exit(1)


@replication_command.command("switch")
@service_option
@output_option
def switch_command(service: ServiceAddress, output: str) -> None:
    """Make the backup live, with nothing lost; the live service becomes its backup.

    Clients continue at the other service, with their open transactions. Exit code 3 if the backup is not in sync or no
    machine is live.
    """
    refused: Error | None = None
    for one in service.each:
        try:
            answer = call(one, "SwitchOver", timeout=TIMEOUT)
        except (NotLive, ServiceUnavailable) as error:
            refused = error if refused is None or isinstance(refused, NotLive) else refused
        else:
            _show(one, answer, output)
            return
    raise refused or AssertionError("a service has at least one address")


@replication_command.command("promote")
@click.option("--force", is_flag=True, help="Confirm that acknowledged records may be lost.")
@service_option
@output_option
def promote_command(force: bool, service: ServiceAddress, output: str) -> None:
    """Make the service at --service live although the other one may have more acknowledged records.

    For the case that the live machine is lost for good and its backup was not in sync, so that it does not become live
    by itself. What only the other machine has is lost; streams, named producers and groups notice it as they notice a
    restored backup. The lock has to answer, and the lease of the other machine to end first.
    """
    if not force:
        raise InvalidRequest("a promotion may lose acknowledged records: give --force to confirm that")
    if len(service.each) != 1:
        raise InvalidRequest("name the one machine to promote with --service HOST:PORT")
    (one,) = service.each
    _show(one, call(one, "Promote", timeout=TIMEOUT), output)


def _show(service: ServiceAddress, answer: dict[str, Any], output: str) -> None:
    row = {"service": service.address} | answer
    show_rows([row if output == "json" else _short(row)], output, title="pair")


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the table of a machine."""
    in_sync = " ".join(store[:STORE_DIGITS] for store in row["in_sync"])
    return {name: in_sync if name == "in_sync" else row[name] for name in COLUMNS}
