"""A real broker for the Pulsar figures of a run, with Pulsar's own transactions enabled for the native peer."""

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
from broker_io.standalone import ENVIRONMENT, Standalone, StandaloneProcess, ask

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT = 3600.0
LEAST_DIRECT, MOST_DIRECT = 1024, 4096
"""MiB of direct memory: the default of a broker, and enough for the native aborts of the figures."""
SETTINGS = ["transactionCoordinatorEnabled=true"]
DRIVER = Path(__file__).parent / "native" / "NativeTransactions.java"
DISTRIBUTION = Path(__file__).parents[1] / "docker" / "distribution.sh"


@functools.cache
def home() -> Path:
    """The directory of the server distribution, downloaded if it is missing."""
    done = subprocess.run([DISTRIBUTION], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def memory(megabytes: int) -> str:
    """Memory options of a broker on a machine with this memory: a quarter of it as direct memory, within limits."""
    direct = max(LEAST_DIRECT, min(MOST_DIRECT, megabytes // 4))
    return f"-Xms256m -Xmx1g -XX:MaxDirectMemorySize={direct}m"


def make(directory: Path) -> StandaloneProcess:
    megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return StandaloneProcess(home(), directory, SETTINGS, {**ENVIRONMENT, "PULSAR_MEM": memory(megabytes)})


@functools.cache
def brokers() -> Brokers:
    """The brokers of this process; the last one ends with the process."""
    made = Brokers(make)
    atexit.register(made.end)
    return made


def broker() -> Standalone:
    """The standalone broker for the current figure."""
    return brokers().current()


def once_per_broker(prepare: Callable[P, T]) -> Callable[P, T]:
    """Call a function once for each broker and set of arguments."""
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
    """`txnbuf serve` on the broker after it has logged an event, and the fields of that event."""
    command = [sys.executable, "-m", "txnbuffer", "serve", address, "--listen", "127.0.0.1:0"]
    command += ["--http", "127.0.0.1:0", "--admin-url", broker().admin, *arguments]
    with started(command, event) as process_and_fields:
        yield process_and_fields


def native(what: str, *arguments: object) -> float:
    """Run the native driver; the transactions per second that it prints."""
    command = ["java", "-cp", f"{home()}/lib/*", str(DRIVER), what, broker().url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MAX_WAIT)
    if done.returncode:
        raise RuntimeError(f"the native driver failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def native_buffer(topic: str) -> dict[str, Any]:
    """The broker's statistics of the native transaction buffer of `TENANT/NAMESPACE/TOPIC`, loaded if needed.

    Empty while the broker has none.
    """
    with contextlib.suppress(OSError):  # the topic is being loaded; the caller retries
        ask(broker().admin, f"persistent/{topic}/stats")
        with urllib.request.urlopen(f"{broker().admin}/admin/v3/transactions/transactionBufferStats/{topic}") as answer:
            statistics: dict[str, Any] = json.loads(answer.read())
            return statistics
    return {}
