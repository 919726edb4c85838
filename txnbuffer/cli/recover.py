"""`txnbuf recover`: a buffer's state from its log alone, beside what the snapshot says; a decision log begun anew."""

from __future__ import annotations

import sys

import click

from broker_io.port import Broker
from snapshots.keys import check_data_topic
from snapshots.shard_count import owner_of, shards_of, snapshot_topic_of
from snapshots.shards import Shard
from txnbuffer.cli.opening import address_argument, open_for_reading, open_for_writing, tls_option, with_config
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.config import Config
from txnbuffer.recovery.decision_log import Decisions, begin_anew, hold, look
from txnbuffer.recovery.rebuild import compared

OWNER = "txnbuf recover"


@click.command("recover")
@address_argument
@click.argument("topic", required=False)
@click.option("--decisions", is_flag=True, help="Look at the decision log, not at a topic.")
@click.option(
    "--write", is_flag=True, help="Write what was rebuilt, or begin the decision log anew (needs the log to itself)."
)
@tls_option
@with_config
@output_option
def command(
    address: str, topic: str | None, decisions: bool, write: bool, tls_ca: str | None, config: Config, output: str
) -> None:
    """Rebuild the state of TOPIC from its log and show how it differs from the snapshot.

    The log is folded from its first ledger to its end; the snapshot is restored and the log behind it
    applied. Exit code 1 if the two differ or the snapshot can't be used. With --write the rebuilt state
    takes the snapshot's place. Where the first ledgers were trimmed the snapshot knows more than the log: it
    is wrong only if it shows a record that the log hides. One that is not wrong is left alone; for one that is
    wrong or lost, what only those ledgers told is given up, and records are numbered anew.

    With --decisions, and no TOPIC: whether topics tell of more than the decision log holds, as after it was
    deleted or truncated; exit code 1 if so. With --write such a log goes on above all that topics know. What
    was open then aborts, and so does what was decided and had no marker yet; producers' numbers and groups'
    positions that the log no longer holds are forgotten.
    """
    if decisions == (topic is not None):
        raise click.UsageError("give a TOPIC, or --decisions")
    if topic is None:
        _recover_decisions(address, config, tls_ca, output, write=write)
    else:
        _recover_topic(address, topic, config, tls_ca, output, write=write)


def _recover_topic(address: str, topic: str, config: Config, tls_ca: str | None, output: str, *, write: bool) -> None:
    check_data_topic(topic)
    with open_for_reading(address, config, tls_ca) as broker:
        rebuilt, sequencer, differences, trimmed = compared(broker, topic)
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
            f"the first ledgers of {topic} are gone: its snapshot knows what they told, and nothing that is left of "
            f"the log speaks against it{'; nothing was written' if write else ''}"
        )
        return
    if not write:
        sys.exit(1 if differences else 0)
    with open_for_writing(address, config) as broker, hold(broker, owner_of(broker, topic)):
        _write(broker, topic)
    narrate(f"the rebuilt state is now the snapshot of {topic}")


def _write(broker: Broker, topic: str) -> None:
    from txnbuffer.recovery.manager import SnapshotManager

    with SnapshotManager(broker, snapshot_topic=snapshot_topic_of(broker, topic)) as keeper:
        keeper.recover()
        keeper.rebuild(topic)


def _recover_decisions(address: str, config: Config, tls_ca: str | None, output: str, *, write: bool) -> None:
    opened = open_for_writing(address, config) if write else open_for_reading(address, config, tls_ca)
    with opened as broker:
        count = shards_of(broker)
        shards = [Shard(number, count) for number in range(count)]
        found = [begin_anew(broker, shard, OWNER) if write else look(broker, shard) for shard in shards]
    rows = [_row(shard, one) for shard, one in zip(shards, found, strict=True)]
    show_rows(rows, output)
    lost = [one for one in found if one.lost is not None]
    if write:
        narrate("\n".join(f"{one.topic} begins anew" for one in lost) or "nothing was lost, nothing was written")
    sys.exit(1 if lost and not write else 0)


def _row(shard: Shard, found: Decisions) -> dict[str, object]:
    return {
        "shard": shard.number,
        "topic": found.topic,
        "lost": found.lost or "",
        "open_transactions": len(found.open_transactions(shard)),
        "committed_in_part": [f"{shard.number}:{least}" for least in found.halves(shard)],
    }
