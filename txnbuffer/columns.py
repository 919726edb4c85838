"""Property columns of a batch as arrays of numbers, transaction ids and masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Labels, Numbers, PropertyColumn
from txnbuffer.model import TxnId
from txnbuffer.protocol import MARKER, TXN

ABSENT = -1
UNREADABLE = -2

_DIGITS_OF_63_BITS = 19
_PLAIN_IDS = re.compile(r"(?:[0-9]{1,18}:[0-9]{1,18}\n)*")


def numbers(column: PropertyColumn | None, count: int, limit: int) -> NDArray[np.int64]:
    """int64[count]: the numbers from 1 to `limit` that the texts stand for, ABSENT or UNREADABLE elsewhere."""
    if column is None:
        return np.full(count, ABSENT, np.int64)
    if isinstance(column, Numbers):
        values = np.where((column.values >= 1) & (column.values <= limit), column.values, UNREADABLE)
        return values if column.present is None else np.where(column.present, values, ABSENT)
    labels = _labels(column)
    table = np.full(len(labels.values) + 1, ABSENT, np.int64)
    table[:-1] = [number(text, limit) for text in labels.values]
    return table[labels.codes]


def number(text: str, limit: int) -> int:
    """The number from 1 to `limit` that a text stands for, else UNREADABLE."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_OF_63_BITS):
        return UNREADABLE
    value = int(text)
    return value if 1 <= value <= limit else UNREADABLE


def transaction_codes(column: PropertyColumn | None, count: int) -> tuple[NDArray[np.int32], IdTable]:
    """int32[count], rows of a table of the distinct ids; -1, its last row, where there is no text."""
    if column is None:
        return np.full(count, -1, np.int32), IdTable.of(())
    if isinstance(column, Numbers):  # a number has no colon
        return np.where(present(column, count), 0, -1).astype(np.int32), IdTable.of(("",))
    labels = used(_labels(column))
    return labels.codes, IdTable.of(labels.values)


class IdTable(NamedTuple):
    """Two int64[k + 1], most and least of k texts: UNREADABLE where one is no id, and ABSENT in the last row."""

    most: NDArray[np.int64]
    least: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[str]) -> IdTable:
        most, least = ids(texts)
        return cls(np.append(most, ABSENT), np.append(least, ABSENT))


def ids(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Most and least of each text, both UNREADABLE where the text is no transaction id."""
    lines = "\n".join(texts)
    pairs: list[tuple[int, int]]
    if _PLAIN_IDS.fullmatch(lines + "\n") and lines.count(":") == len(texts):
        flat = np.array([*map(int, lines.replace(":", "\n").split("\n"))], np.int64)
        most, least = flat[0::2], flat[1::2]
        return np.where(least > 0, most, UNREADABLE), np.where(least > 0, least, UNREADABLE)
    pairs = [_pair(text) for text in texts]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def present(column: PropertyColumn | None, count: int) -> NDArray[np.bool_]:
    """bool[count]: which rows have a text."""
    if column is None:
        return np.zeros(count, np.bool_)
    if isinstance(column, Numbers):
        return np.ones(count, np.bool_) if column.present is None else column.present
    return _labels(column).codes >= 0


def any_transactional(messages: Batch) -> bool:
    """Whether any of the messages is a marker or names a transaction, be it one that can't be read."""
    return any(present(messages.properties.get(name), len(messages)).any() for name in (TXN, MARKER))


def texts_equal(column: PropertyColumn | None, count: int, text: str) -> NDArray[np.bool_]:
    """bool[count]: which rows have exactly this text, which is a plain number."""
    if column is None:
        return np.zeros(count, np.bool_)
    if isinstance(column, Numbers):
        same: NDArray[np.bool_] = column.values == int(text)
        return same & present(column, count)
    labels = _labels(column)
    table = np.array([*(value == text for value in labels.values), False], np.bool_)
    return table[labels.codes]


def used(labels: Labels) -> Labels:
    """The same texts from a table that holds no more than the rows can need: slices share the table of the whole."""
    return labels if len(labels.values) <= len(labels.codes) else fitted(labels)


def fitted(labels: Labels) -> Labels:
    """The same texts from a table that holds those of these rows alone."""
    codes, renamed = np.unique(labels.codes, return_inverse=True)
    absent = int(len(codes) > 0 and codes[0] < 0)
    values = tuple(labels.values[code] for code in codes[absent:].tolist())
    return Labels((renamed - absent).astype(np.int32), values)


def _labels(column: PropertyColumn) -> Labels:
    return column if isinstance(column, Labels) else Labels.of(column.to_list())


def _pair(text: str) -> tuple[int, int]:
    try:
        return TxnId.parse(text)
    except ValueError:
        return UNREADABLE, UNREADABLE
