"""Whatever ends a task of a client, the calls that wait for it end at once, and later ones too."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from client.direct_world import DirectWorld, in_direct_world
from service_setup import eventually

from txnbuffer import ChangeStream, Client, connect
from txnbuffer.client.connection import ServiceLink
from txnbuffer.client.session.session import ClientSession, Link
from txnbuffer.errors import ClientBroken, Error, InvalidRequest
from txnbuffer.rpc.frames import ClientFrame, ServerFrame, Welcome

SECONDS = 30.0


async def uses(client: Client, opened: ChangeStream) -> list[str]:
    """Use a client in each way, and a stream that was created before; return what each call raised."""
    errors = []

    async def transaction() -> None:
        async with client.transaction() as txn:
            await txn.send("log", b"v")

    async def stream() -> None:
        await client.stream("log").next(timeout=SECONDS * 2)

    for call in (lambda: client.send("log", b"v"), transaction, stream, lambda: opened.next(timeout=SECONDS * 2)):
        try:
            async with asyncio.timeout(SECONDS):
                await call()
        except (Error, TimeoutError) as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.parametrize("options", [{}, {"max_unavailable": 20.0}])
def test_background_task_can_use_its_client_after_the_end_of_the_main_one(tmp_path: Path, options: dict) -> None:
    errors: list[str] = []

    async def background(client: Client, began: asyncio.Event) -> None:
        opened = client.stream("log")
        try:
            began.set()
            await asyncio.sleep(SECONDS * 10)
        finally:
            errors.extend(await uses(client, opened))

    async def main() -> None:
        client = await connect(f"file:{tmp_path}/log", **options)
        await client.send("log", b"v")
        began = asyncio.Event()
        main.task = asyncio.ensure_future(background(client, began))  # type: ignore[attr-defined]  # keeps it
        await began.wait()

    asyncio.run(main())
    assert len(errors) == 4
    assert set(errors) <= {"ClientBroken", "SendUnknown"}  # the first one may notice the end of the connection
    assert errors[-1] == "ClientBroken"


@pytest.mark.parametrize("which", ["_run", "_keep_time"])
async def test_calls_end_with_an_error_once_a_task_of_the_session_has_ended(which: str) -> None:
    client = await connect("memory:")
    await client.send("log", b"v")
    (task,) = [one for one in asyncio.all_tasks() if f"ClientSession.{which}" in repr(one.get_coro())]
    waiting = asyncio.ensure_future(client.session.result(lambda future: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ClientBroken, match="were cancelled"):
            await client.send("log", b"v")
        with pytest.raises(ClientBroken, match="were cancelled"):
            await client.transaction().begin()
        waiting.cancel()
        await client.close()


class OpenStream:
    """A stream of messages of which none arrives."""

    async def send(self, _: ClientFrame) -> None:
        pass

    async def receive(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("which", ["_read", "_write"])
async def test_calls_end_with_an_error_once_a_task_of_the_connection_has_ended(which: str) -> None:
    links: list[ServiceLink] = []

    async def dial() -> Link:
        links.append(ServiceLink(OpenStream()))  # type: ignore[arg-type]  # a stream for tests
        return links[-1]

    session = ClientSession(dial, SECONDS)
    opening = asyncio.ensure_future(session.open())
    await eventually(lambda: links and links[0]._tasks)
    links[0]._user.receive(ServerFrame(welcome=Welcome("session", 0, 1, 1_000_000)))
    await opening
    (task,) = [one for one in asyncio.all_tasks() if f"ServiceLink.{which}" in repr(one.get_coro())]
    task.cancel()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ClientBroken, match="were cancelled"):
            await session.result(session.core.wait_to_begin)
    await session.close()


@in_direct_world
async def test_client_that_writes_to_a_cluster_itself_gets_this_error_too(world: DirectWorld) -> None:
    client = await world.client()
    with pytest.raises(InvalidRequest, match="another event loop"):
        await asyncio.to_thread(asyncio.run, client.send("log", b"v"))


async def test_client_on_another_event_loop_gets_an_error_of_the_library() -> None:
    async with connect("memory:") as client:
        await client.send("log", b"v")
        stream = client.stream("log")

        def elsewhere() -> None:
            async def use() -> None:
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await client.send("log", b"v")
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await client.transaction().begin()
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await stream.next(timeout=SECONDS)
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await client.cursors.add("log", "cursor")
                with pytest.raises(InvalidRequest, match="another event loop"):
                    await client.close()

            asyncio.run(use())

        await asyncio.to_thread(elsewhere)
        await client.send("log", b"it is still open")


def test_client_can_be_closed_after_the_end_of_its_event_loop(tmp_path: Path) -> None:
    async def opened() -> Client:
        return await connect(f"file:{tmp_path}/log")

    client = asyncio.run(opened())
    with contextlib.suppress(RuntimeError):  # asyncio's own: the loop is closed
        asyncio.run(client.close())

    async def use() -> None:
        async with connect(f"file:{tmp_path}/log") as another:
            await another.send("log", b"v")

    asyncio.run(use())
