"""One real broker for all Pulsar figures of a run, with its own transactions switched on for the native peer."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.service_process import started
from broker_io.testing.standalone import Standalone, StandaloneProcess, ask

PATIENCE = 3600.0
SETTINGS = ["transactionCoordinatorEnabled=true"]
DRIVER = Path(__file__).parent / "native" / "NativeTransactions.java"
DISTRIBUTION = Path(__file__).parents[1] / "docker" / "distribution.sh"


@functools.cache
def home() -> Path:
    """The server distribution, fetched if it is not there."""
    done = subprocess.run([DISTRIBUTION], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@functools.cache
def broker() -> Standalone:
    """A standalone that runs until this process ends."""
    directory = tempfile.TemporaryDirectory(prefix="txnbuffer-bench-")
    made = StandaloneProcess(home(), Path(directory.name), SETTINGS)
    atexit.register(directory.cleanup)
    atexit.register(made.remove)
    made.start()
    return made


@contextmanager
def service(
    address: str, *arguments: str, event: str = "serving"
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`txnbuf serve` beside the broker, once it told an event, and what it told with it."""
    command = [sys.executable, "-m", "txnbuffer", "serve", address, "--listen", "127.0.0.1:0"]
    command += ["--http", "127.0.0.1:0", "--admin-url", broker().admin, *arguments]
    with started(command, event) as told:
        yield told


def native(what: str, *arguments: object) -> float:
    """Run the native driver; the transactions a second that it tells."""
    command = ["java", "-cp", f"{home()}/lib/*", str(DRIVER), what, broker().url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"the native driver failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def native_buffer(topic: str) -> dict[str, Any]:
    """What the broker tells of the native transaction buffer of `TENANT/NAMESPACE/TOPIC`, which it loads if need be.

    Empty while it does not tell.
    """
    with contextlib.suppress(OSError):  # it loads the topic, and is asked again
        ask(broker().admin, f"persistent/{topic}/stats")
        with urllib.request.urlopen(f"{broker().admin}/admin/v3/transactions/transactionBufferStats/{topic}") as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told
    return {}
