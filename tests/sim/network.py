"""The network of a simulated world: connections between processes, in order, with delays and losses.

A connection carries items in both directions, each in order. It breaks for its two ends at different times: an end
notices when it is reset, or when a keepalive stays without an answer, because the hosts are partitioned or the other
process does not run. Between break and notice it is half open. A partition may be of one direction: what is sent there
is held back until it ends, or lost with the connection, and the other direction goes on as long as the connection does.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.rpc_server import Server
    from sim.world import Process, World

DELAY = 0.0005
"""Seconds that an item takes, at least; most take up to twice as long."""
KEEPALIVE = 15.0
"""Seconds after which an end notices that the other one does not answer."""
SERVER_END, CLIENT_END = 0, 1


class Connection:
    """A connection of a client with a server. `receive` of each end takes what arrives there."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.server: Server | None = None
        """The one that listens, as a process may have several."""
        self.ends = (server, client)
        self.lost = [False, False]
        self.on_loss: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        self._last = [0.0, 0.0]
        self._held: list[tuple[int, Callable[[], None]]] = []

    @property
    def name(self) -> str:
        return f"{self.ends[CLIENT_END].name}-{self.ends[SERVER_END].name}"

    def send(self, to: int, what: str, deliver: Callable[[], None]) -> None:
        """Send an item to an end; `deliver` is called there when it arrives."""
        network = self.network
        if self.lost[1 - to] or self.ends[1 - to].dead:
            return
        network.maybe_break(self)
        if self.lost[1 - to]:
            return
        arrival = max(self._last[to], network.world.now + network.delay())
        self._last[to] = arrival
        network.world.scheduler.at(arrival, lambda: self._arrive(to, what, deliver))

    def _arrive(self, to: int, what: str, deliver: Callable[[], None]) -> None:
        self._pass(to, lambda: self._deliver(to, what, deliver))

    def _pass(self, to: int, deliver: Callable[[], None]) -> None:
        """Deliver something, unless a partition holds it or something before it back."""
        if self.network.blocked(self, to) or any(end == to for end, _ in self._held):
            self._held.append((to, deliver))
        else:
            deliver()

    def _deliver(self, to: int, what: str, deliver: Callable[[], None]) -> None:
        if self.lost[to] or self.ends[to].dead:
            if not self.lost[1 - to]:  # the sender is reset
                reset = lambda: self._pass(1 - to, lambda: self.lose(1 - to))  # noqa: E731
                self.network.world.scheduler.after(self.network.delay(), reset)
            return
        if self.network.echo:
            self.network.world.log("net", f"{self.ends[1 - to].name} > {self.ends[to].name} {what}")
        deliver()

    def heal(self) -> None:
        """Deliver what was held back by a partition."""
        held, self._held = self._held, []
        for _, deliver in held:
            deliver()

    def lose(self, end: int) -> None:
        """Let an end notice that the connection is lost."""
        if not self.lost[end]:
            self.lost[end] = True
            if self.lost[1 - end]:
                self.network.connections.pop(self, None)
            if not self.ends[end].dead:
                for call in self.on_loss[end]:
                    call()

    def break_off(self, first: float = 0.0, second: float = 0.0) -> None:
        """Break it: the server's end notices after `first` seconds, the client's after `second`."""
        for end, seconds in ((SERVER_END, first), (CLIENT_END, second)):
            if seconds <= 0:
                self.lose(end)
            else:
                self.network.world.scheduler.after(seconds, lambda end=end: self.lose(end))


