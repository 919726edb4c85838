"""`txnbuf relay`: what committed in a topic, in a clean topic for readers of any kind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import click

from broker_io import check_address, is_cluster
from broker_io.errors import InvalidAddress
from broker_io.port import Broker
from txnbuffer.cli.asking import ServiceAddress, ask
from txnbuffer.cli.opening import address_argument, open_for_reading, open_for_writing, tls_option, with_config
from txnbuffer.cli.output import narrate, output_option, show_record
from txnbuffer.config import Config
from txnbuffer.errors import InvalidRequest

if TYPE_CHECKING:
    from txnbuffer.sinks.relay import Relay, RelayCursor, Relayed, Target

TOLD = 10_000
"""Records between two lines of progress."""
POLL = 0.25
LAST_WAIT = 15.0
"""Seconds in which a relay that is told to end does so by itself: it waits less for what is under way."""
ASKING = 5.0
"""Seconds for one question about the cursor."""


@click.command("relay")
@address_argument
@click.argument("source")
@click.argument("target")
@click.option("--to", "destination", metavar="ADDRESS", help="Where TARGET is, if not at ADDRESS: file:DIR, "
              "txnbuf://HOST:PORT or pulsar://HOST:PORT/TENANT/NAMESPACE.")  # fmt: skip
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more at the end.")
@click.option("--resend", is_flag=True, help="After the source's history branched: append the new history.")
@click.option("--max-unavailable", default=60.0, show_default=True, type=click.FloatRange(0),
              help="Seconds without progress after which an error ends it that may pass.")  # fmt: skip
@click.option("--cursor", metavar="NAME", help="A durable cursor keeps in SOURCE's log what is not in TARGET yet.")
@click.option("--service", metavar="HOST:PORT", help="The one that keeps it, if that is not ADDRESS, or of a cluster.")
@tls_option
@with_config
@output_option
def command(
    address: str,
    source: str,
    target: str,
    destination: str | None,
    follow: bool,
    resend: bool,
    max_unavailable: float,
    cursor: str | None,
    service: str | None,
    tls_ca: str | None,
    config: Config,
    output: str,
) -> None:
    """Append what commits in topic SOURCE to topic TARGET: each record once, in order, as a plain message.

    Any client of the target reads it, with no knowledge of transactions. TARGET belongs to the relay alone:
    another relay to it fences this one. Killed and begun again it goes on where it stopped: the target's last
    message tells how far it was. On a cluster the target keeps what its retention and subscriptions hold.

    It goes on until the first SIGTERM or SIGINT, then waits up to 10 seconds for what is under way: `unacknowledged`
    records may stand in the target or not, which the next relay finds out.

    Where the source's history branched, as after a repair, what was relayed can't be taken back: then it ends
    with an error, unless --resend says to append the new history from the branch on.
    """
    from txnbuffer.sinks.relay import Relay

    where = destination or address
    _check_target(where)
    stopping = _stopping()
    relay = Relay(
        lambda: open_for_reading(address, config, tls_ca),
        source,
        _target(where, target, config, max_unavailable, tls_ca),
        resend=resend,
        max_unavailable=max_unavailable,
        tell=_progress(),
        cursor=None if cursor is None else _cursor(address, source, cursor, service, tls_ca),
    )
    narrate(f"relaying {source} to {target} at {where}")
    _run_and_tell(relay, follow, stopping, output)


def _run_and_tell(relay: Relay, follow: bool, stopping: threading.Event, output: str) -> None:
    ended = _run(relay, follow, stopping)
    show_record(_told(relay), output)
    if not ended:
        sys.stdout.flush()
        os._exit(0)  # as after a kill, which loses nothing: a thread that hangs would hold the end of the process


def _check_target(address: str) -> None:
    check_address(address)
    if address.startswith("memory:"):
        raise InvalidAddress(
            f"{address!r} ends with the relay, and so would what it relays: give --to an address that stays"
        )


def _told(relay: Relay) -> dict[str, Any]:
    done = relay.relayed
    return {
        "records": done.records,
        "seqno": done.seqno,
        "position": done.position,
        "resumed_behind": done.resumed,
        "unacknowledged": relay.unacknowledged,
    }


def _stopping() -> threading.Event:
    """What the first SIGTERM or SIGINT sets; a second one ends the process at once, which loses nothing either."""
    stopping = threading.Event()

    def end(number: int, _: object) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stopping


def _run(relay: Relay, follow: bool, stopping: threading.Event) -> bool:
    """Relay; False where it was told to end and hangs. Raises what it raises."""
    outcome: Future[Relayed] = Future()

    def work() -> None:
        try:
            outcome.set_result(relay.run(follow=follow, stop=stopping.is_set))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="relay", daemon=True).start()
    while not wait([outcome], POLL).done:
        if stopping.is_set() and not wait([outcome], LAST_WAIT).done:
            narrate(f"it waits in vain, so it is cut off after {LAST_WAIT:.0f} s; the next one goes on from here")
            return False
    outcome.result()
    return True


def _cursor(address: str, topic: str, name: str, service: str | None, tls_ca: str | None) -> RelayCursor:
    from txnbuffer.rpc.discovery import owner_address_of
    from txnbuffer.sinks.relay import RelayCursor

    if address.startswith("txnbuf://"):
        service = service or address
    elif service is None and not is_cluster(address):
        raise InvalidRequest(f"only a service keeps durable cursors: say with --service which one owns {address}")

    def ask_owner(broker: Broker, method: str, question: dict[str, Any]) -> Any:
        owner = service or owner_address_of(broker, address, topic)
        return ask(ServiceAddress(owner, tls_ca), method, timeout=ASKING, **question)

    return RelayCursor(ask_owner, topic, name)


def _target(address: str, topic: str, config: Config, max_unavailable: float, tls_ca: str | None) -> Target:
    from txnbuffer.client.connection import connect
    from txnbuffer.sinks.relay_targets import OwnedTarget, ServiceTarget

    if address.startswith("txnbuf://"):
        opening = connect(address, max_unavailable=max_unavailable, tls_ca=tls_ca)
        return ServiceTarget(opening.open_plain, topic)
    return OwnedTarget(lambda: open_for_writing(address, config), topic, release=is_cluster(address))


def _progress() -> Callable[[Relayed], None]:
    told = 0

    def tell(relayed: Relayed) -> None:
        nonlocal told
        if relayed.records - told >= TOLD:
            told = relayed.records
            narrate(f"{relayed.records:,} records, up to {relayed.position}")

    return tell
