"""An application of a simulated world with an embedded log of its own, which it opens and closes again and again."""

from __future__ import annotations

import asyncio
import random

from sim.apps import PAUSE, App, Setting
from sim.world import Host

from broker_io.errors import Error, Locked
from txnbuffer import connect
from txnbuffer.client.client import Client

TOPIC = "local"


class LocalLog(App):
    """Commits, aborts and leaves transactions in its log; those open when it closed the log block no later reader.

    Whoever is cancelled while a log is opened or closed leaves it closed.
    """

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random) -> None:
        super().__init__(name, host, setting, choose)
        self._committed: list[bytes] = []
        self._unknown: set[bytes] = set()
        self._closed = True
        """Whether the last client that opened the log has closed it."""
        self._killed = False
        """Whether a process ended while it had a client: its transactions stay open, and hide what comes after them.

        The next owner aborts them after `session_timeout`; no client of this application lasts as long.
        """

    async def _main(self) -> None:
        self._killed |= not self._closed
        while True:
            try:
                closed, self._closed = self._closed, False
                async with asyncio.timeout(self._patience()), connect(f"file:/{self.name}") as client:
                    await self._use(client, whole=closed and not self._killed)
                self._closed = True
            except TimeoutError:
                self.log("was cancelled")
            except Locked as error:
                self.history.report(f"{self.name} has left its own log open: {error}")
            except Error as error:
                self.log(f"opens its log again after {error!r:.200}")
            await asyncio.sleep(self.choose.uniform(0.0, 2 * PAUSE))

    def _patience(self) -> float | None:
        """The seconds after which it is cancelled, also while it opens or closes its log."""
        return self.choose.choice((None, None, *(self.choose.uniform(0.0, most) for most in (0.005, 0.05, 1.0))))

    async def _use(self, client: Client, *, whole: bool) -> None:
        await self._commit(client)
        self._check(await self._read(client), whole=whole)
        for _ in range(self.choose.randint(0, 3)):
            if self.choose.random() < 0.5:
                await self._commit(client)
            else:
                await self._leave(client, aborts=self.choose.random() < 0.5)

    async def _commit(self, client: Client) -> None:
        value = self._value()
        async with client.transaction() as transaction:
            await transaction.send(TOPIC, value, key=self._key(value))
            self._unknown.add(value)
        self._unknown.discard(value)
        self._committed.append(value)

    async def _leave(self, client: Client, *, aborts: bool) -> None:
        transaction = await client.transaction().begin()
        value = self._value()
        await transaction.send(TOPIC, value, key=self._key(value))
        if aborts:
            await transaction.abort()

    async def _read(self, client: Client) -> list[bytes]:
        found: list[bytes] = []
        async with await client.reader(TOPIC) as reader:
            while (batch := await reader.read(timeout=PAUSE)) is not None:
                found += (record.value or b"" for record in batch)
        return found

    def _check(self, found: list[bytes], *, whole: bool) -> None:
        """Compare what is shown: all that committed, each once and in order, and at most what may have committed."""
        committed = [value for value in found if value not in self._unknown]
        wanted = self._committed if whole else self._committed[: len(committed)]
        if committed != wanted or len({*found}) < len(found):
            self.history.report(f"{self.name} was shown {found} of its own log, and has committed {self._committed}")
