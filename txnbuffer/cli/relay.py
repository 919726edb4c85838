"""`txnbuf relay`: copy of the committed records of a topic for readers of any kind"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from broker_io import canonical_address, check_address, is_cluster
from broker_io.errors import InvalidAddress
from broker_io.port import Broker
from txnbuffer.cli.admin_client import ServiceAddress
from txnbuffer.cli.admin_client import call_owner as ask_owner
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_record
from txnbuffer.errors import InvalidRequest
from txnbuffer.progress import is_reported

if TYPE_CHECKING:
    from txnbuffer.sinks.relay import Relay, RelayCursor, RelayProgress, Target

PROGRESS_RECORDS = 10_000
"""Records between two lines of progress."""
POLL = 0.25
LAST_WAIT = 15.0
"""Seconds in which a stopped relay must have ended; it waits less for its unacknowledged appends."""
CURSOR_TIMEOUT = 5.0
"""Seconds for one call about the cursor."""


@click.command("relay", cls=AddressCommand)
@address_argument
@topic_argument("source")
@topic_argument("target")
@click.option("--to", "destination", metavar="ADDRESS", help="Address of TARGET, if it is not ADDRESS: file:DIR, "
              "txnbuf://HOST:PORT or pulsar://HOST:PORT/TENANT/NAMESPACE.")  # fmt: skip
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more records at the end.")
@click.option("--resend", is_flag=True, help="If the history of SOURCE branched: append the new history.")
@click.option("--latest", is_flag=True, help="Keep only the latest value of each key in TARGET, a topic of a cluster: "
              "leave out records without a key, and let the cluster compact it.")  # fmt: skip
@click.option("--max-unavailable", default=60.0, show_default=True, type=click.FloatRange(0),
              help="Give up after this many seconds of transient errors without progress.")  # fmt: skip
@click.option("--cursor", metavar="NAME", help="Use a durable cursor, so that SOURCE keeps what is not in TARGET yet.")
@click.option(
    "--service", metavar="txnbuf://HOST:PORT", help="Service that keeps the cursor, if ADDRESS is a log directory."
)
@log_options
@output_option
def relay_command(
    log: LogAddress, source: str, target: str, destination: str | None, follow: bool, resend: bool, latest: bool,
    max_unavailable: float, cursor: str | None, service: str | None, output: str,
) -> None:  # fmt: skip
    """Copy the committed records of topic SOURCE to topic TARGET: each once, in order, as an ordinary message.

    Any client can read TARGET without knowing about transactions. Only the relay may write to TARGET; another relay
    to it fences this one. After a restart, also after a kill, the relay resumes after the last message of TARGET. On
    a cluster, retention and subscriptions decide what TARGET keeps.

    Runs until the first SIGTERM or SIGINT, then waits up to 10 seconds for unacknowledged records. Records still
    `unacknowledged` may be in TARGET or not; the next relay checks.

    If the history of SOURCE branched, as after a repair, relayed records cannot be withdrawn: the relay ends with an
    error, or with --resend appends the new history from the branch on.

    With --latest consumers of TARGET read compacted (read_compacted), and see at least the latest value of each key.
    """
    from txnbuffer.sinks.relay import Relay

    there = log._replace(address=destination or log.address)
    copy = _target(there, target, max_unavailable, latest=latest)
    stop = _stop_event()
    relay = Relay(
        log.open_for_reading,
        source,
        copy,
        resend=resend,
        keyed=latest,
        max_unavailable=max_unavailable,
        on_progress=_progress(),
        cursor=None if cursor is None else _cursor(log, source, cursor, service),
    )
    narrate(f"relaying {source} to {target} at {canonical_address(there.address)}")
    ended = _run(relay, follow, stop)
    show_record(_summary(relay), output)
    if not ended:
        sys.stdout.flush()
        os._exit(0)  # loses nothing, as after a kill; a hanging thread would keep the process from ending


def _summary(relay: Relay) -> dict[str, Any]:
    progress = relay.progress
    return {
        "records": progress.records,
        "seqno": progress.seqno,
        "position": progress.position,
        "resumed_behind": progress.resumed,
        "unacknowledged": relay.unacknowledged,
    }


def _stop_event() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process at once, which loses nothing."""
    stop = threading.Event()

    def end(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def _run(relay: Relay, follow: bool, stop: threading.Event) -> bool:
    """Run the relay; False if it hangs after it was stopped. Raises what the relay raises."""
    outcome: Future[RelayProgress] = Future()

    def work() -> None:
        try:
            outcome.set_result(relay.run(follow=follow, stop=stop.is_set))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(work,), name="relay", daemon=True).start()
    while not wait([outcome], POLL).done:
        if stop.is_set() and not wait([outcome], LAST_WAIT).done:
            narrate(f"the relay did not stop within {LAST_WAIT:.0f} s and was cut off; the next one resumes")
            return False
    outcome.result()
    return True


def _cursor(log: LogAddress, topic: str, name: str, service: str | None) -> RelayCursor:
    from txnbuffer.rpc.discovery import owner_address_of
    from txnbuffer.sinks.relay import RelayCursor

    if log.address.startswith("txnbuf://"):
        service = service or log.address
    elif service is None and not is_cluster(log.address):
        raise InvalidRequest(f"only a service keeps durable cursors: name the service of {log.address} with --service")

    def call_owner(broker: Broker, method: str, request: dict[str, Any]) -> Any:
        owner = service or owner_address_of(broker, log.address, topic)
        return ask_owner(ServiceAddress(owner, log.access), method, timeout=CURSOR_TIMEOUT, **request)

    return RelayCursor(call_owner, topic, name)


def _target(log: LogAddress, topic: str, max_unavailable: float, *, latest: bool) -> Target:
    """The target at an address. Raises InvalidAddress, and InvalidRequest if it can't keep only the `latest` values."""
    from txnbuffer.opening import connect
    from txnbuffer.sinks.relay_targets import OwnedTarget, ServiceTarget

    check_address(log.address)
    if log.address.startswith("memory:"):
        raise InvalidAddress(
            f"{log.address!r} exists in the memory of this process only: give --to an address that stays"
        )
    if latest and not is_cluster(log.address):
        raise InvalidRequest(
            f"--latest needs a target on a cluster, which {log.address} is not: relay without it, and compact the "
            "target with `txnbuf compact`"
        )
    if log.address.startswith("txnbuf://"):
        opening = connect(log.address, **log.connect_options(max_unavailable))
        return ServiceTarget(opening.open_sync, topic)
    opening_log = partial(log.open_for_writing, compacted=topic if latest else None)
    return OwnedTarget(opening_log, topic, release=is_cluster(log.address), compacts=latest)


def _progress() -> Callable[[RelayProgress], None]:
    shown = 0

    def show(progress: RelayProgress) -> None:
        nonlocal shown
        if not is_reported() and progress.records - shown >= PROGRESS_RECORDS:
            shown = progress.records
            narrate(f"{progress.records:,} records, up to {progress.position}")

    return show
