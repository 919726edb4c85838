"""The sessions of a client: one for each shard, each with its connection to the shard's service

A session passes frames between its core and the service, wakes the callers that wait for answers, and reconnects when
the connection is lost. All requests made in one iteration of the event loop are sent in one frame.

Most transactions begin at the client's home shard; while its service is unavailable, new ones begin at another shard. A
named producer and a consumer group belong to the shard of their name. A session is opened when it is first needed. A
service that is unavailable delays only its own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from broker_io.waits import Backoff, Wait
from snapshots.shards import ONLY, Shard, shard_of
from txnbuffer.client import lifecycle
from txnbuffer.client.path.record_path import OpenTransaction, RecordPath, ServicePath
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.client.session.session_requests import REQUESTS, Field
from txnbuffer.coordinator.messages import ProducerSequence
from txnbuffer.errors import (
    CallerError,
    ClientBroken,
    Error,
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    UntrustedService,
    retry_pause,
)
from txnbuffer.rpc.frames import ClientFrame, ServerFrame


class LinkUser(Protocol):
    """What a session connection calls."""

    def take_frame(self) -> ClientFrame | None:
        """Return the next frame to send; None if there is none until the next `wake`."""

    def reject(self, field: str, row: Any, error: Exception) -> None:
        """Fail a request that cannot be encoded; end the connection with the error if this is no request."""

    def receive(self, frame: ServerFrame) -> None:
        """Handle a frame of the service."""

    def ended(self, error: BaseException | None) -> None:
        """The connection was lost, or has failed, with an error; None: the service has ended it."""


class Link(Protocol):
    """The interface of a session connection, which calls its user from the event loop."""

    def start(self, user: LinkUser) -> None:
        """Exchange frames from now on."""

    def wake(self) -> None:
        """The user has frames to send: take them in a later iteration of the event loop, with what is then added."""

    async def close(self) -> None:
        """Close the connection."""


Connector: TypeAlias = Callable[[], Awaitable[Link]]
"""Opens a connection. Raises ServiceUnavailable."""

TICK = 1.0
"""Seconds between two ticks of the core."""
VISIBLE = 120.0
"""Seconds that the service waits for a commit to become visible."""
CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for the ends of transactions, and for the service to end the connection."""
CLOSE_POLL = 0.005
ENDED = ServiceUnavailable("it ended the connection")
CLOSED = "the client was closed: connect again"


