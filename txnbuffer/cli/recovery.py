"""`txnbuf verify` and `txnbuf recover`: stored transaction state, compared with the log; repair of lost state"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from broker_io.environment import current
from broker_io.permissions import exposure
from broker_io.port import PlugInBroker
from snapshots.format import check_data_topic
from snapshots.shard_count import owner_of, shards_of, snapshot_topic_of
from snapshots.shards import Shard
from txnbuffer.cli.commands import AddressCommand, address_argument, check_cluster, topic_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.errors import counted
from txnbuffer.recovery.decision_log import exclusive_writer, read_decisions, reset_decisions
from txnbuffer.recovery.plain import verify_plain
from txnbuffer.recovery.rebuild import compare
from txnbuffer.recovery.verify import Level, verify


@click.command("verify", cls=AddressCommand)
@address_argument
@topic_argument(required=False)
@click.option("--plain", is_flag=True, help="Check what plain consumers of TOPIC get, with the broker plug-in.")
@log_options
@output_option
def verify_command(log: LogAddress, topic: str | None, plain: bool, output: str) -> None:
    """Check the stored transaction state of all topics, or of TOPIC, without changing anything.

    Reads the snapshot of each topic, which holds that state, looks for entries of it that are missing or damaged, and
    compares it with the state rebuilt from the log. Also checks the files and the decision log as the service does at
    its start. Exit code 1 if anything is wrong.

    With --plain: compare all that a plain reader of TOPIC gets with its committed records, up to where transactions are
    decided now, and show the first entries of the log that differ. ADDRESS is that of a cluster. A partition is named
    TOPIC-partition-0. Exit code 1 if anything differs.
    """
    if plain:
        _verify_plain(log, topic, output)
    with log.open_for_reading() as broker:
        findings = verify(broker, topic)
    if log.address.startswith("file:") and (exposed := exposure(current().disk, log.address.removeprefix("file:"))):
        narrate(exposed)
    rows = [
        {
            "level": finding.level.value,
            "topic": finding.topic,
            "entry": finding.entry,
            "position": finding.position,
            "what": finding.what,
        }
        for finding in findings
    ]
    show_rows(rows, output, empty="no snapshots")
    wrong = sum(finding.level is Level.ERROR for finding in findings)
    narrate(f"{counted(wrong, 'error')} in {counted(len({finding.topic for finding in findings}), 'topic')}")
    sys.exit(1 if wrong else 0)


def _verify_plain(log: LogAddress, topic: str | None, output: str) -> NoReturn:
    if topic is None:
        raise click.UsageError("--plain needs a TOPIC")
    check_cluster(log.address)
    check_data_topic(topic)
    with log.open_for_reading() as broker:
        found = verify_plain(broker, topic)
        state = broker.plug_in_state(topic) if found.different and isinstance(broker, PlugInBroker) else {}
    show_rows([one._asdict() for one in found.differences], output, empty="no differences")
    records = counted(found.records, "committed record")
    places = counted(found.different, "place")
    wrong = f"plain consumers get something else than the {records} of {topic}, in {places} of the log"
    narrate(wrong if found.different else f"plain consumers get the {records} of {topic}, and nothing else")
    if found.different:
        said = ", ".join(f"{name} {value}" for name, value in state.items())
        narrate(
            f"the plug-in of its broker says: {said}" if said else "its broker has no plug-in: run txnbuf plugin check"
        )
    sys.exit(1 if found.different else 0)


@click.command("recover", cls=AddressCommand)
@address_argument
@topic_argument(required=False)
@click.option("--decisions", is_flag=True, help="Check the decision log instead of a topic.")
@click.option(
    "--write", is_flag=True, help="Write the rebuilt state, or repair the decision log; no service may be running."
)
@log_options
@output_option
def recover_command(log: LogAddress, topic: str | None, decisions: bool, write: bool, output: str) -> None:
    """Rebuild the state of TOPIC from its log and show how it differs from the snapshot.

    The rebuilt state comes from the whole log, from its first ledger to its end; the other from the snapshot and
    the log after it. Exit code 1 if the two differ or the snapshot is unusable. --write replaces the snapshot by
    the rebuilt state.

    If the first ledgers were trimmed, the snapshot knows more than the log. It is then wrong only if it shows a
    record that the log hides. --write keeps a snapshot that is not wrong; if it is wrong or lost, the information
    of the trimmed ledgers is lost, and records get new seqnos.

    With --decisions, without TOPIC: check whether the topics know more than the decision log, as after it was
    deleted or truncated; exit code 1 if so. --write then makes the decision log continue after everything that
    the topics know. Transactions that were open, or decided without a marker, abort. Producer sequences and group
    positions that the log no longer holds are lost.
    """
    if decisions == (topic is not None):
        raise click.UsageError("give either TOPIC or --decisions")
    if topic is None:
        _recover_decisions(log, output, write=write)
    else:
        _recover_topic(log, topic, output, write=write)


def _recover_topic(log: LogAddress, topic: str, output: str, *, write: bool) -> None:
    check_data_topic(topic)
    with log.open_for_reading() as broker:
        rebuilt, sequencer, differences, trimmed = compare(broker, topic)
    show_record(
        {
            "topic": topic,
            "applied": rebuilt.applied,
            "max_read_position": rebuilt.max_read_position,
            "open_transactions": len(rebuilt.ongoing),
            "aborts": len(rebuilt.aborted),
            "visible_records": sequencer.next_seqno - 1,
            **rebuilt.counters._asdict(),
            "differences": differences,
        },
        output,
    )
    if trimmed and not differences:
        narrate(
            f"the first ledgers of {topic} were trimmed; its snapshot knows their content, and agrees with the rest "
            f"of the log{'; nothing was written' if write else ''}"
        )
        return
    if not write:
        sys.exit(1 if differences else 0)
    from txnbuffer.recovery.manager import SnapshotManager

    with (
        log.open_for_writing() as broker,
        exclusive_writer(broker, owner_of(broker, topic)),
        SnapshotManager(broker, snapshot_topic=snapshot_topic_of(broker, topic)) as manager,
    ):
        manager.recover()
        manager.rebuild(topic)
    narrate(f"wrote the rebuilt state as the snapshot of {topic}")


def _recover_decisions(log: LogAddress, output: str, *, write: bool) -> None:
    opened = log.open_for_writing() if write else log.open_for_reading()
    with opened as broker:
        count = shards_of(broker)
        shards = [Shard(number, count) for number in range(count)]
        found = [
            reset_decisions(broker, shard, "txnbuf recover") if write else read_decisions(broker, shard)
            for shard in shards
        ]
    rows = [
        {
            "shard": shard.number,
            "topic": one.topic,
            "lost": one.lost or "",
            "open_transactions": len(one.open_transactions(shard)),
            "committed_in_part": [f"{shard.number}:{least}" for least in one.partly_committed(shard)],
        }
        for shard, one in zip(shards, found, strict=True)
    ]
    show_rows(rows, output)
    lost = [one for one in found if one.lost is not None]
    if write:
        narrate("\n".join(f"repaired {one.topic}" for one in lost) or "nothing was lost; nothing was written")
    sys.exit(1 if lost and not write else 0)
