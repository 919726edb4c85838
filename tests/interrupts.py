"""Transactions of the sync client that an interval timer interrupts: what the program is told, and what the log has.

    PYTHONPATH=tests python tests/interrupts.py --blocks 600 --seed 1
    PYTHONPATH=tests python tests/interrupts.py --reads 600 --seed 1

For each class of exception and each kind of log it runs as many `with` blocks, and raises one to three exceptions at
random moments of each. It prints a line of counts for each, and ends with 1 if the log has what a program was told that
it has not, or the reverse, or if a transaction is still open.

With `--reads` it interrupts readers of a service instead, while they are opened, read and closed, and ends with 1 if
one raises another exception or if threads of readers stay.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from txnbuffer import SyncClient, connect
from txnbuffer.errors import Error
from txnbuffer.testing import ServiceProcess


class SoftLimit(Exception):
    """As the soft time limit of a job queue."""


class Stop(BaseException):
    """An exception that no `except Exception` catches."""


CLASSES: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, SoftLimit, Stop, TimeoutError)
RECORDS = 3
ENDS_WITHIN = 30.0
COMMITTED, ABORTED, UNKNOWN = "committed", "aborted", "unknown"
UNSURE = ("may have committed", "may still take effect", "OutcomeUnknown")


class Interrupter:
    """Raises an exception in the main thread at random moments."""

    def __init__(self, kind: type[BaseException], choose: random.Random) -> None:
        self.left = 0
        self.kind = kind
        self._choose = choose
        signal.signal(signal.SIGALRM, self._raise)

    def arm(self) -> None:
        self.left = self._choose.choice((1, 1, 2, 3))
        delay, interval = (self._choose.uniform(0.0002, 0.005) for _ in range(2))
        signal.setitimer(signal.ITIMER_REAL, delay, interval)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.left:
            self.left -= 1
            raise self.kind


def run_block(
    client: SyncClient, topic: str, number: int, interrupter: Interrupter
) -> tuple[str, BaseException | None]:
    """Run one block; return what the program is told, and the exception."""
    raised: BaseException | None = None
    told = ABORTED
    try:
        interrupter.arm()
        with client.transaction() as txn:
            for part in range(RECORDS):
                txn.send(topic, f"{number}-{part}")
        told = COMMITTED
        interrupter.left = 0
    except BaseException as error:
        interrupter.left = 0
        raised = error
    signal.setitimer(signal.ITIMER_REAL, 0)
    if raised is not None:
        notes = " ".join(getattr(raised, "__notes__", ()))
        told = UNKNOWN if any(text in notes for text in UNSURE) else COMMITTED if "has committed" in notes else ABORTED
        if not isinstance(raised, (interrupter.kind, Error)):
            told = "left by another exception"
    return told, "".join(traceback.format_exception(raised)) if raised else ""


def records_of(client: SyncClient, topic: str) -> Counter[str]:
    """All visible records, by the number of their block. They are visible at once if no transaction is open."""
    client.send(topic, "end-0")
    seen: Counter[str] = Counter()
    with client.reader(topic) as reader:
        for record in reader.records(timeout=ENDS_WITHIN):
            seen[record.value.decode().partition("-")[0]] += 1
            if seen["end"]:
                return seen
    raise AssertionError(f"a transaction was still open on {topic} after {ENDS_WITHIN} s")


def interrupted(
    client: SyncClient, kind: type[BaseException], blocks: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Interrupt blocks; return how many had each outcome, and what is wrong."""
    topic = f"t{seed}-{kind.__name__}"
    interrupter = Interrupter(kind, random.Random(f"{seed} {kind.__name__}"))
    told = [run_block(client, topic, number, interrupter) for number in range(blocks)]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    until = time.monotonic() + ENDS_WITHIN
    while client.client.sessions.open_transactions and time.monotonic() < until:
        time.sleep(0.01)
    wrong = [f"{client.client.sessions.open_transactions} open"] if client.client.sessions.open_transactions else []
    seen = records_of(client, topic)
    counts: Counter[str] = Counter()
    for number, (outcome, raised) in enumerate(told):
        found = {0: ABORTED, RECORDS: COMMITTED}.get(seen[str(number)], f"{seen[str(number)]} records")
        counts[f"{'left by it, ' if raised else ''}{outcome}"] += 1
        if found != outcome and (outcome != UNKNOWN or found not in (ABORTED, COMMITTED)):
            wrong.append(f"block {number} was told {outcome}, but is {found}: {raised}")
    return counts, wrong


def interrupted_reads(address: str, reads: int, seed: int) -> list[str]:
    """Interrupt readers of a service; return the names of their threads that stay."""
    interrupter = Interrupter(Stop, random.Random(seed))
    with connect(address) as client:
        client.send("p", "v")
        for _ in range(reads):
            with suppress(Stop):
                interrupter.arm()
                with client.reader("p") as reader:
                    reader.read(timeout=0.01)
                interrupter.left = 0
            interrupter.left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        until = time.monotonic() + ENDS_WITHIN
        while (left := [one.name for one in threading.enumerate() if "answers" in one.name]) and (
            time.monotonic() < until
        ):
            time.sleep(0.01)
    return left


@contextmanager
def log(kind: str, directory: Path) -> Iterator[str]:
    """The address of a log."""
    if kind == "file":
        yield f"file:{directory / 'log'}"
        return
    service = ServiceProcess(str(directory))
    service.start()
    try:
        yield service.address
    finally:
        service.stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--reads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", choices=("file", "service"), action="append")
    options = parser.parse_args()
    if options.reads:
        with tempfile.TemporaryDirectory() as directory, log("service", Path(directory)) as address:
            left = interrupted_reads(address, options.reads, options.seed)
        print(f"{options.reads} interrupted reads; threads that stay: {left}")
        return bool(left)
    failed = False
    for place in options.log or ("file", "service"):
        with (
            tempfile.TemporaryDirectory() as directory,
            log(place, Path(directory)) as address,
            connect(address) as client,
        ):
            for kind in CLASSES:
                began = time.monotonic()
                counts, wrong = interrupted(client, kind, options.blocks, options.seed)
                seconds = time.monotonic() - began
                print(f"{place} {kind.__name__}: {dict(sorted(counts.items()))} in {seconds:.1f} s", flush=True)
                print("\n".join(wrong[:20]), end="\n" if wrong else "", flush=True)
                failed = failed or bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main())
