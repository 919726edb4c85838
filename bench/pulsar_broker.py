"""One real broker for all Pulsar figures of a run, with its own transactions switched on for the native peer."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.service_process import serving
from broker_io.testing.standalone import Standalone, StandaloneProcess

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
    started = StandaloneProcess(home(), Path(directory.name), ["transactionCoordinatorEnabled=true"])
    atexit.register(directory.cleanup)
    atexit.register(started.remove)
    started.start()
    return started


@contextmanager
def service(address: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`txnbuf serve` beside the broker, once it serves."""
    command = [sys.executable, "-m", "txnbuffer", "serve", address, "--listen", "127.0.0.1:0", "--http", ""]
    with serving([*command, "--set", f"pulsar.admin_url={broker().admin}", *arguments]) as (process, _):
        yield process


def native(what: str, *arguments: object) -> float:
    """Run the native driver; the transactions a second that it tells."""
    command = ["java", "-cp", f"{home()}/lib/*", str(DRIVER), what, broker().url, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the native driver failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])
