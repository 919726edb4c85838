"""`txnbuf compact`: compaction of a topic by a running service, or of a log that nobody has open"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from broker_io import is_cluster
from broker_io.addresses import shown_address
from broker_io.errors import InvalidAddress
from txnbuffer.cli.admin_client import ServiceAddress, call_all, call_owner, owning_directory
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import ACCESS, LogAddress, given, log_options
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.errors import InvalidRequest
from txnbuffer.progress import BYTES, report

if TYPE_CHECKING:
    from txnbuffer.service.offline import Ask

NOTHING = "nothing to compact yet: the records are undecided, younger than least_lag, or read by a stream"
CONTINUES = "interrupted: the compaction continues in the service; `txnbuf compact` shows how far it is"
ENDED = "interrupted: a compaction that was not complete has left the topic as it was"


@click.command("compact", cls=AddressCommand)
@address_argument
@topic_argument(required=False)
@click.option("--policy", metavar="NAME=VALUE,…", help="Set when the service compacts TOPIC: dirty_ratio, and "
              "least_lag, most_lag and grace in seconds.")  # fmt: skip
@click.option("--no-policy", is_flag=True, help="Remove the policy: TOPIC is compacted by this command only.")
@log_options
@output_option
def compact_command(
    log: LogAddress,
    topic: str | None,
    policy: str | None,
    no_policy: bool,
    output: str,
) -> None:
    """Compact TOPIC now and show statistics, or set its policy. Without TOPIC, show all policies.

    ADDRESS is txnbuf://HOST:PORT, a running service, or file:DIR, a log that no service has open.

    Compaction keeps the newest committed record of each key, all records without a key, and the positions and seqnos of
    all. It reads what is decided; the newest ledger is closed first. A topic that is quarantined because a segment was
    damaged is compacted again.

    The command waits for the end of the compaction. If you interrupt it (Ctrl-C), the compaction continues in the
    service; with file:DIR it ends, and the topic stays as it was.

    Policy: the topic is due once `dirty_ratio` of its bytes (0.5) was written since the last compaction, or once such a
    record is older than `most_lag` (0: no limit). Records younger than `least_lag` (0) are left alone. Deletions stay
    for `grace` (86400).

    --config and --set can be used with file:DIR only; a service has its own settings.

    Exit code 0 also if there is nothing to compact yet; 2 if the request is invalid, 3 if the service can't be reached,
    4 if the compaction failed, 5 if another process has the log.
    """
    _check_options(log, topic, policy, no_policy)
    service = ServiceAddress(log.address, log.access)
    if topic is None:
        responses = call_all(service, "Compactions")
        rows = [{name: value for name, value in row.items() if name != "run"} for row in responses.rows("topic")]
        show_rows(rows, output, title="compaction", empty="no topic has a policy or was compacted")
        responses.check()
        return
    wanted = None if policy is None else parse_policy(policy)

    async def work() -> None:
        opened = _log(log, topic) if _is_log(log) else _service(service)
        async with opened as ask:
            if wanted is not None or no_policy:
                show_record(await ask("SetCompaction", topic=topic, **(wanted or {})), output)
            else:
                statistics = await _compact(ask, topic, ENDED if _is_log(log) else CONTINUES)
                show_record(statistics, output, title=f"compaction of {topic}")

    asyncio.run(work())


def _is_log(log: LogAddress) -> bool:
    """Whether the command works on a log itself, and asks no service."""
    return not log.address.startswith("txnbuf:")


def _check_options(log: LogAddress, topic: str | None, policy: str | None, no_policy: bool) -> None:
    if policy is not None and no_policy:
        raise click.UsageError("--policy and --no-policy exclude each other: give one of them")
    if not _is_log(log) and (ignored := given("config_path", "flags")):
        raise click.UsageError(f"{ignored} can be used with file:DIR only: a service has its own settings")
    if _is_log(log) and (ignored := given(*ACCESS)):
        raise click.UsageError(f"{ignored} can't be used with file:DIR: no service may have that log open")
    if topic is None and (policy is not None or no_policy or _is_log(log)):
        raise click.UsageError("give the TOPIC")


def parse_policy(text: str) -> dict[str, float]:
    """The values of `--policy`, by name. Raises InvalidRequest."""
    from txnbuffer.service.door.needs import POLICY_KEYS
    from txnbuffer.service.engine.compaction import check_policy

    values: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if equals and name not in POLICY_KEYS:
            *names, last = POLICY_KEYS
            raise InvalidRequest(f"unknown policy value {name!r:.80}: give {', '.join(names)} or {last}")
        if name in values:
            raise InvalidRequest(f"--policy has {name} twice: give it once")
        try:
            values[name] = float(value)
        except ValueError:
            raise InvalidRequest(f"--policy {item.strip()!r:.80} is not NAME=NUMBER, such as dirty_ratio=0.5") from None
    check_policy(**values)
    return values


@contextlib.asynccontextmanager
async def _service(service: ServiceAddress) -> AsyncIterator[Ask]:
    async def ask(method: str, **request: Any) -> Any:
        return call_owner(service, method, **request)

    yield ask


@contextlib.asynccontextmanager
async def _log(log: LogAddress, topic: str) -> AsyncIterator[Ask]:
    """Own a log and ask its engine."""
    from txnbuffer.service.engine.compaction import unsupported

    log.check_not_in_memory()
    if is_cluster(log.address):
        raise unsupported(topic)
    if not log.address.startswith("file:"):
        raise InvalidAddress(f"{shown_address(log.address)!r} is not a directory: give file:DIR, or txnbuf://HOST:PORT")
    async with owning_directory(log) as ask:
        yield ask


async def _compact(ask: Ask, topic: str, interrupted: str) -> dict[str, Any]:
    """Compact a topic; the statistics. Prints `interrupted` if it is cancelled. Raises CompactionFailed."""
    from txnbuffer.service.offline import compacted

    number = (await ask("Compact", topic=topic))["run"]
    try:
        with report(f"compaction of {topic}", BYTES) as progress:
            statistics = await compacted(ask, topic, number, lambda _, done, expected: progress.update(done, expected))
    except asyncio.CancelledError:
        narrate(interrupted)
        raise
    if not statistics["upto"]:
        narrate(NOTHING)
    return statistics
