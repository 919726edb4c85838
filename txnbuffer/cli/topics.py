"""`txnbuf topics`: topics are listed, described, created and deleted"""

from __future__ import annotations

import sys

import click

from broker_io import is_cluster
from broker_io.port import PartitionedBroker
from snapshots.format import check_data_topic
from txnbuffer.cli.admin import describe_command, list_command
from txnbuffer.cli.admin_client import changed
from txnbuffer.cli.commands import CommandGroup, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import output_option, show_record
from txnbuffer.errors import InvalidRequest

MAX_PARTITIONS = 10_000


@click.group("topics", cls=CommandGroup)
def topics_command() -> None:
    """List, describe, create and delete topics.

    A topic need not be created before its first record: the first write does that.
    """


topics_command.add_command(list_command)
topics_command.add_command(describe_command)


@topics_command.command("create")
@address_argument
@topic_argument()
@click.option("--partitions", type=click.IntRange(1, MAX_PARTITIONS), metavar="N",
              help="Create a topic with N partitions, on a cluster.")  # fmt: skip
@log_options
@output_option
def create_topic(topic: str, partitions: int | None, log: LogAddress, output: str) -> None:
    """Create TOPIC, without records. It must not exist; topics of an embedded log have no partitions."""
    from txnbuffer.client.topic_names import check_topic

    log.check_not_in_memory()
    check_data_topic(check_topic(topic))
    if partitions is not None and not is_cluster(log.address):
        raise InvalidRequest(
            f"--partitions {partitions} needs pulsar://HOST:PORT/TENANT/NAMESPACE: topics of an embedded log have no "
            "partitions, create it without"
        )
    with log.open_for_writing() as broker:
        whole = broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
        if whole or topic in broker.topics():
            what = f" with {whole} partitions" if whole else ""
            raise InvalidRequest(f"topic {topic!r} exists already{what}: choose another name, or use it as it is")
        if isinstance(broker, PartitionedBroker) and partitions is not None:
            broker.partition(topic, partitions)
        else:
            broker.create_topic(topic)
    show_record({"topic": topic, "partitions": partitions}, output)


@topics_command.command("delete")
@address_argument
@topic_argument()
@click.option("--yes", is_flag=True, help="Do not ask.")
@log_options
@output_option
def delete_topic(topic: str, yes: bool, log: LogAddress, output: str) -> None:
    """Delete TOPIC with all its records, for all readers. Nothing brings them back.

    Nothing is deleted, and the reasons are named, while a transaction is open on the topic, a change stream reads it,
    a consumer group has a position on it (`txnbuf groups forget`), or a durable cursor is on it (`txnbuf cursors
    remove`). With file:DIR the command owns the log meanwhile.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(f"topic {topic!r} is not deleted without a question: give --yes, or use a terminal")
        if not click.confirm(f"Delete topic {topic!r} with all its records?", err=True):
            raise InvalidRequest(f"topic {topic!r} was not deleted")
    show_record(changed(log, "DeleteTopic", topic=topic), output)
