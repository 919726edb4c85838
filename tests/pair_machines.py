"""Two machines of a pair on this one, for soaks: services, disks, an etcd, and proxies between all of them.

Each machine has a disk of its own (a small file system in memory, if this user may mount one), a proxy through which
its service reaches the other machine, and a proxy through which it reaches etcd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etcd_server import EtcdServer
from fault_proxy import FaultProxy
from service_process import ServiceProcess, kept_port
from stress.processes import settings, wait_until

from broker_io.errors import Error
from broker_io.filelog.pair import open_lock
from broker_io.filelog.replication.lock import LockRecord
from txnbuffer.cli.admin_client import ServiceAddress, call

LEASE = 4.0
DISK_MIB = 1024
WATERMARK = 4 * 1024 * 1024
SETTINGS = settings(
    f"pair.lease_seconds={LEASE:g}",
    f"log.watermark_bytes={WATERMARK}",
    "log.segment_bytes=1000000",
    "transactions.session_timeout=20",
    "snapshots.changes=500",
    "service.drain_seconds=20",
)
SERVING = ("live", "switching")
ASK_SECONDS = 2.0


class SmallDisk:
    """A directory; with `mount` a file system of its own, which can be filled, if this user may mount one."""

    def __init__(self, path: Path, *, mount: bool) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "txnbuffer-soak", str(path)]
        possible = mount and shutil.which("mount") is not None
        self.mounted = possible and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self, left: int) -> None:
        """Leave so many bytes."""
        found = os.statvfs(self.path)
        size = found.f_bavail * found.f_frsize - left
        with contextlib.suppress(OSError), (self.path / "ballast").open("ab") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, max(size, 1))

    def free(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


class Machine:
    """One of a pair; `service` is its running service, `ended` are its earlier ones with their exit codes."""

    def __init__(self, directory: Path, name: str, etcd: EtcdServer, *, mount: bool) -> None:
        self.name = name
        self.disk = SmallDisk(directory / name, mount=mount)
        self.log = self.disk.path / "log"
        self.port, self.listen = kept_port(), kept_port()
        self.lock = FaultProxy(etcd.port)
        self.link = FaultProxy(0)
        self.service: ServiceProcess
        self.paused = False

    @property
    def address(self) -> ServiceAddress:
        return ServiceAddress(f"127.0.0.1:{self.port}")

    def start(self, *, found: bool = False) -> None:
        flags = [
            f"--pair-lock=etcd://{self.lock.address}/soak", f"--pair-listen=127.0.0.1:{self.listen}",
            f"--backup-of={self.link.address}", *(["--found"] if found else []), *SETTINGS,
        ]  # fmt: skip
        self.service = ServiceProcess(self.log, *flags, port=self.port)
        self.paused = False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.service.process.send_signal(number)
        self.paused = number == signal.SIGSTOP or (self.paused and number != signal.SIGCONT)

    def kill(self) -> None:
        self.service.kill()

    def status(self) -> dict[str, Any] | None:
        """What the machine says of the pair; None if it does not answer."""
        if self.paused or self.service.process.poll() is not None:
            return None
        try:
            facts: dict[str, Any] = call(self.address, "Replication", timeout=ASK_SECONDS)
        except Error:
            return None
        return facts or None

    @property
    def serves(self) -> bool:
        facts = self.status()
        return facts is not None and facts["role"] in SERVING

    @contextlib.contextmanager
    def failing_syncs(self) -> Iterator[None]:
        """Let each sync of the service fail with EIO."""
        command = ["strace", "-f", "-qq", "-o", os.devnull, "-p", str(self.service.process.pid)]
        command += ["-e", "trace=fdatasync,fsync", "-e", "inject=fdatasync,fsync:error=EIO"]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            tracer.kill()
            tracer.wait()

    def delete(self) -> None:
        """Delete the directory of the log."""
        shutil.rmtree(self.log)

    def close(self) -> None:
        if hasattr(self, "service") and self.service.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.service.kill()
        self.disk.close()


class PairOfMachines:
    """Both machines and their etcd; the first one founds the pair."""

    def __init__(self, directory: Path, *, mount: bool = False) -> None:
        (directory / "etcd").mkdir()
        with contextlib.ExitStack() as stack:
            self.etcd = stack.enter_context(EtcdServer(directory / "etcd"))
            self.machines = [Machine(directory, name, self.etcd, mount=mount) for name in ("a", "b")]
            first, second = self.machines
            first.link.target, second.link.target = second.listen, first.listen
            for machine in self.machines:
                stack.callback(machine.close)
                stack.enter_context(machine.lock)
                stack.enter_context(machine.link)
            first.start(found=True)
            second.start()
            self._stack = stack.pop_all()

    @property
    def address(self) -> str:
        """The address for clients."""
        return "txnbuf://" + ",".join(machine.address.address for machine in self.machines)

    def live(self) -> Machine:
        """Wait for the machine that serves."""
        wait_until(lambda: any(each.serves for each in self.machines), "nobody serves")
        return next((each for each in self.machines if each.serves), self.machines[0])

    def other(self, machine: Machine) -> Machine:
        return self.machines[1 - self.machines.index(machine)]

    def in_sync(self) -> bool:
        """Whether both machines have everything that is acknowledged."""
        found = [machine.status() for machine in self.machines]
        stores = {facts["store"] for facts in found if facts is not None}
        return any(
            facts is not None and facts["role"] in SERVING and len(stores) == 2 and {*facts["in_sync"]} == stores
            for facts in found
        )

    def record(self) -> LockRecord:
        """The record of the lock, read without a proxy."""
        lock = open_lock(f"etcd://{self.etcd.address}/soak")
        try:
            return lock.read().record
        finally:
            lock.close()

    def close(self) -> None:
        self._stack.close()


class Lives:
    """Who was seen live in which epoch.

    `two_lives`: epochs in which two stores were live. `stale`: a machine that held a valid lease when it was asked,
    after the other one had been seen live in a later epoch.
    """

    def __init__(self) -> None:
        self.stores: dict[int, set[str]] = {}
        self.stale: list[str] = []
        self.seen = 0
        self._greatest = 0

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """What a machine said of itself; it was asked after all earlier answers."""
        if facts["role"] not in SERVING:
            return
        epoch = int(facts["epoch"])
        self.seen += 1
        self.stores.setdefault(epoch, set()).add(facts["store"])
        if epoch < self._greatest and facts["lease_left"] > 0:
            self.stale.append(f"{name} serves in epoch {epoch} after {self._greatest}")
        self._greatest = max(self._greatest, epoch)

    @property
    def two_lives(self) -> int:
        return sum(len(stores) > 1 for stores in self.stores.values())


class Watcher(threading.Thread):
    """Asks both machines all the time, and notes who is live."""

    def __init__(self, pair: PairOfMachines) -> None:
        super().__init__(daemon=True)
        self.lives = Lives()
        self._pair = pair
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(0.1):
            for machine in self._pair.machines:
                if (facts := machine.status()) is not None:
                    self.lives.note(machine.name, facts)

    def stop(self) -> None:
        self._stopping.set()
        if self.ident is not None:
            self.join(60)


def wait_exit(machine: Machine, seconds: float) -> int | None:
    """The exit code of the machine's service, or None if it does not end in this time."""
    until = time.monotonic() + seconds
    while (code := machine.service.process.poll()) is None and time.monotonic() < until:
        time.sleep(0.05)
    return code
