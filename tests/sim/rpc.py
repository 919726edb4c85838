"""gRPC in a simulated world: calls, and the channels of its two interfaces that clients and remote logs use.

Everything above it is the product's own code: the handshake, the encodings, the handlers of the service, the channels
of clients. A call is a stream of items in both directions on the connection of its channel: headers, messages, a half
close, a status. The calls of a channel break together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import grpc
import grpc.aio
from sim.network import CLIENT_END, SERVER_END, Connection

from broker_io.environment import current

if TYPE_CHECKING:
    from sim.rpc_server import Server
    from sim.scheduler import SimThread
    from sim.world import Process, World

WINDOW = 32
"""Messages that a sender may be ahead of the receiver of a call."""
RETRY_SECONDS = 0.5
RECONNECT_SECONDS = 2.0
"""Seconds after which an attempt to connect to a host that does not answer has failed."""
Metadata = tuple[tuple[str, Any], ...]


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


LOST = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
OK = Status(grpc.StatusCode.OK)


class SimRpcError(grpc.RpcError):
    """The failure of a call of the synchronous interface."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> Metadata:
        return self._status.trailing


class Side:
    """One end of a call: what has arrived, for a task of a loop or for a thread."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.items: deque[bytes] = deque()
        self.headers: Metadata | None = None
        self.closed = False
        self.status: Status | None = None
        self.sent = 0
        self.on_change: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._threads: list[SimThread] = []

    def change(self) -> None:
        """Wake those who wait for a change."""
        for call in self.on_change:
            call()
        threads, self._threads = self._threads, []
        for thread in threads:
            self.process.world.scheduler.wake(thread)
        if self._waiters and self._loop is not None:
            waiters, self._waiters = self._waiters, []
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_wake, waiters)

    async def wait(self) -> None:
        """Wait for a change in a task."""
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def block(self, timeout: float | None) -> bool:
        """Wait for a change in a thread; False after `timeout` seconds."""
        scheduler = self.process.world.scheduler
        assert scheduler.current is not None
        self._threads.append(scheduler.current)
        return scheduler.park(timeout)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class CallState:
    """A call on a connection, with its two sides."""

    def __init__(self, connection: Connection, path: str, metadata: Metadata) -> None:
        self.connection = connection
        self.path = path
        self.name = path.rpartition("/")[2]
        self.metadata = metadata
        self.sides = tuple(Side(process) for process in connection.ends)
        for end in (SERVER_END, CLIENT_END):
            connection.on_loss[end].append(lambda end=end: self.finish(end, LOST))

    def send(self, to: int, data: bytes) -> None:
        """Send a message to an end."""
        sender, side = self.sides[1 - to], self.sides[to]
        sender.sent += 1

        def deliver() -> None:
            if side.status is None:
                side.items.append(data)
                side.change()

        self.connection.send(to, f"{self.name} {len(data)} bytes", deliver)

    def close(self, to: int) -> None:
        """Tell an end that no more messages follow."""
        side = self.sides[to]

        def deliver() -> None:
            side.closed = True
            side.change()

        self.connection.send(to, f"{self.name} half close", deliver)

    def headers(self, metadata: Metadata) -> None:
        """Send the initial metadata to the client."""
        side = self.sides[CLIENT_END]

        def deliver() -> None:
            if side.headers is None:
                side.headers = metadata
                side.change()

        self.connection.send(CLIENT_END, f"{self.name} headers", deliver)

    def end(self, to: int, status: Status) -> None:
        """End the call for both sides; the other one gets the status."""
        self.connection.send(to, f"{self.name} ends: {status.code.name}", lambda: self.finish(to, status))
        self.finish(1 - to, status)

    def finish(self, end: int, status: Status) -> None:
        """A side learns that the call has ended."""
        side = self.sides[end]
        if side.status is None and not side.process.dead:
            side.status = status
            side.closed = True
            side.change()

    def took(self, end: int) -> None:
        """A side has read a message: the other one may send more."""
        other = self.sides[1 - end]
        other.sent -= 1
        if other.sent == WINDOW - 1 and not other.process.dead:
            other.change()


def next_item(side: Side) -> Any:
    """The next message of a side, EOF at its end, None if it has to wait."""
    if side.items:
        return side.items.popleft()
    return grpc.aio.EOF if side.closed else None


class Channels:
    """What both kinds of channels share: the process of the client, and its connection."""

    def __init__(self, world: World, target: str) -> None:
        thread = world.scheduler.current
        assert thread is not None
        self.process = thread.process
        self.world = world
        self.target = target
        self.closed = False
        self._connection: Connection | None = None
        self.calls: list[CallState] = []

    @property
    def connection(self) -> Connection | None:
        """The connection, if there is one that is not known to be lost."""
        found = self._connection
        return None if found is None or found.lost[CLIENT_END] else found

    def server(self) -> Server | None:
        """Who listens at the target; None if nobody can be reached."""
        host, _, port = self.target.rpartition(":")
        server = self.world.network.servers.get((host, int(port)))
        if server is None or server.process.dead or server.process.paused:
            return None
        return server if self.world.network.reachable(self.process.host.name, host) else None

    @property
    def refused(self) -> bool:
        """Whether an attempt to connect fails at once, because the host answers that nobody listens."""
        host, _, port = self.target.rpartition(":")
        server = self.world.network.servers.get((host, int(port)))
        reachable = self.world.network.reachable(self.process.host.name, host) and not self.world.host(host).silent
        return reachable and (server is None or server.process.dead)

    def open(self, server: Server) -> Connection:
        """Connect to a server; the connection is lost at once if the server has ended meanwhile."""
        self._connection = self.world.network.connect(self.process, server)
        if server.process.dead:
            self._connection.lose(CLIENT_END)
        return self._connection

    def call(self, connection: Connection, path: str, metadata: Metadata) -> CallState:
        """Start a call; the server is the one at the other end of the connection."""
        state = CallState(connection, path, metadata)
        self.calls = [call for call in self.calls if call.sides[CLIENT_END].status is None]
        self.calls.append(state)
        host, _, port = self.target.rpartition(":")
        server = self.world.network.servers.get((host, int(port)))

        def accept() -> None:
            if server is None or server.process is not connection.ends[SERVER_END]:
                state.end(CLIENT_END, LOST)
            else:
                server.accept(state)

        connection.send(SERVER_END, f"{state.name} begins", accept)
        return state

    def shut(self) -> None:
        """Close the channel and end its calls."""
        if not self.closed:
            self.closed = True
            for call in self.calls:
                if call.sides[CLIENT_END].status is None:
                    call.end(SERVER_END, Status(grpc.StatusCode.CANCELLED, "Channel closed"))
            if self.connection is not None:
                self.connection.lose(CLIENT_END)


class AioCall:
    """A call of the asyncio interface."""

    def __init__(self, channel: AioChannel, path: str, metadata: Metadata) -> None:
        self._state: CallState | None = None
        self._early: Status | None = None
        self._cancelled = False
        self._start = asyncio.ensure_future(channel.start(path, metadata))

    async def _call(self) -> CallState:
        if self._state is None:
            found = await asyncio.shield(self._start)
            if isinstance(found, Status):
                self._early = found
                raise _aio_error(found)
            self._state = found
        return self._state

    async def initial_metadata(self) -> Metadata:
        try:
            state = await self._call()
        except grpc.aio.AioRpcError:
            return ()
        side = state.sides[CLIENT_END]
        while side.headers is None and side.status is None:
            await side.wait()
        return side.headers or ()

    async def code(self) -> grpc.StatusCode:
        return (await self._status()).code

    async def details(self) -> str:
        return (await self._status()).details

    async def trailing_metadata(self) -> Metadata:
        return (await self._status()).trailing

    async def _status(self) -> Status:
        try:
            state = await self._call()
        except grpc.aio.AioRpcError:
            assert self._early is not None
            return self._early
        side = state.sides[CLIENT_END]
        while side.status is None:
            await side.wait()
        return side.status

    async def write(self, data: bytes) -> None:
        state = await self._call()
        side = state.sides[CLIENT_END]
        while side.sent >= WINDOW and side.status is None:
            await side.wait()
        self._check(side, writing=True)
        state.send(SERVER_END, data)

    async def read(self) -> Any:
        state = await self._call()
        side = state.sides[CLIENT_END]
        while (found := next_item(side)) is None:
            await side.wait()
        if found is grpc.aio.EOF:
            while side.status is None:
                await side.wait()
            self._check(side)
        else:
            state.took(CLIENT_END)
        return found

    async def done_writing(self) -> None:
        state = await self._call()
        if state.sides[CLIENT_END].status is None:
            state.close(SERVER_END)

    def cancel(self) -> bool:
        self._cancelled = True
        if not self._start.done():
            self._start.cancel()
        elif self._state is not None and self._state.sides[CLIENT_END].status is None:
            self._state.end(SERVER_END, Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
            return True
        return False

    def _check(self, side: Side, *, writing: bool = False) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if side.status is not None and side.status.code is not grpc.StatusCode.OK:
            raise _aio_error(side.status)
        if side.status is not None and writing:
            raise asyncio.InvalidStateError("RPC already finished.")


def _aio_error(status: Status) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*status.trailing)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


class AioChannel(Channels):
    """A channel of `grpc.aio`."""

    _state = grpc.ChannelConnectivity.IDLE
    _connecting: asyncio.Task[None] | None = None

    def __init__(self, world: World, target: str) -> None:
        super().__init__(world, target)
        self._waiters: list[asyncio.Future[None]] = []

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if self.connection is not None:
            return grpc.ChannelConnectivity.READY
        if self._connecting is None and try_to_connect:
            self._state = grpc.ChannelConnectivity.CONNECTING
            self._connecting = asyncio.ensure_future(self._connect())
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def open(self, server: Server) -> Connection:
        connection = super().open(server)
        connection.on_loss[CLIENT_END].append(self._changed)
        self._changed()
        return connection

    def _changed(self) -> None:
        """Wake those who wait for a change of the state."""
        waiters, self._waiters = self._waiters, []
        if waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                waiters[0].get_loop().call_soon_threadsafe(_wake, waiters)

    async def _connect(self) -> None:
        """Try to connect until it succeeds or the channel is closed."""
        while not self.closed and self.connection is None:
            self._state = grpc.ChannelConnectivity.CONNECTING
            self._changed()
            server = self.server()
            quick = server is not None or self.refused
            await asyncio.sleep(self.world.network.delay() if quick else RECONNECT_SECONDS)
            if self.connection is None and server is not None and server is self.server():
                self.open(server)
            if self.connection is None:
                self._state = grpc.ChannelConnectivity.TRANSIENT_FAILURE
                self._changed()
                await asyncio.sleep(RETRY_SECONDS)
        self._connecting = None

    async def start(self, path: str, metadata: Metadata) -> CallState | Status:
        """Start a call; the status if there is no connection and none can be made now."""
        if self.connection is None:
            server = self.server()
            if server is None:
                await asyncio.sleep(self.world.network.delay() if self.refused else RETRY_SECONDS)
                return Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            await asyncio.sleep(self.world.network.delay())
            self.open(server)
        connection = self.connection
        return LOST if connection is None else self.call(connection, path, metadata)

    def stream_stream(self, path: str) -> Callable[..., AioCall]:
        return lambda metadata=(): AioCall(self, path, tuple(metadata))

    def unary_unary(self, path: str) -> Callable[..., Any]:
        async def ask(request: bytes, timeout: float | None = None, metadata: Metadata = ()) -> bytes:
            call = AioCall(self, path, tuple(metadata))
            try:
                async with asyncio.timeout(timeout):
                    await call.write(request)
                    await call.done_writing()
                    answer = await call.read()
                    if answer is grpc.aio.EOF:
                        raise _aio_error(Status(grpc.StatusCode.INTERNAL, "no answer"))
                    return bytes(answer)
            except TimeoutError:
                call.cancel()
                raise _aio_error(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")) from None
            except asyncio.CancelledError:
                call.cancel()
                raise

        return ask

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self.shut()


class SyncCall(grpc.RpcError):
    """A call of the synchronous interface with streams: an iterator of answers, and an error if it failed."""

    def __init__(self, state: CallState | Status, requests: Iterator[bytes] | None) -> None:
        super().__init__()
        self._state = state
        if isinstance(state, CallState) and requests is not None:
            thread = current().threads.thread(lambda: self._consume(state, requests), name="requests", daemon=True)
            thread.start()

    def _consume(self, state: CallState, requests: Iterator[bytes]) -> None:
        side = state.sides[CLIENT_END]
        for request in requests:
            while side.sent >= WINDOW and side.status is None:
                side.block(None)
            if side.status is not None:
                return
            state.send(SERVER_END, request)
        if side.status is None:
            state.close(SERVER_END)

    def __iter__(self) -> SyncCall:
        return self

    def __next__(self) -> bytes:
        found = self.receive(None)
        if found is grpc.aio.EOF:
            raise StopIteration
        return bytes(found)

    def receive(self, timeout: float | None) -> Any:
        """The next message or EOF. Raises SimRpcError."""
        state = self._state
        if isinstance(state, Status):
            raise SimRpcError(state)
        side = state.sides[CLIENT_END]
        scheduler = side.process.world.scheduler
        until = None if timeout is None else scheduler.now + timeout
        while (found := next_item(side)) is None or (found is grpc.aio.EOF and side.status is None):
            if not side.block(None if until is None else until - scheduler.now):
                state.end(SERVER_END, Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        if found is not grpc.aio.EOF:
            state.took(CLIENT_END)
        elif side.status is not None and side.status.code is not grpc.StatusCode.OK:
            raise SimRpcError(side.status)
        return found

    def initial_metadata(self) -> Metadata:
        """The headers of the service; waits for them, or for the end of the call."""
        state = self._state
        if isinstance(state, Status):
            return ()
        side = state.sides[CLIENT_END]
        while side.headers is None and side.status is None:
            side.block(None)
        return side.headers or ()

    def _ended(self) -> Status:
        """How the call ended; waits until it has."""
        state = self._state
        if isinstance(state, Status):
            return state
        side = state.sides[CLIENT_END]
        while side.status is None:
            side.block(None)
        return side.status

    def code(self) -> grpc.StatusCode:
        return self._ended().code

    def details(self) -> str:
        return self._ended().details

    def trailing_metadata(self) -> Metadata:
        return self._ended().trailing

    def cancel(self) -> bool:
        state = self._state
        if isinstance(state, Status) or state.sides[CLIENT_END].status is not None:
            return False
        state.end(SERVER_END, Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True


class SyncChannel(Channels):
    """A channel of `grpc`."""

    def start(self, path: str, metadata: Metadata) -> CallState | Status:
        if self.closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        sleep = self.process.clock.sleep
        if self.connection is None:
            server = self.server()
            if server is None:
                sleep(self.world.network.delay() if self.refused else RETRY_SECONDS)
                return Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            sleep(self.world.network.delay())
            self.open(server)
        connection = self.connection
        return LOST if connection is None else self.call(connection, path, metadata)

    def unary_unary(self, path: str) -> SyncMethod:
        return SyncMethod(self, path)

    def stream_stream(self, path: str) -> Callable[..., SyncCall]:
        return lambda requests, metadata=(): SyncCall(self.start(path, tuple(metadata)), requests)

    def close(self) -> None:
        self.shut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncMethod:
    """A method of one request and one answer, on a channel."""

    def __init__(self, channel: SyncChannel, path: str) -> None:
        self._channel = channel
        self._path = path

    def with_call(
        self, request: bytes, timeout: float | None = None, metadata: Metadata = ()
    ) -> tuple[bytes, SyncCall]:
        """The answer, and the call."""
        state = self._channel.start(self._path, tuple(metadata))
        call = SyncCall(state, None)
        if isinstance(state, CallState):
            state.send(SERVER_END, request)
            state.close(SERVER_END)
        answer = call.receive(timeout)
        if answer is grpc.aio.EOF:
            raise SimRpcError(Status(grpc.StatusCode.INTERNAL, "no answer"))
        return bytes(answer), call

    def __call__(self, request: bytes, timeout: float | None = None, metadata: Metadata = ()) -> bytes:
        return self.with_call(request, timeout, metadata)[0]
