"""`txnbuf recover`: a buffer's state from its log alone, beside what the snapshot says."""

from __future__ import annotations

import sys

import click

from broker_io.port import Broker
from snapshots.keys import check_data_topic
from snapshots.rebuilding import from_snapshot
from snapshots.shards import snapshot_topic_of
from snapshots.verify import diff_states, rebuild
from txnbuffer.buffer import PART_SIZE
from txnbuffer.cli.opening import address_argument, open_for_reading, open_for_writing, tls_option, with_config
from txnbuffer.cli.output import narrate, output_option, show_record
from txnbuffer.config import Config


@click.command("recover")
@address_argument
@click.argument("topic")
@click.option(
    "--write", is_flag=True, help="Write the rebuilt state as the topic's snapshot (needs the log to itself)."
)
@tls_option
@with_config
@output_option
def command(address: str, topic: str, write: bool, tls_ca: str | None, config: Config, output: str) -> None:
    """Rebuild the state of TOPIC from its log and show how it differs from the snapshot.

    The log is folded from its first ledger to its end; the snapshot is restored and the log behind it
    applied. Exit code 1 if the two differ or the snapshot can't be used. With --write the rebuilt state
    takes the snapshot's place; where ledgers were trimmed, what only they told is given up.
    """
    check_data_topic(topic)
    with open_for_reading(address, config, tls_ca) as broker:
        restored, problem = from_snapshot(broker, topic)
        part_size = PART_SIZE if restored is None else restored.parts.part_size
        rebuilt, sequencer = rebuild(broker, topic, part_size=part_size, until=broker.last_position(topic))
        if restored is not None:
            rebuilt.trim(restored.first_ledger)
        differences = [problem] if restored is None else diff_states(restored, rebuilt)
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
    if not write:
        sys.exit(1 if differences else 0)
    with open_for_writing(address, config) as broker:
        _write(broker, topic)
    narrate(f"the rebuilt state is now the snapshot of {topic}")


def _write(broker: Broker, topic: str) -> None:
    from snapshots.keeper import BufferKeeper

    with BufferKeeper(broker, snapshot_topic=snapshot_topic_of(broker, topic)) as keeper:
        keeper.recover()
        keeper.rebuild(topic)
