"""Limits of the product that a seed makes small, so that its small world reaches what else only large ones do.

They are module constants which no stored format and no other program relies on: how much is kept in memory, sent or
written at once, and when logs are compacted. A world of sixty transactions would never seal a segment, compact a log,
split a commit's records into several sends, or read anything again that did not fit into memory.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from unittest import mock

SMALL = {
    "broker_io.filelog.log.log.FLUSH_BYTES": 64,
    "snapshots.writer.COMPACT_BYTES": 2000,
    "txnbuffer.client.reading.followers.MAX_BUFFERED_BYTES": 400,
    "txnbuffer.client.path.record_path.FRAME_BYTES": 200,
    "txnbuffer.client.path.record_path.GROUP": 2,
    "txnbuffer.client.path.record_path.SEND_BYTES": 300,
    "txnbuffer.client.session.session_requests.COLLECT_BYTES": 200,
    "txnbuffer.client.transaction.CHUNK": 1,
    "txnbuffer.client.path.writers.CREDITS": 300,
    "txnbuffer.coordinator.core.MAX_ITEMS": 2,
    "txnbuffer.follow.STEP_MESSAGES": 3,
    "txnbuffer.mutations.manager.MIN_SNAPSHOT_BYTES": 300,
    "txnbuffer.service.topics.appends.BACKLOG_BYTES": 300,
    "txnbuffer.service.topics.appends.FLIGHT_BYTES": 200,
    "txnbuffer.service.topics.appends.UNIT_BYTES": 300,
    "txnbuffer.service.door.connection.SMALLEST_CREDIT": 300,
    "txnbuffer.service.log_readers.LEAST_HELD": 200,
    "txnbuffer.service.log_readers.READ_MESSAGES": 3,
    "txnbuffer.service.topics.retention.COMPACT_BYTES": 2000,
    "txnbuffer.service.streams.streams.ANSWER_BYTES": 100,
    "txnbuffer.service.streams.streams.READ_MESSAGES": 3,
    "txnbuffer.service.streams.streams.TURN_ITEMS": 2,
    "txnbuffer.service.standby.takeover.MAX_ENTRY_BYTES": 1600,
    "txnbuffer.service.standby.takeover.SEGMENT_SIZE": 3,
    "txnbuffer.service.topics.topics.LEAST_HELD": 200,
    "txnbuffer.service.standby.warm_topics.AGAIN_AFTER": 0.5,
    "txnbuffer.service.standby.warm_topics.RENEW_AFTER": 0.5,
    "txnbuffer.service.standby.warm_topics.STEP": 0.2,
    "txnbuffer.service.standby.warm_topics.TAIL_BYTES": 300,
}
RELATED = {
    "txnbuffer.mutations.manager.MIN_SNAPSHOT_BYTES": ("txnbuffer.service.streams.stream_topic.MIN_SNAPSHOT_BYTES",),
    "txnbuffer.service.log_readers.LEAST_HELD": ("txnbuffer.service.log_readers.HELD_BYTES",),
    "txnbuffer.service.topics.topics.LEAST_HELD": ("txnbuffer.service.topics.topics.HELD_BYTES",),
}
"""Others that have to be as small, because the larger one of both counts."""


@contextlib.contextmanager
def small_sizes(choose: random.Random, log: Callable[[str, str], None]) -> Iterator[None]:
    """Make some limits small for a block; in a third of the seeds none."""
    chosen = [name for name in SMALL if choose.random() < 0.4] if choose.random() < 0.67 else []
    with contextlib.ExitStack() as stack:
        for name in chosen:
            for each in (name, *RELATED.get(name, ())):
                module, _, constant = each.rpartition(".")
                stack.enter_context(mock.patch.object(importlib.import_module(module), constant, SMALL[name]))
            log("sizes", f"{name} = {SMALL[name]}")
        yield
