"""A log for tests of exports, with two topics of random content, and jobs on it, run as commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pipeline_world import Life, records_of

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer.cli.app import app
from txnbuffer.client.reading.records import Record
from txnbuffer.pipeline.exports import LATEST
from txnbuffer.pipeline.jobs import running
from txnbuffer.pipeline.options import reading_options

TOPICS = ("orders", "stock")


def address_of(path: Path) -> str:
    return f"file:{path}/log"


def options_of(path: Path) -> dict[str, str]:
    """Options to read the topics in several tasks."""
    return {**reading_options(address_of(path)), "partition_bytes": "4000"}


@contextmanager
def living(path: Path, steps: int = 40) -> Iterator[list[Life]]:
    """The topics of an embedded log, whose owner is open until the end of the block."""
    with open_broker(address_of(path)) as broker, LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        lives = [Life(broker, manager, topic, seed) for seed, topic in enumerate(TOPICS)]
        for life in lives:
            life.run(steps)
        yield lives


def wanted(broker: Broker, kind: str) -> list[Record]:
    """The expected records of an export, by topic and position."""
    records = [record for topic in TOPICS for record in records_of(broker, topic)]
    if kind == LATEST:
        newest = {(record.topic, record.key): record for record in records if record.key is not None}
        records = [record for record in newest.values() if record.value is not None]
    return sorted(records, key=lambda record: (record.topic, record.position))


def killed(*_: object) -> None:
    """Replaces the step that completes a run."""
    raise KeyboardInterrupt


def run_job(spark: Any, *arguments: str) -> tuple[int, Any, str]:
    """Run a job as a command on this session: its exit code, its result, and its output on stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "session", lambda *_: nullcontext(spark))
        done = CliRunner().invoke(app, ["pipeline", *arguments, "--output", "json"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout), done.stderr
