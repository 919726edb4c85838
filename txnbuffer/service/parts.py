"""What is appended: records that clients send, markers, borders, decisions; each knows whom to tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker_io.batch import Batch, Message
from broker_io.errors import Error
from txnbuffer.service.connection import Connection
from txnbuffer.service.limits import weight
from txnbuffer.service.sends import Sends


class SendPart:
    """Records of a client. `least`: the transactions in them."""

    __slots__ = ("_account", "_connection", "_least", "_number", "_sends", "batch", "size")

    reserved = False

    def __init__(
        self, batch: Batch, connection: Connection, number: int, least: list[int], sends: Sends, account: Account
    ) -> None:
        self.batch = batch
        self.size = weight(batch)
        self._connection = connection
        self._number = number
        self._least = least
        self._sends = sends
        self._account = account
        account.bytes += self.size
        connection.unsettled += self.size

    def landed(self) -> None:
        self._account.bytes -= self.size
        self._account.records += len(self.batch)
        self._connection.settle(self._number, self.size)

    def failed(self, error: Error) -> None:
        self._account.bytes -= self.size
        self._sends.fail(self._least, error)
        self._connection.fail(self._number, error)
        self._connection.settle(self._number, self.size)


class Account:
    """`bytes` of clients that are not settled; `records` of clients that were appended."""

    __slots__ = ("bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0


class MessagesPart:
    """Messages of the service itself."""

    __slots__ = ("_failed", "_landed", "batch", "size")

    reserved = True

    def __init__(
        self, messages: Sequence[Message], landed: Callable[[], None], failed: Callable[[Error], None]
    ) -> None:
        self.batch = Batch.of(messages)
        self.size = weight(self.batch)
        self._landed = landed
        self._failed = failed

    def landed(self) -> None:
        self._landed()

    def failed(self, error: Error) -> None:
        self._failed(error)
