"""Errors over the session's wire: those of `broker_io.faults`, with transaction ids.

An attribute `txn` goes as the text `most:least` among the details.
"""

from __future__ import annotations

from broker_io import faults
from broker_io.errors import Error
from broker_io.faults import ERROR_SCHEMA
from txnbuffer.model import TxnId
from txnbuffer.wire.parts import Fields

__all__ = ["ERROR_SCHEMA", "tell", "told"]


def tell(error: Error) -> Fields:
    """The record of an error."""
    return faults.tell(error, lambda value: str(value) if isinstance(value, TxnId) else faults.detail(value))


def told(fields: Fields) -> Error:
    """The error of a record. Raises ValueError if it is none."""
    error = faults.told(fields)
    txn = vars(error).get("txn")
    if txn is not None:
        error.txn = TxnId.parse(str(txn))  # type: ignore[attr-defined]  # whichever class has one
    return error
