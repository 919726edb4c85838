"""What `txnbuf tail --stream` does: a change stream, printed."""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.output import narrate, show_line
from txnbuffer.client.changes import Rollback
from txnbuffer.client.connecting import connect
from txnbuffer.client.records import Record
from txnbuffer.client.tokens import FileTokens


def records(
    address: str, options: dict[str, Any], topic: str, start: str, tokens: str | None, *, follow: bool, json: bool
) -> Any:
    """Lists of records as they come, without end if `follow`; asking for the next says that one is done with.

    `options` are those of `connect`.
    A rollback is told on stderr, and in JSON on stdout.
    """
    from_ = "now" if start == "end" else start
    store = None if tokens is None else FileTokens(tokens)
    to = None if follow else "now"
    with (
        connect(address, **options) as client,
        client.stream(topic, from_=from_, to=to, store=store) as stream,
    ):
        for item in stream:
            if isinstance(item, Rollback):
                narrate(f"history branched: what was printed of {topic} behind seqno {item.seqno} is void")
                if json:
                    show_line({"topic": topic, "rollback": item.seqno})
                continue
            yield [
                Record(
                    topic,
                    row.position,
                    row.seqno,
                    row.key,
                    row.value,
                    row.properties,
                    row.event_time,
                    row.publish_time,
                    None,
                )
                for row in item
            ]


def check(topics: tuple[str, ...], isolation: str, limit: int | None, tokens: str | None) -> None:
    """Raises a usage error for what a change stream can't be."""
    if len(topics) != 1:
        raise click.BadParameter("a change stream is of one topic; run one command for each", param_hint="TOPIC…")
    if isolation != "read_committed":
        raise click.BadParameter("a change stream has what committed", param_hint="--isolation")
    if limit is not None and tokens is not None:
        text = "it would cut a batch, and resume tokens stand between batches: give one of --limit and --tokens"
        raise click.BadParameter(text, param_hint="--limit")
