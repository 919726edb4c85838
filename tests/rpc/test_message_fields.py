"""Values as messages with the same names, and back."""

from __future__ import annotations

import pytest

from broker_io.errors import Closed
from broker_io.filelog.log.records import Fork, Mark
from broker_io.filelog.replication.messages import CatchUp, CopyBegin, Rejoin
from broker_io.rpc.encoding import encode_error, fields, reader
from broker_io.rpc.replication_pb2 import LinkCopyBegin, LinkRejoin
from txnbuffer.errors import Error
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import Failure
from txnbuffer.rpc.session_encoding import decode_error
from txnbuffer.rpc.session_pb2 import SendFailure


def test_values_within_values_survive() -> None:
    begin = CopyBegin(3, b"store", Mark(1, 2, 3), (Fork(2, Mark(1, 1, 9)), Fork(3, Mark(2, 7, 8))))
    assert reader(CopyBegin)(LinkCopyBegin(**fields(begin))) == begin


@pytest.mark.parametrize("plan", CatchUp)
def test_an_enum_is_sent_as_its_value(plan: CatchUp) -> None:
    rejoin = Rejoin(1, b"store", plan, Mark(4, 5, 6))
    message = LinkRejoin(**fields(rejoin))
    assert message.plan == plan.value
    assert reader(Rejoin)(message) == rejoin


def test_an_unknown_value_of_an_enum_is_an_error() -> None:
    with pytest.raises(ValueError, match="elsewhere"):
        reader(Rejoin)(LinkRejoin(plan="elsewhere"))


@pytest.mark.parametrize("txn", [None, TxnId(0, 7)])
def test_a_field_may_be_absent_and_types_have_their_own_readers(txn: TxnId | None) -> None:
    message = SendFailure(send=5, error=encode_error(Closed("gone")), txn=txn and fields(txn))
    found = reader(Failure, {Error: decode_error})(message)
    assert (found.send, found.txn, type(found.error)) == (5, txn, Closed)
