"""`txnbuf audit`: the latest value of each key, compared with another copy or with an earlier digest"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import click

from broker_io import is_cluster, restore_backup
from broker_io.errors import disk_error
from broker_io.port import Broker
from snapshots.format import check_data_topic
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import ACCESS, LogAddress, given, log_options
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.errors import InvalidConfiguration, counted
from txnbuffer.progress import BYTES, report
from txnbuffer.recovery.audit import (
    FIRST_DIFFERENCES,
    MEMORY_BYTES,
    AuditCopy,
    CommittedLog,
    DigestAudit,
    KeyAudit,
    KeySide,
    LogDigest,
    Tally,
    audit,
    digest_of,
)

MIB = 1024 * 1024


@click.command("audit", cls=AddressCommand)
@address_argument
@topic_argument()
@click.option("--against", metavar="ADDRESS", help="Address of another copy of TOPIC.")
@click.option("--against-topic", metavar="NAME", help="Name of the other copy, if it is not TOPIC.")
@click.option("--relayed", is_flag=True, help="The other copy was written by `txnbuf relay`.")
@click.option("--raw", is_flag=True, help="Read the raw log of a relayed copy on a cluster, not the compacted view.")
@click.option(
    "--up-to", type=click.IntRange(0), metavar="SEQNO", help="Compare as of this seqno, which both must have."
)
@click.option("--digest", "expected", metavar="DIGEST", help="Compare with a digest that an earlier audit printed.")
@click.option("--memory", type=click.IntRange(1), default=MEMORY_BYTES // MIB, show_default=True, metavar="MIB",
              help="Memory for keys; more go to temporary files in the directory that TMPDIR names.")  # fmt: skip
@click.option("--first", type=click.IntRange(0), default=FIRST_DIFFERENCES, show_default=True,
              help="Number of different keys to show.")  # fmt: skip
@log_options
@output_option
def audit_command(
    log: LogAddress,
    topic: str,
    against: str | None,
    against_topic: str | None,
    relayed: bool,
    raw: bool,
    up_to: int | None,
    expected: str | None,
    memory: int,
    first: int,
    output: str,
) -> None:
    """Compare the latest value of each key of TOPIC with another copy of it.

    The copy is a topic at another address (a copy of the directory, a backup as backup:FILE, a service, a cluster), or
    with --relayed the target of a relay of TOPIC. A backup is restored to a temporary directory first. Both are read as
    readers of committed records do, and compared as of the last seqno that both have. Exit code 1 if keys differ; the
    first are shown. Exit code 2 if the two can't be compared, mostly because one ends before what was compacted in the
    other. Keys that only one has, as their records were trimmed from the other, only count as unproven_keys.

    Without a copy: compare digests of the newest record of each key, without its value, with --digest or with those of
    the last compaction of file:DIR (exit code 1 if they differ), and print one that a later audit can compare with.
    """
    check_data_topic(topic)
    copied = against is not None or against_topic is not None
    _check_options(copied=copied, relayed=relayed, raw=raw, up_to=up_to, expected=expected)
    place, name = log._replace(address=against or log.address), against_topic or topic
    _check_addresses(log, place)
    like = None if expected is None else LogDigest.parse(expected)
    if not copied:
        with log.open_for_reading() as broker, _working(memory) as working:
            found = digest_of(CommittedLog(broker, topic), like=like, **working)
        _show_digest(topic, found, like, output)
    if (place.place, name) == (log.place, topic):
        raise click.UsageError(f"the other copy is topic {topic} itself: name another address or another topic")
    with log.open_for_reading() as broker, _working(memory) as working, _opened(place, working["directory"]) as other:
        copy: AuditCopy = CommittedLog(other, name)
        if relayed:
            raw = raw or not is_cluster(place.address)
            copy = _relayed(other, name, topic, broker.incarnation(topic), raw=raw)
        result = audit(CommittedLog(broker, topic), copy, up_to=up_to, first=first, **working)
    _show(topic, result, output)


def _check_options(*, copied: bool, relayed: bool, raw: bool, up_to: int | None, expected: str | None) -> None:
    if not copied and (relayed or up_to is not None):
        raise click.UsageError("--relayed and --up-to require --against or --against-topic")
    if copied and expected is not None:
        raise click.UsageError("give either another copy or --digest")
    if not copied and given("first"):
        raise click.UsageError("--first requires --against or --against-topic")
    if raw and not relayed:
        raise click.UsageError("--raw requires --relayed")


def _check_addresses(*places: LogAddress) -> None:
    """Refuse logs in memory, and options for addresses of another kind than these."""
    for place in places:
        place.check_not_in_memory()
    addresses = [place.address for place in places]
    if (ignored := given("config_path", "flags")) and not any(map(is_cluster, addresses)):
        raise click.UsageError(f"{ignored} can be used with the address of a cluster only")
    if (ignored := given(*ACCESS)) and not any(address.startswith("txnbuf:") for address in addresses):
        raise click.UsageError(f"{ignored} can be used with the address of a service only, txnbuf://HOST:PORT")


def _opened(place: LogAddress, directory: str) -> Broker:
    """Open a copy; a backup is restored as a log in a directory for temporary files first."""
    scheme, _, path = place.address.partition(":")
    if scheme == "backup":
        place = place._replace(address=f"file:{directory}/restored")
        with report(f"restore of {path}", BYTES) as progress:
            restore_backup(path, place.address, progress.update)
    return place.open_for_reading()


def _relayed(broker: Broker, topic: str, source: str, incarnation: str, *, raw: bool) -> AuditCopy:
    from txnbuffer.sinks.relayed_copy import RelayedCopy

    return RelayedCopy(broker, topic, source, incarnation, compacted=not raw)


@contextlib.contextmanager
def _working(memory: int) -> Iterator[dict[str, Any]]:
    """The memory and the directory for temporary files of an audit, as arguments."""
    named = os.environ.get("TMPDIR")
    if named and not (os.path.isdir(named) and os.access(named, os.W_OK | os.X_OK)):
        # Python would silently take another directory.
        raise InvalidConfiguration(
            f"TMPDIR is {named}, which is not a writable directory: set it to one with room for temporary files"
        )
    try:
        temporary = tempfile.TemporaryDirectory("", "txnbuf-audit-", named or None, ignore_cleanup_errors=True)
    except OSError as error:
        raise disk_error(
            error, named or "TMPDIR", "an audit needs temporary files", "set TMPDIR to another directory"
        ) from error
    with temporary as directory:
        yield {"directory": directory, "memory_bytes": memory * MIB}


def _show_digest(topic: str, found: DigestAudit, like: LogDigest | None, output: str) -> NoReturn:
    digest, tally, stored = found
    report: dict[str, Any] = {"same": None, "compared_with": "nothing"}
    if like is not None:
        report = {"same": digest.keys == like.keys, "compared_with": "given digest"}
    elif stored is not None:
        report = {"same": not stored.different, "compared_with": "stored digests", "stored_ledgers": stored.ledgers}
    show_record({**report, "topic": topic, "up_to": digest.end, **_tally("log", tally), "digest": digest}, output)
    same = report["same"] is not False
    if stored is not None and stored.different:
        narrate(
            f"the newest records of keys in {counted(len(stored.different), 'ledger')}, the first of them "
            f"{stored.different[0]}, differ from the digests that the last compaction has stored: compare with another "
            "copy to see which"
        )
    elif not same:
        narrate(
            "the newest records of some keys differ from those of the digest, unless it was mistyped: compare with "
            "another copy to see which"
        )
    sys.exit(0 if same else 1)


def _show(topic: str, found: KeyAudit, output: str) -> NoReturn:
    report: dict[str, Any] = {
        "same": not found.different,
        "topic": topic,
        "up_to": found.up_to,
        **_tally("log", found.log),
        **_tally("copy", found.copy),
        "unproven_keys": found.unproven,
        "different_keys": found.different,
    }
    differences = [
        {"key": one.key, "what": one.what, **_side("log", one.log), **_side("copy", one.copy)}
        for one in found.differences
    ]
    if output == "json":
        show_record({**report, "differences": differences}, output)
    else:
        show_record(report, output)
        show_rows(differences, output, title="first different keys", empty="none")
    sys.exit(1 if found.different else 0)


def _tally(side: str, tally: Tally) -> dict[str, int]:
    return {f"{side}_{name}": number for name, number in asdict(tally).items()}


def _side(name: str, side: KeySide) -> dict[str, Any]:
    return {f"{name}_{field}": value for field, value in side._asdict().items()}
