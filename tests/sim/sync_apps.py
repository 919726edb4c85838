"""An application of a simulated world without asyncio: threads that share a sync client and write transactions."""

from __future__ import annotations

import random
from typing import Any

from sim.apps import BROKEN, NOT_COMMITTED, PAUSE, App, Setting
from sim.history import Attempt, Fate
from sim.world import Host

from broker_io.environment import current
from broker_io.errors import Error
from txnbuffer import connect
from txnbuffer.errors import NotVisible, OutcomeUnknown


class SyncWriter(App):
    """Writes transactions in a few threads."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, count: int) -> None:
        super().__init__(name, host, setting, choose)
        self.left = count

    def start(self) -> None:
        if not self.done:
            self.process = self.host.spawn(self.name, self._run)

    def _run(self) -> None:
        while not self.done:
            try:
                with connect(self.setting.address, **self.setting.options) as client:
                    threads = [current().threads.thread(lambda: self._work(client)) for _ in range(2)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                    self.done = self.left <= 0
            except Error as error:
                self.log(f"connects again after {error!r:.200}")
                current().clock.sleep(PAUSE)

    def _work(self, client: Any) -> None:
        while self.left > 0:
            self.left -= 1
            attempt = self.history.attempt(self.name)
            try:
                self._transaction(client, attempt)
            except NOT_COMMITTED:
                self._ended(attempt, Fate.ABORTED)
            except NotVisible:
                self._ended(attempt, Fate.COMMITTED)
            except OutcomeUnknown:
                pass
            except Error as error:
                self.log(f"{attempt} failed: {error!r:.300}")
                current().clock.sleep(PAUSE)
                if isinstance(error, BROKEN):
                    return
            current().clock.sleep(self._pause())

    def _transaction(self, client: Any, attempt: Attempt) -> None:
        topics = self.choose.sample(self.setting.topics, self.choose.randint(1, len(self.setting.topics)))
        with client.transaction() as transaction:
            attempt.txn = transaction.id
            for topic in topics:
                for _ in range(self.choose.randint(1, 3)):
                    value = self._value()
                    where = self._where(topic, value)
                    self.history.sent(attempt, topic, value, **where)
                    self._write(transaction, topic, value, where)
            if self.choose.random() < 0.1:
                transaction.abort()
                self._ended(attempt, Fate.ABORTED)
                return
            self.history.asked(attempt)
            transaction.commit()
            self._ended(attempt, Fate.COMMITTED)
