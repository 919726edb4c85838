"""The simulator finds late and missing answers and welcomes, and outcomes that are unknown without a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sim.calls import ANSWER_SECONDS, CLOSE_SECONDS, Calls
from sim.world import Finding, Process, World

from broker_io.errors import ServiceUnavailable
from txnbuffer.client.client import Client
from txnbuffer.client.session.session import ClientSession, LinkUser
from txnbuffer.client.session.session_requests import Requests
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import Commit
from txnbuffer.errors import OutcomeUnknown
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, ServerFrame, Welcome


async def answered_after(seconds: float, **_: Any) -> None:
    await asyncio.sleep(seconds)


def calls_of(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[], Any], calm: float, end: Callable[[Process], None] | None = None
) -> list[str]:
    """What is late when a process has used a client for 100 s."""
    for owner, name in ((Client, "outcome"), (Transaction, "commit")):
        monkeypatch.setattr(owner, name, staticmethod(answered_after))
    return late_in(use, calm, end)


def late_in(use: Callable[[], Any], calm: float, end: Callable[[Process], None] | None = None) -> list[str]:
    """What is late when a process has run for 100 s, if everything was calm from a time on."""
    with World(seed=1) as world:
        calls = Calls(world)
        world.enter(calls.recorded())
        process = world.host("beta").start("app", use)
        world.run(100.0)
        if end is not None:
            end(process)
        return [*calls.late(calm)]


@pytest.mark.parametrize(
    ("seconds", "calm", "found"),
    [
        (ANSWER_SECONDS - 1.0, 0.0, ""),
        (ANSWER_SECONDS + 1.0, 0.0, "its answer 21.0 s after"),
        (ANSWER_SECONDS + 1.0, 2.0, ""),
        (200.0, 85.0, ""),
        (200.0, 70.0, "no answer 30.0 s after"),
    ],
    ids=["in time", "late", "late before the calm", "waits a short time", "waits for ever"],
)
def test_a_call_with_a_late_answer_is_found(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calm: float, found: str
) -> None:
    async def main() -> None:
        await Client.outcome(seconds)
        await asyncio.Event().wait()

    late = calls_of(monkeypatch, main, calm)
    assert len(late) == bool(found)
    assert found in "".join(late)


def test_a_process_that_was_killed_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await Client.outcome(200.0)

    assert len(calls_of(monkeypatch, main, 0.0)) == 1
    assert calls_of(monkeypatch, main, 0.0, Process.kill) == []


def test_a_commit_may_wait_for_others_until_it_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await asyncio.gather(Transaction.commit(200.0), Transaction.commit(200.0, wait_visible=True))

    assert len(calls_of(monkeypatch, main, 0.0)) == 1


WELCOME = Welcome("named", 0, 1, 1_000_000)


class SilentLink:
    """A connection of a session; the service welcomes it after some seconds, and ends it some seconds later."""

    def __init__(self, welcomed_after: float, lost_after: float) -> None:
        self._times = [welcomed_after, lost_after]

    def start(self, user: LinkUser) -> None:
        later, (welcomed_after, lost_after) = asyncio.get_running_loop().call_later, self._times
        self._calls = [
            later(welcomed_after, user.receive, ServerFrame(welcome=WELCOME)),
            later(welcomed_after + lost_after, user.ended, ServiceUnavailable("the connection is lost")),
        ]

    def wake(self) -> None:
        pass

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()


@pytest.mark.parametrize(
    ("times", "calm", "found"),
    [
        ([(19.0, 200.0)], 0.0, ""),
        ([(21.0, 200.0)], 0.0, "had its welcome 21.0 s after"),
        ([(21.0, 200.0)], 2.0, ""),
        ([(200.0, 200.0)], 30.0, "had no welcome 70.0 s after"),
        ([(1.0, 30.0), (1.0, 30.0), (1.0, 300.0)], 0.0, ""),
        ([(1.0, 30.0), (300.0, 300.0)], 0.0, "session named of app#1 had no welcome 69.0 s after"),
    ],
    ids=["in time", "late", "late before the calm", "never", "reconnects in time", "reconnects and waits for ever"],
)
def test_a_session_without_a_welcome_is_found(times: list[tuple[float, float]], calm: float, found: str) -> None:
    links = [SilentLink(*each) for each in times]

    async def connect() -> SilentLink:
        return links.pop(0)

    async def main() -> None:
        ClientSession(connect, 500.0).begin()
        await asyncio.Event().wait()

    late = late_in(main, calm)
    assert len(late) == bool(found)
    assert found in "".join(late)


def test_a_session_that_was_closed_waits_for_no_welcome() -> None:
    async def connect() -> SilentLink:
        return SilentLink(300.0, 300.0)

    async def main() -> None:
        session = ClientSession(connect, 500.0)
        session.begin()
        await asyncio.sleep(1.0)
        await session.close()
        await asyncio.Event().wait()

    assert late_in(main, calm=0.0) == []


@pytest.mark.parametrize(
    ("seconds", "paused", "found"),
    [(CLOSE_SECONDS - 1.0, 0.0, ""), (CLOSE_SECONDS + 1.0, 0.0, "waited 8.0 s"), (30.0, 24.0, "")],
    ids=["in time", "late", "paused meanwhile"],
)
def test_a_session_that_closes_late_is_found(
    monkeypatch: pytest.MonkeyPatch, seconds: float, paused: float, found: str
) -> None:
    async def closed_after(_: ClientSession) -> None:
        await asyncio.sleep(seconds)

    async def connect() -> SilentLink:
        return SilentLink(300.0, 300.0)

    async def main() -> None:
        await ClientSession(connect, 500.0).close()

    monkeypatch.setattr(ClientSession, "close", closed_after)
    with World(seed=1) as world:
        world.enter(Calls(world).recorded())
        process = world.host("beta").start("app", main)
        world.run(1.0)
        if paused:
            process.pause()
            world.scheduler.after(paused, process.resume)
        if found:
            with pytest.raises(Finding, match=found):
                world.run(100.0)
        else:
            world.run(100.0)


TXN = TxnId(0, 5)


class FailingCommit:
    """A transaction whose commit fails; `queued`: whether its session still has the commit to send."""

    def __init__(self, *, queued: bool) -> None:
        requests = Requests(lambda: None)
        if queued:
            requests.ask("commits", Commit(next(requests.numbers), TXN, (), ()))
        self._session = SimpleNamespace(core=SimpleNamespace(requests=requests))


@pytest.mark.parametrize(
    ("sent", "queued", "found"),
    [((TXN,), False, ""), ((), True, ""), ((), False, "was never sent"), ((TxnId(0, 6),), False, "was never sent")],
    ids=["sent", "queued", "not sent", "another one sent"],
)
def test_an_unknown_outcome_of_a_commit_that_was_never_sent_is_found(
    monkeypatch: pytest.MonkeyPatch, sent: tuple[TxnId, ...], queued: bool, found: str
) -> None:
    async def failed(_: FailingCommit, **__: Any) -> None:
        raise OutcomeUnknown(TXN, "the client gave up")

    frames = [ClientFrame(commits=(Commit(1, txn, (), ()),)) for txn in sent]

    async def main() -> None:
        while frames:
            ClientSession.take_frame(Any)
        with contextlib.suppress(OutcomeUnknown):
            await Transaction.commit(FailingCommit(queued=queued))

    monkeypatch.setattr(Transaction, "commit", failed)
    monkeypatch.setattr(ClientSession, "take_frame", lambda _: frames.pop())
    if found:
        with pytest.raises(Finding, match=found):
            late_in(main, calm=0.0)
    else:
        assert late_in(main, calm=0.0) == []
