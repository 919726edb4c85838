"""A real broker for the Pulsar figures of a run, with its own transactions switched on for the native peer."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from bench.brokers import Brokers
from bench.service_process import started
from broker_io.testing.standalone import ENVIRONMENT, Standalone, StandaloneProcess, ask

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT = 3600.0
LEAST_DIRECT, MOST_DIRECT = 1024, 4096
"""MiB of direct memory: a broker runs with the first, and aborts the transactions of the figures with the second."""
SETTINGS = ["transactionCoordinatorEnabled=true"]
DRIVER = Path(__file__).parent / "native" / "NativeTransactions.java"
DISTRIBUTION = Path(__file__).parents[1] / "docker" / "distribution.sh"


@functools.cache
def home() -> Path:
    """The server distribution, fetched if it is not there."""
    done = subprocess.run([DISTRIBUTION], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def memory(megabytes: int) -> str:
    """What a broker gets of a machine that has so many: what many native aborts take, a quarter of it at most."""
    direct = max(LEAST_DIRECT, min(MOST_DIRECT, megabytes // 4))
    return f"-Xms256m -Xmx1g -XX:MaxDirectMemorySize={direct}m"


def make(directory: Path) -> StandaloneProcess:
    megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return StandaloneProcess(home(), directory, SETTINGS, {**ENVIRONMENT, "PULSAR_MEM": memory(megabytes)})


@functools.cache
def brokers() -> Brokers:
    """The brokers of this process, the last of which ends with it."""
    made = Brokers(make)
    atexit.register(made.end)
    return made


def broker() -> Standalone:
    """A standalone for the figure that is being measured."""
    return brokers().current()


def once_per_broker(prepare: Callable[P, T]) -> Callable[P, T]:
    """Prepare something on the broker once, and once again on each fresh broker."""
    prepared: dict[tuple[object, ...], T] = {}

    @functools.wraps(prepare)
    def found(*arguments: P.args, **named: P.kwargs) -> T:
        key = (broker().url, *arguments, *named.items())
        if key not in prepared:
            prepared[key] = prepare(*arguments, **named)
        return prepared[key]

    return found


@contextmanager
def service(
    address: str, *arguments: str, event: str = "serving"
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`txnbuf serve` on the broker, once it has logged an event, and the fields of that event."""
    command = [sys.executable, "-m", "txnbuffer", "serve", address, "--listen", "127.0.0.1:0"]
    command += ["--http", "127.0.0.1:0", "--admin-url", broker().admin, *arguments]
    with started(command, event) as told:
        yield told


def native(what: str, *arguments: object) -> float:
    """Run the native driver; return the transactions per second that it prints."""
    command = ["java", "-cp", f"{home()}/lib/*", str(DRIVER), what, broker().url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MAX_WAIT)
    if done.returncode:
        raise RuntimeError(f"the native driver failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def native_buffer(topic: str) -> dict[str, Any]:
    """The broker's statistics of the native transaction buffer of `TENANT/NAMESPACE/TOPIC`, loaded if needed.

    Empty while the broker has none.
    """
    with contextlib.suppress(OSError):  # it loads the topic, and is asked again
        ask(broker().admin, f"persistent/{topic}/stats")
        with urllib.request.urlopen(f"{broker().admin}/admin/v3/transactions/transactionBufferStats/{topic}") as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told
    return {}
