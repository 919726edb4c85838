"""gRPC in a simulated world: the servers of both interfaces, and what takes the place of the real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
from sim.network import CLIENT_END, SERVER_END
from sim.rpc import OK, WINDOW, AioChannel, CallState, Metadata, SimRpcError, Status, SyncChannel, next_item
from sim.threads import PortThread

from broker_io.environment import current

if TYPE_CHECKING:
    from sim.world import Process, World


class SimContext:
    """The context of a call for its handler in a service."""

    def __init__(self, state: CallState) -> None:
        self._state = state
        self._side = state.sides[SERVER_END]
        self._headers_sent = False

    def peer(self) -> str:
        return self._state.connection.ends[CLIENT_END].name

    def invocation_metadata(self) -> Metadata:
        return self._state.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._state.headers(tuple(metadata))

    async def write(self, data: bytes) -> None:
        await self.send_initial_metadata(())
        while self._side.sent >= WINDOW and self._side.status is None:
            await self._side.wait()
        if self._side.status is not None:
            raise asyncio.CancelledError
        self._state.send(CLIENT_END, data)

    async def read(self) -> Any:
        while (found := next_item(self._side)) is None:
            await self._side.wait()
        if found is not grpc.aio.EOF:
            self._state.took(SERVER_END)
        return found

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        if self._side.status is None:
            self._state.end(CLIENT_END, Status(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    def finish(self, status: Status) -> None:
        """The handler has returned."""
        if self._side.status is None:
            self._state.end(CLIENT_END, status)


class CallDetails(NamedTuple):
    """What a service knows of a call that begins."""

    method: str
    invocation_metadata: Metadata


class Server:
    """What both kinds of servers share: the process, its ports and its handlers."""

    def __init__(self, world: World) -> None:
        thread = world.scheduler.current
        assert thread is not None
        self.process = thread.process
        self._world = world
        self._handlers: list[Any] = []
        self._addresses: list[tuple[str, int]] = []
        self._stopped = False

    def accept(self, state: CallState) -> None:
        """A call arrives from the network."""
        raise NotImplementedError

    def add_insecure_port(self, address: str) -> int:
        _, _, text = address.rpartition(":")
        place = self.process.host.name, int(text)
        taken = self._world.network.servers.get(place)
        if taken is not None and not taken.process.dead:
            raise RuntimeError(f"Failed to bind to address {address}")
        self._addresses.append(place)
        return place[1]

    def _listen(self) -> None:
        for place in self._addresses:
            self._world.network.servers[place] = self

    def _stop_listening(self) -> None:
        self._stopped = True
        for place in self._addresses:
            if self._world.network.servers.get(place) is self:
                del self._world.network.servers[place]

    def _end_connections(self) -> None:
        for connection in [*self._world.network.connections]:
            if connection.server is self:
                self._world.scheduler.after(self._world.network.delay(), connection.break_off)


class SimServer(Server):
    """A server of `grpc.aio`."""

    def __init__(self, world: World, interceptors: Any) -> None:
        super().__init__(world)
        self._interceptors = [*(interceptors or ())]
        self._tasks: dict[asyncio.Task[None], CallState] = {}
        self._loop: asyncio.AbstractEventLoop

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        pass

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listen()

    async def stop(self, grace: float | None) -> None:
        self._stop_listening()
        if self._tasks and grace:
            await asyncio.wait([*self._tasks], timeout=grace)
        for task in [*self._tasks]:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        self._end_connections()

    def accept(self, state: CallState) -> None:
        if self._stopped:
            state.end(CLIENT_END, Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._begin, state)

    def _begin(self, state: CallState) -> None:
        task = self._loop.create_task(self._serve(state))
        self._tasks[task] = state
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        side = state.sides[SERVER_END]

        def changed() -> None:
            if side.status is not None and not task.done():
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(task.cancel)

        side.on_change.append(changed)
        changed()

    async def _serve(self, state: CallState) -> None:
        context = SimContext(state)
        try:
            handler = await self._find(CallDetails(state.path, state.metadata), self._interceptors)
            if handler is None:
                context.finish(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            elif handler.stream_stream is not None:
                await handler.stream_stream(None, context)
            else:
                await self._answer(handler, context)
            context.finish(OK)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            context.finish(Status(grpc.StatusCode.CANCELLED, "the handler was cancelled"))
        except Exception as error:
            context.finish(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
            if not self.process.dead:
                self._world.fail(f"a handler of {state.name} of {self.process.name} failed: {error!r}")

    async def _find(self, details: CallDetails, interceptors: list[Any]) -> Any:
        if interceptors:
            return await interceptors[0].intercept_service(
                lambda details: self._find(details, interceptors[1:]), details
            )
        found = (handler.service(details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    async def _answer(self, handler: Any, context: SimContext) -> None:
        data = await context.read()
        if data is grpc.aio.EOF:
            return
        request = data if handler.request_deserializer is None else handler.request_deserializer(data)
        answer = await handler.unary_unary(request, context)
        await context.write(answer if handler.response_serializer is None else handler.response_serializer(answer))


class Aborted(Exception):
    """A handler of the synchronous interface has ended its call with an error."""


class SyncContext:
    """The context of a call for its handler in a thread."""

    def __init__(self, state: CallState) -> None:
        self._state = state
        self._side = state.sides[SERVER_END]
        self._trailing: Metadata = ()
        self._at_end: list[Callable[[], object]] | None = []
        self._side.on_change.append(self._changed)

    def invocation_metadata(self) -> Metadata:
        return self._state.metadata

    def send_initial_metadata(self, metadata: Any) -> None:
        self._state.headers(tuple(metadata))

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailing = tuple(metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.finish(Status(code, details, self._trailing))
        raise Aborted

    def cancel(self) -> None:
        self.finish(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))

    def finish(self, status: Status) -> None:
        """End the call, if it has not ended."""
        if self._side.status is None:
            self._state.end(CLIENT_END, status)

    def add_callback(self, call: Callable[[], object]) -> bool:
        """Call something, in a thread, when the call has ended; False if it has."""
        if self._at_end is None or self._side.status is not None:
            return False
        self._at_end.append(call)
        return True

    def _changed(self) -> None:
        if self._side.status is not None and self._at_end is not None:
            calls, self._at_end = self._at_end, None
            for call in calls:
                _start_thread(self._side.process, call)

    def __iter__(self) -> Iterator[bytes]:
        """The messages of the client."""
        while (found := self._next()) is not grpc.aio.EOF:
            self._state.took(SERVER_END)
            yield found
        if self._side.status is not None:
            raise SimRpcError(self._side.status)

    def _next(self) -> Any:
        while (found := next_item(self._side)) is None:
            self._side.block(None)
        return found

    def write(self, data: bytes) -> bool:
        """Send a message once there is room; False if the call has ended."""
        while self._side.sent >= WINDOW and self._side.status is None:
            self._side.block(None)
        if self._side.status is None:
            self._state.send(CLIENT_END, data)
        return self._side.status is None


def _start_thread(process: Process, work: Callable[[], object]) -> None:
    """Start a thread of a process, from outside of it."""
    process.context.copy().run(PortThread(process, work, "grpc").start)


class SyncServer(Server):
    """A server of `grpc`, whose handlers run in the threads of an executor."""

    def __init__(self, world: World, executor: Any, handlers: Any, most: int | None) -> None:
        super().__init__(world)
        self._executor = executor
        self._handlers += handlers
        self._most = most
        self._running: dict[SyncContext, None] = {}
        self._ended = current().threads.event()
        self._ended.set()

    def start(self) -> None:
        self._listen()

    def stop(self, grace: float | None) -> Any:
        """Take no more calls, and end those that are left after `grace` seconds; an event for the end of all."""
        self._stop_listening()

        def end() -> None:
            self._ended.wait(grace)
            for context in [*self._running]:
                context.cancel()
            self._ended.wait()
            self._end_connections()
            over.set()

        over = current().threads.event()
        _start_thread(self.process, end)
        return over

    def accept(self, state: CallState) -> None:
        context = SyncContext(state)
        if self._stopped:
            context.finish(Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
        elif self._most is not None and len(self._running) >= self._most:
            context.finish(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"))
        else:
            self._running[context] = None
            self._ended.clear()
            self._executor.submit(self._serve, state, context)

    def _serve(self, state: CallState, context: SyncContext) -> None:
        try:
            self._handle(state, context)
            context.finish(OK)
        except Aborted:
            pass
        except Exception as error:
            context.finish(Status(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}"))
            self._world.fail(f"a handler of {state.name} of {self.process.name} failed: {error!r}")
        finally:
            self._running.pop(context)
            if not self._running:
                self._ended.set()

    def _handle(self, state: CallState, context: SyncContext) -> None:
        found = (handler.service(CallDetails(state.path, state.metadata)) for handler in self._handlers)
        handler = next((each for each in found if each is not None), None)
        if handler is None:
            context.finish(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
        elif handler.stream_stream is not None:
            for data in handler.stream_stream(iter(context), context):
                if not context.write(data):
                    return
        else:
            for request in context:
                context.write(handler.unary_unary(request, context))
                return


@contextlib.contextmanager
def in_place_of_grpc(world: World) -> Iterator[None]:
    """Let `grpc` and `grpc.aio` make simulated channels and servers for a block."""
    before = grpc.insecure_channel, grpc.server, grpc.aio.insecure_channel, grpc.aio.server
    grpc.insecure_channel = lambda target, options=None: SyncChannel(world, target)
    grpc.aio.insecure_channel = lambda target, options=None: AioChannel(world, target)
    grpc.aio.server = lambda options=None, interceptors=None: SimServer(world, interceptors)
    grpc.server = lambda executor, handlers=(), options=None, maximum_concurrent_rpcs=None: SyncServer(
        world, executor, handlers, maximum_concurrent_rpcs
    )
    try:
        yield
    finally:
        grpc.insecure_channel, grpc.server, grpc.aio.insecure_channel, grpc.aio.server = before