class Network:
    """All connections of a world, and the faults of its network."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: dict[Connection, None] = {}
        self.servers: dict[tuple[str, int], Server] = {}
        self.listeners: dict[tuple[str, int], Callable[[str], bool]] = {}
        """Ports of other servers: whether a host of a name can connect to them."""
        self.echo = True
        self.loss = 0.0
        """The probability that a connection breaks while an item is sent."""
        self.slow = 0.0
        """The probability that an item takes up to a second."""
        self._cut: dict[tuple[str, str], None] = {}
        """Pairs of hosts: what the first one sends does not reach the second one."""
        self._random = world.random("network")

    def delay(self) -> float:
        """The seconds that the next item takes."""
        choose = self._random.random
        if self.slow and choose() < self.slow:
            self.world.count("slow message")
            return choose()
        return DELAY * (1.0 + choose())

    def maybe_break(self, connection: Connection) -> None:
        """Sometimes break a connection that is about to carry an item: before the item, or after it."""
        choose = self._random.random
        if not self.loss or choose() >= self.loss:
            return
        kind = choose()
        seconds = (0.0, 0.0) if kind < 0.6 else (0.0, choose() * KEEPALIVE) if kind < 0.8 else (choose() * KEEPALIVE, 0)
        self.world.count("connection lost" if kind < 0.6 else "half-open connection")
        self.world.log("net", f"{connection.name} breaks, noticed after {seconds[0]:.3f} s and {seconds[1]:.3f} s")
        if choose() < 0.5:
            connection.break_off(*seconds)
        else:  # what is sent now still arrives
            self.world.scheduler.after(3 * DELAY, lambda: connection.break_off(*seconds))

    def connect(self, client: Process, server: Server) -> Connection:
        """A new connection."""
        connection = Connection(self, client, server.process)
        connection.server = server
        self.connections[connection] = None
        for end, process in enumerate(connection.ends):
            process.on_death.append(lambda end=end: self._died(connection, end))
        return connection

    def _died(self, connection: Connection, end: int) -> None:
        connection.lost[end] = True
        if not connection.lost[1 - end]:
            silent = connection.ends[end].host.silent or self.blocked(connection, 1 - end)
            seconds = KEEPALIVE * (0.7 + 0.6 * self._random.random()) if silent else self.delay()
            self.world.scheduler.after(seconds, lambda: connection.lose(1 - end))
        else:
            self.connections.pop(connection, None)

    def partition(self, one: str, other: str, *, both_ways: bool = True) -> None:
        """Cut two hosts off from each other until `heal`; or only let nothing that `one` sends reach the other."""
        self._cut[one, other] = None
        if both_ways:
            self._cut[other, one] = None
        self.check_silence()

    def heal(self) -> None:
        """End all partitions."""
        if self._cut:
            self.world.log("net", "the partitions end")
            self._cut.clear()
            for connection in [*self.connections]:
                connection.heal()

    def carries(self, one: str, other: str) -> bool:
        """Whether what a host sends reaches the other one."""
        return (one, other) not in self._cut

    def reachable(self, one: str, other: str) -> bool:
        """Whether two hosts can connect, which needs both directions."""
        return self.carries(one, other) and self.carries(other, one)

    def blocked(self, connection: Connection, to: int) -> bool:
        """Whether nothing reaches an end of a connection."""
        return not self.carries(connection.ends[1 - to].host.name, connection.ends[to].host.name)

    def partitioned(self, connection: Connection) -> bool:
        """Whether an end of a connection gets no answers from the other one: they need both directions."""
        return not self.reachable(*(process.host.name for process in connection.ends))

    def check_silence(self) -> None:
        """Let each end that gets no answer for KEEPALIVE seconds from now on notice it."""
        for connection in [*self.connections]:
            for end in (SERVER_END, CLIENT_END):
                if self._silent(connection, end):
                    seconds = KEEPALIVE * (0.7 + 0.6 * self._random.random())
                    self.world.scheduler.after(seconds, lambda c=connection, e=end: self._miss(c, e))

    def _silent(self, connection: Connection, end: int) -> bool:
        return self.partitioned(connection) or connection.ends[1 - end].paused

    def _miss(self, connection: Connection, end: int) -> None:
        if self._silent(connection, end):
            connection.lose(end)

    @contextlib.contextmanager
    def in_place_of_grpc(self) -> Iterator[None]:
        """Let channels and servers of gRPC be simulated ones for a block."""
        from sim.rpc_server import in_place_of_grpc

        with in_place_of_grpc(self.world):
            yield


class ProcessNetwork:
    """The port of sockets for one process: no code under simulation opens one."""

    def __init__(self, host: str, network: Network) -> None:
        self._host = host
        self._network = network

    def host_name(self) -> str:
        return self._host

    def probe(self, host: str, port: int, seconds: float) -> None:
        listens = self._network.listeners.get((host, port))
        if listens is None or not listens(self._host):
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    def listen(self, host: str, port: int, most: int = 0, of_address: int = 0) -> Any:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def trim(self, port: int, of_address: int) -> int:
        return 0

    def descriptors(self) -> int:
        return 0

    def check_free(self, host: str, port: int) -> None:
        pass
