"""`txnbuf replication`: the pair of an embedded log, seen and commanded by operators"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import click

from broker_io.errors import Error, NotLive
from txnbuffer.cli.admin_client import ServiceAddress, ServiceResponses, call, with_service
from txnbuffer.cli.commands import CommandGroup, address_argument
from txnbuffer.cli.options import with_config
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.config import Config
from txnbuffer.errors import InvalidRequest, ServiceUnavailable

COLUMNS = (
    *("service", "role", "store", "in_sync", "partial", "epoch", "end", "commit", "applied"),
    *("lag_records", "lag_bytes", "lag_seconds", "linked", "waits_for_backup", "lease_left", "problem"),
)
"""The columns of the table of `txnbuf replication status`."""
TIMEOUT = 60.0
"""Seconds to wait for a switch or a promotion: a lease may have to end, and the backup may have to catch up."""
POLL = 0.2
"""Seconds between two requests for the state."""
ANSWER = 5.0
"""Seconds that a machine has to say its state."""
FOLLOWING = ("backup", "joining")
"""Roles of a machine that may follow a live one."""
STORE_DIGITS = 8
"""Digits of a store that the table shows."""


@click.group("replication", cls=CommandGroup)
def replication_command() -> None:
    """Show and command the pair of an embedded log: a live service and its backup."""


@replication_command.command("status")
@address_argument
@with_service
@output_option
def status_command(service: ServiceAddress, output: str) -> None:
    """Show the machines of a pair: which one is live, and how far its backup is.

    Give the addresses of both as txnbuf://HOST:PORT,HOST:PORT. `in_sync` are the stores that have every acknowledged
    record; `partial`: the copy of the log is incomplete; `waits_for_backup`: appends wait for it. `lag_records`,
    `lag_bytes` and `lag_seconds` say how far the backup is behind; `lease_left` is how many seconds the primary may
    serve without another answer of the lock. --output json has all facts.

    Exit code 1 if no machine is live, if the backup is not in sync, or if a file of either is damaged; 3 if a machine
    does not answer.
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
    in_sync = any(row["role"] in ("live", "switching") and len(row["in_sync"]) > 1 for row in rows)
    if not in_sync or any(row.get("damaged") for row in rows):  # 0.2.0 does not say what is damaged
        raise click.exceptions.Exit(1)


timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0.0),
    default=TIMEOUT,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the machine is live.",
)


@replication_command.command("switch")
@address_argument
@timeout_option
@with_service
@output_option
def switch_command(timeout: float, service: ServiceAddress, output: str) -> None:
    """Make the backup live, with nothing lost; the live service becomes its backup.

    Returns once the other machine is live, and shows the state after that. Clients continue at the other service, with
    their open transactions. Exit code 3 if the backup is not in sync, no machine is live, or the time is up; after
    that the switch may still happen.
    """
    until = time.monotonic() + timeout
    former = _ask_to_switch(service, until)
    for rows in _states(service, until):
        if any(map(_follows(former["store"]), rows)):
            _show(rows, output)
            return
    raise ServiceUnavailable(
        f"{former['service']} is no longer live, and no other machine became live within {timeout:g} s: the switch may "
        "still happen, see `txnbuf replication status`"
    )


def _ask_to_switch(service: ServiceAddress, until: float) -> dict[str, Any]:
    """The state of the machine that was live, once it is no longer. Raises why none switches."""
    refused: Error | None = None
    for one in service.each:
        try:
            state: dict[str, Any] = call(one, "SwitchOver", timeout=max(until - time.monotonic(), POLL))
        except (NotLive, ServiceUnavailable) as error:
            if time.monotonic() >= until and not isinstance(error, NotLive):
                error = ServiceUnavailable(f"{error}; the time is up, and the switch may still happen")
            refused = error if refused is None or isinstance(refused, NotLive) else refused
        else:
            return {"service": one.address} | state
    raise refused or AssertionError("a service has at least one address")


