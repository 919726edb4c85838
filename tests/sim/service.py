"""The service and its clients in a simulated world: `txnbuf serve` itself, on a simulated host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sim.cluster import ADDRESS
from sim.world import Host, Process

from broker_io import open_broker
from broker_io.errors import PeerError
from broker_io.filelog.log import FileBroker
from broker_io.port import Broker
from txnbuffer.config import Config
from txnbuffer.service.process import serve

DIRECTORY = "/log"
PORT = 7711


@dataclass(slots=True)
class Service:
    """How a service is started on a host; `start` starts it once more.

    A service of an embedded log has its host to itself: it must not end with an error that sends its supervisor to look
    for another owner. A failed disk, for instance, is an error of the storage.
    """

    host: Host
    config: Config
    open_log: Callable[[], Broker]
    cluster_mode: bool = False
    on_take_over: Callable[[int, int, str], None] = lambda shard, epoch, process: None
    """Called with shard, epoch and process when a process of it has taken over, and will answer."""
    processes: list[Process] = field(default_factory=list)
    held: bool = False
    """Whether nobody starts it again."""
    error: Exception | None = None
    """The error with which its newest process ended."""

    @property
    def running(self) -> Process | None:
        """Its process, if it has not ended."""
        return self.processes[-1] if self.processes and not self.processes[-1].dead else None

    @property
    def address(self) -> str:
        return f"{self.host.name}:{PORT}"

    def start(self) -> Process:
        """Start a process of the service. It ends with an error of the service, as `txnbuf serve` does."""
        world = self.host.world

        def log(event: str, **facts: Any) -> None:
            if event == "took over":
                self.on_take_over(max(self.config.service.shard, 0), facts["epoch"], process.name)
                for _ in range(facts["warm"]):
                    world.count("warm topic")
                for _ in range(facts["cold"]):
                    world.count("discarded warm topic")
            world.log(process.name, f"{event} {' '.join(f'{name}={fact}' for name, fact in facts.items())}".rstrip())

        async def main() -> None:
            try:
                self.error = await serve(
                    self.open_log, self.config, self.host.name, log, cluster_mode=self.cluster_mode
                )
            except Exception as error:
                self.error = error
                log("ends", error=repr(error))
            if isinstance(self.error, PeerError) and not self.cluster_mode:
                world.fail(f"{process.name} ended with {self.error!r}, and no other process can have its log")

        self.error = None
        process = self.host.start("service", main)
        self.processes.append(process)
        return process


def on_cluster(host: Host, shard: int = -1, shards: int = 1) -> Service:
    """A service of a simulated cluster, which waits while another one of its shard is active."""
    config = Config()
    service = replace(config.service, listen=f"{host.name}:{PORT}", http="", insecure=True, standby=True)
    service = replace(service, shard=shard, shards=shards)
    return Service(host, replace(config, service=service), lambda: open_broker(ADDRESS), cluster_mode=True)


def embedded(host: Host, *, listen: str = "", **log_options: Any) -> Service:
    """A service of an embedded log on the disk of its host."""
    config = Config()
    service = replace(config.service, listen=listen or f"{host.name}:{PORT}", http="", insecure=True)
    return Service(host, replace(config, service=service), lambda: FileBroker.open(DIRECTORY, **log_options))