class ClientSession:
    """A session with the service of `shard`.

    `path`: makes the record path, given a function that the path calls when sends are settled. Requests fail after
    `max_unavailable` seconds without a connection. If records do not go through the service, they also fail after as
    many seconds without any answer or acknowledgement, because the cluster may be down while the service is up.
    """

    def __init__(
        self,
        connector: Connector,
        max_unavailable: float,
        *,
        path: Callable[[Callable[[], None]], RecordPath] = lambda _: ServicePath(),
        shard: Shard = ONLY,
    ) -> None:
        self._path = path(self._wake)
        self._awake = False
        """Whether the connection will take frames."""
        self._link: Link | None = None
        self.core = SessionCore(self._path, self._wake)
        self.end = self.core.transactions.end
        self._seen = 0
        self._still = 0.0
        self.forked_from = lifecycle.generation()
        self._connector = connector
        self._shard = shard
        self.max_unavailable = max_unavailable
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._opens_later = False
        self._opening: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[BaseException | None]
        self._greeted = self._said_bye = False
        self._unreachable: Error | None = None
        self._reason: Error | None = None
        self._unavailable_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._lost_at = 0.0
        self._wait = Wait(f"the service{self._of_shard()}")
        self.on_broken: Callable[[ClientBroken], None] = lambda _: None
        """Gets the error of all requests once something has ended a task of the session."""

    @classmethod
    def refusing(cls, error: Error) -> ClientSession:
        """A session that never connects: all requests raise this error."""

        async def connect() -> Link:
            raise error

        session = cls(connect, 0.0)
        session._unreachable = error
        return session

    async def open(self) -> None:
        """Connect. Raises ServiceUnavailable, and the service's error if it rejects this client.

        A certificate that does not verify is an error at once; in a later attempt to connect it may be a mistake that
        is corrected soon.
        """
        self._loop = asyncio.get_running_loop()
        await self._connect_first()
        try:
            await self._first.wait()
        except asyncio.CancelledError:
            await self.close()  # otherwise it would keep connecting
            raise
        if self._unreachable is not None:
            error = self._unreachable
            await self.close()
            raise error

    async def _connect_first(self) -> None:
        """Connect, and start to work. Raises any error but ServiceUnavailable: the service may be starting."""
        began, link = self._loop.time(), None
        self._wait.resume()
        try:
            link = await self._connector()
        except UntrustedService:
            raise
        except ServiceUnavailable as away:
            self._reason = away
            self._wait.failed(away)
        self._opens_later = False
        self._start(link)
        if link is None:
            self._lost_at = began
            self._report_unavailable_later(self._reason)

    def begin(self) -> None:
        """Connect in the background; requests wait for the connection for up to `max_unavailable` seconds."""
        self._loop = asyncio.get_running_loop()
        self._wait.resume()
        self._start(None)

    def open_later(self, max_message_bytes: int) -> None:
        """Let the first request connect; it raises what prevents that. Until then this is the limit of a record."""
        self._loop = asyncio.get_running_loop()
        self._opens_later, self.core.max_message_bytes = True, max_message_bytes

    async def _connect_now(self) -> None:
        """Connect for the first requests, which share one attempt; after an error the next request tries again."""
        if self._opening is None:
            self._opening = self._loop.create_task(self._connect_first())
        opening = self._opening
        await asyncio.wait([opening])  # it continues if this caller is cancelled
        if self._opening is opening:
            self._opening = None
        if opening.cancelled():
            self.check()
            raise lifecycle.ended_task(opening)
        opening.result()

    def check(self) -> None:
        """Raises UsedAfterFork; ServiceUnavailable if there was no connection for `max_unavailable` seconds."""
        if self.forked_from != lifecycle.ForkGeneration.generation:
            lifecycle.check(self.forked_from)
        if self._unreachable is not None:
            raise self._unreachable.with_traceback(None)

    def check_call(self) -> None:
        """Raises as `check` and `check_loop`."""
        if self._unreachable is not None or self.forked_from != lifecycle.ForkGeneration.generation:
            self.check()
        if asyncio.get_running_loop() is not self._loop:
            lifecycle.check_loop(self._loop)

    def check_loop(self) -> None:
        """Raises InvalidRequest on another event loop than that of the client."""
        lifecycle.check_loop(self._loop)

    def check_close(self) -> None:
        """As `check_loop`, unless that loop has ended or the session has not begun."""
        if self._tasks and not self._loop.is_closed():
            self.check_loop()

    def check_tasks(self) -> None:
        """Raises ClientBroken if a task of the session has ended."""
        if isinstance(self._unreachable, ClientBroken):
            raise self._unreachable.with_traceback(None)

    def away_for(self, seconds: float) -> bool:
        """Return whether there has been no connection for this many seconds."""
        return not self.core.welcomed and self._loop.time() > self._lost_at + seconds

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            if self._link is not None:
                self._link.wake()

    async def ask(self, field: Field, row_of: Callable[[int], Any]) -> Any:
        """Make a request, whose row `row_of` makes of its number; return the answer. Raises the error in it."""
        requests = self.core.requests
        return await self.result(lambda future: requests.ask(field, row_of(next(requests.numbers)), future))

    async def result(self, put: Callable[[asyncio.Future[Any]], object]) -> Any:
        """Call `put` with a waiter to make a request; return its result. Raises the error in the answer."""
        if self._opens_later:
            self.check_call()
            await self._connect_now()
        future = self.waiter()
        put(future)
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.forget(future)
            raise

    def waiter(self) -> asyncio.Future[Any]:
        """Return a future for the result of a request. Raises what prevents requests."""
        self.check_call()
        return self._loop.create_future()

    def withdraw_commit(
        self, transaction: OpenTransaction, waiter: asyncio.Future[Any]
    ) -> tuple[asyncio.Future[Any], bool]:
        """Turn a commit whose `waiter` was cancelled into an abort; return a future for its end, and whether it aborts.

        It does not if the commit was sent: then the future gets the answer to that.
        """
        answer = self._loop.create_future() if waiter.cancelled() else waiter
        answer.add_done_callback(lifecycle.retrieve_error)
        withdrawn = self.core.transactions.withdraw_commit(transaction, answer)
        self._deliver()
        return answer, withdrawn

    async def wait_for_room(self) -> None:
        """Wait until the service accepts more records."""
        while not self.core.has_room:
            await self.result(self.core.wait_for_room)

    async def close(self) -> None:
        """Send what is queued, abort open transactions, end the session, and close the connection.

        Waits up to CLOSE_TIMEOUT for the service in all.
        """
        monotonic = asyncio.get_running_loop().time
        give_up_at = monotonic() + CLOSE_TIMEOUT
        if self._opening is not None:
            self._unreachable = InvalidRequest(CLOSED)
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._end_transactions(give_up_at)
        self._closing = True
        if self._link is not None and self.core.welcomed:
            self._wake()
            await asyncio.wait(self._tasks[:1], timeout=give_up_at - monotonic())
        await lifecycle.cancel(*self._tasks)
        self._give_up(self._unreachable or ServiceUnavailable("the client was closed"))
        self._unreachable = InvalidRequest(CLOSED)  # of later calls

    async def _end_transactions(self, give_up_at: float) -> None:
        """Abort what is open, and wait for it: a service that stops next would leave it open in the log."""
        self.core.transactions.abort_open()
        while self.core.welcomed and self.core.transactions.aborting and self._loop.time() < give_up_at:
            await asyncio.sleep(CLOSE_POLL)

    # Staying connected

    def _start(self, link: Link | None) -> None:
        self._lost_at = self._loop.time()
        self._tasks = [self._loop.create_task(self._run(link)), self._loop.create_task(self._keep_time())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail all requests, now and later, if something has ended a task that the session needs."""
        if self._closing or isinstance(self._unreachable, CallerError | ClientBroken):
            return
        error = lifecycle.ended_task(task)
        self._give_up(error)
        self.on_broken(error)
        for other in self._tasks:
            other.cancel()

    async def _run(self, link: Link | None) -> None:
        """Connect, exchange frames until the connection is lost, wait, and reconnect."""
        backoff, failures = Backoff(), 0
        while True:
            error: Error | None = None
            try:
                link = link or await self._connector()
                await self._talk(link)
            except Error as gone:
                error = gone
            finally:
                link, was_welcomed = None, self.core.welcomed
                self._lost_at = self._loop.time() if was_welcomed else self._lost_at
                self.core.lost()
                self._deliver()
            if self._closing:
                return
            if isinstance(error, CallerError) and not isinstance(error, LimitExceeded):
                self._give_up(error)
                return
            if was_welcomed:
                self._wait.resume()
            self._wait.failed(error or ENDED)
            failures = 1 if was_welcomed else failures + 1
            self._report_unavailable_later(error)
            await asyncio.sleep(retry_pause(error, backoff.after(failures)))

    async def _talk(self, link: Link) -> None:
        """Use a connection until it ends. Raises the error that ended it."""
        self._lost, self._link = self._loop.create_future(), link
        self._greeted, self._said_bye, self._awake = False, False, True
        try:
            link.start(self)
            if (error := await self._lost) is not None:
                raise error
        finally:
            self._link = None
            await link.close()

    # For the connection

    def take_frame(self) -> ClientFrame | None:
        if self._lost.done() or not (self._awake or self._closing):
            return None
        core = self.core
        try:
            if not self._greeted:
                self._greeted = True
                return core.hello()
            frame = core.take_frame()
            self._awake = frame is not None and core.has_frame
            if core.results:
                self._deliver()
        except Exception as error:
            self.ended(error)
            return None
        if frame is None and self._closing and not self._said_bye:
            self._said_bye = True
            return ClientFrame(bye=True)
        return frame

    def reject(self, field: str, row: Any, error: Exception) -> None:
        if field not in REQUESTS:
            self.ended(error)
            return
        self.core.reject(row[0], InvalidRequest(f"the request cannot be encoded: {error!r}"))
        self._deliver()

    def receive(self, frame: ServerFrame) -> None:
        if self._lost.done():
            return
        core = self.core
        try:
            core.receive(frame)
            self._deliver()
            if core.broken is not None:
                self.ended(core.broken)
            elif frame.welcome is not None:
                self._connected()
        except Exception as error:
            self.ended(error)
        if core.has_frame:
            self._wake()

    def ended(self, error: BaseException | None) -> None:
        if not self._lost.done():
            self._lost.set_result(error)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.core.tick()
            if not self._path.through_service:
                self._watch_progress()
            self._wake()

    def _watch_progress(self) -> None:
        core = self.core
        if core.progress != self._seen or not core.waited_for or not core.welcomed:
            self._seen, self._still = core.progress, 0.0
            return
        self._still += TICK
        if self._still >= self.max_unavailable:
            core.stop_waiting(
                ServiceUnavailable(self._standstill()), visible=self._still >= self.max_unavailable + VISIBLE
            )
            self._deliver()

    def _standstill(self) -> str:
        """Return the probable reason why there was no progress for `max_unavailable` seconds."""
        foreign = next((topic for topic in self.core.unregistered if not self._shard.owns(topic)), None)
        if foreign is None:
            return (
                f"neither the cluster nor its service answered for {self.max_unavailable:g} s: check that both are "
                "running"
            )
        return (
            f"topic {foreign!r} was not registered within {self.max_unavailable:g} s: check that the service of shard "
            f"{shard_of(foreign, self._shard.of)}, its owner, and the cluster are running"
        )

    def _connected(self) -> None:
        self._wait.pause()
        self._unreachable = None
        self._stop_unavailable_timer()
        self._first.set()

    def _stop_unavailable_timer(self) -> None:
        if self._unavailable_timer is not None:
            self._unavailable_timer.cancel()
            self._unavailable_timer = None

    def _report_unavailable_later(self, error: Error | None) -> None:
        self._reason = error
        if self._unavailable_timer is None and self._unreachable is None:
            # The time of the first attempt counts as time without a connection.
            left = self._lost_at + self.max_unavailable - self._loop.time()
            self._unavailable_timer = self._loop.call_later(max(left, 0.0), self._report_unavailable)

    def _report_unavailable(self) -> None:
        if isinstance(self._reason, LimitExceeded):
            self._give_up(self._reason)
            return
        text = f"no service{self._of_shard()} for {self.max_unavailable:g} s: {self._reason or ENDED}"
        self._give_up(ServiceUnavailable(text))

    def _of_shard(self) -> str:
        return "" if self._shard.of == 1 else f" of shard {self._shard.number}"

    def _give_up(self, error: Error) -> None:
        self._stop_unavailable_timer()  # it must not replace an error that ends the session
        self._unreachable = error
        self.core.give_up(error)
        self._deliver()
        self._first.set()

    def _deliver(self) -> None:
        for future, result in self.core.take_results():
            if future is None or future.done():
                continue
            if isinstance(result, Error):
                future.set_exception(result)
            else:
                future.set_result(result)


AWAY = 2.0
"""Seconds without a connection after which transactions begin at another shard."""


class ShardSessions:
    """The sessions of a client: `home`, with shard `number` of `shards`, and others that `make` creates."""

    def __init__(
        self, home: ClientSession, number: int = 0, shards: int = 1, make: Callable[[int], ClientSession] | None = None
    ) -> None:
        self.shards = shards
        self._home = number
        self._make = make
        self._open = {number: home}

    def at(self, number: int) -> ClientSession:
        """Return the session of a shard; the home session if the shard does not exist."""
        found = self._open.get(number)
        if found is None:
            if self._make is None or number >= self.shards:
                return self._open[self._home]
            found = self._open[number] = self._make(number)
        return found

    def of(self, name: str) -> ClientSession:
        """Return the session with the shard of a named producer or consumer group."""
        return self.at(shard_of(name, self.shards) if self.shards > 1 else self._home)

    @property
    def open_transactions(self) -> int:
        """How many transactions of this client are open."""
        return sum(len(session.core.transactions.ids()) for session in self._open.values())

    @property
    def can_begin(self) -> bool:
        """Whether a transaction without a name can begin now, without waiting for a service."""
        return bool(self._open[self._home].core.ids)

    async def begin(
        self, name: str | None, timeout: float | None, sequence: ProducerSequence | None
    ) -> tuple[ClientSession, OpenTransaction]:
        """Begin a transaction; with `name`, in the session of the name's shard. Raises ServiceUnavailable."""
        while True:
            if name is not None:
                session = self.of(name)
            elif self.shards > 1:
                session = self.any()
            else:
                session = self._open[self._home]
            session.check_call()
            if session.core.ids:
                return session, session.core.begin(timeout, sequence)
            with contextlib.suppress(TimeoutError):  # then try another shard
                async with asyncio.timeout(AWAY if name is None and self.shards > 1 else None):
                    await session.result(session.core.wait_to_begin)

    def any(self) -> ClientSession:
        """Return the session for a transaction that can begin at any shard."""
        home = self._open[self._home]
        if not home.away_for(AWAY):
            return home
        for session in self._open.values():
            if session.core.welcomed:
                return session
        others = [self.at((self._home + step) % self.shards) for step in range(1, self.shards)]
        return next((other for other in others if not other.away_for(AWAY)), home)

    def topic_deleted(self, topic: str) -> None:
        """Register a topic again before the next transactional send."""
        for session in self._open.values():
            session.core.topic_deleted(topic)

    def uncommitted(self) -> list[OpenTransaction]:
        """The transactions with records whose end was not requested."""
        return [one for session in self._open.values() for one in session.core.transactions.uncommitted()]

    async def close(self) -> None:
        """Close all sessions."""
        await asyncio.gather(*(session.close() for session in self._open.values()))