def _follows(former: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a row shows that another store than the former one is live: its own, or that of one which follows it."""

    def follows(row: dict[str, Any]) -> bool:
        if row["store"] == former:
            return bool(row["linked"] and row["role"] in FOLLOWING and row["live"] not in ("", former))
        return bool(row["role"] == "live")

    return follows


def _states(service: ServiceAddress, until: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of the machines that answer, again and again until the time is up."""
    while True:
        rows = []
        for one in service.each:
            with contextlib.suppress(ServiceUnavailable):
                rows.append({"service": one.address} | call(one, "Replication", timeout=ANSWER))
        yield rows
        if time.monotonic() >= until:
            return
        time.sleep(POLL)


@replication_command.command("promote")
@address_argument
@click.option("--force", is_flag=True, help="Confirm that acknowledged records may be lost.")
@timeout_option
@with_service
@output_option
def promote_command(force: bool, timeout: float, service: ServiceAddress, output: str) -> None:
    """Make the service at ADDRESS live although the other one may have more acknowledged records.

    For the case that the live machine is lost for good and its backup was not in sync, so that it does not become live
    by itself. What only the other machine has is lost; streams, named producers and groups notice it as they notice a
    restored backup. The lock has to answer, and the lease of the other machine to end first.

    Returns once the machine is live, and shows the state after that. Exit code 3 if the time is up.
    """
    if not force:
        raise InvalidRequest("a promotion may lose acknowledged records: give --force to confirm that")
    if len(service.each) != 1:
        raise InvalidRequest("name the one machine to promote with txnbuf://HOST:PORT")
    until, problem = time.monotonic() + timeout, "it does not answer"
    call(service.each[0], "Promote", timeout=max(timeout, POLL))
    for rows in _states(service, until):
        if any(row["role"] == "live" for row in rows):
            _show(rows, output)
            return
        problem = "; ".join(row["problem"] or f"its role is {row['role']}" for row in rows) or problem
    raise ServiceUnavailable(
        f"{service.address} has not become live within {timeout:g} s: {problem}. The request lapses after three times "
        "pair.lease_seconds: see `txnbuf replication status`, then repeat it"
    )


@replication_command.command("dissolve")
@click.argument("address", metavar="file:DIR")
@click.option("--pair-lock", metavar="ADDRESS", help="The lock of the pair, instead of pair.lock.")
@click.option("--force", is_flag=True, help="Accept that acknowledged records may be lost.")
@with_config
def dissolve_command(address: str, pair_lock: str | None, force: bool, config: Config) -> None:
    """End the pair of the log at ADDRESS, file:DIR, whose service is stopped; it can then be served alone.

    Stop the service of the other machine first, and remove its directory afterwards: it can't become live any more.
    Refuses if this machine can't become live, because the other one may have acknowledged records that it lacks. The
    lock has to answer; its record then says that the pair was dissolved, so another pair needs a lock of another name.
    """
    from broker_io.filelog.pair.broker import PairOptions
    from broker_io.filelog.pair.dissolving import dissolve

    if not address.startswith("file:"):
        raise InvalidRequest(f"{address!r} can't be dissolved: give the directory of a stopped machine, file:DIR")
    pair = replace(config.pair, lock=pair_lock or config.pair.lock)
    if not pair.lock:
        raise InvalidRequest("the lock of the pair is missing: give --pair-lock, or --config with the section [pair]")
    dissolve(address.removeprefix("file:"), PairOptions(**asdict(pair)), force=force)
    narrate(f"the pair of {address} is dissolved: serve it without --pair-lock, and remove the other directory")


def _show(rows: list[dict[str, Any]], output: str) -> None:
    show_rows(rows if output == "json" else [_short(row) for row in rows], output, title="pair")


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the table of a machine."""
    stores = {"store": row["store"][:STORE_DIGITS], "in_sync": " ".join(one[:STORE_DIGITS] for one in row["in_sync"])}
    return {name: stores.get(name, row[name]) for name in COLUMNS}
