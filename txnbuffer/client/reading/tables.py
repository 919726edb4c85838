"""Records of a reader with an end as Arrow tables: some columns, with keys and values decoded

Where `decode` gives a form for keys or values, their column is

    "text"           string: the bytes are UTF-8
    "json"           what the JSON values are: numbers, strings, lists, structs. The types of all records unify
    "deserializer"   the same for what the deserializer of the topic returns, of values only

A record that cannot be decoded, or whose type does not unify with those before, is an UndecodableValue that names it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from txnbuffer.client.reading.arrow import SCHEMA, arrow_batch, binary
from txnbuffer.client.reading.records import Decode, RecordBatch
from txnbuffer.errors import InvalidRequest, UndecodableValue

PERMISSIVE: Any = {"promote_options": "permissive"}
FORMS = {"key": ("text", "json"), "value": ("text", "json", "deserializer")}
ERRORS = (pa.ArrowException, OverflowError, ValueError, TypeError)
"""What Arrow raises for objects of different types."""


def check_table(columns: Sequence[str] | None, decode: Decode | None) -> tuple[list[str], Mapping[str, str]]:
    """Return the names of the columns, and the forms of decoded ones. Raises InvalidRequest."""
    known = SCHEMA.names
    wanted = known if columns is None else columns
    if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted or {*wanted} - {*known}:
        raise InvalidRequest(f"columns must be a list of some of {', '.join(known)}, got {columns!r:.80}")
    forms = {str(name): str(form) for name, form in (decode or {}).items()}
    for name, form in forms.items():
        if form not in FORMS.get(name, ()):
            raise InvalidRequest(
                f"decode gives 'text' or 'json' for key and value, or 'deserializer' for value, got {name!r}: {form!r}"
            )
    return [*dict.fromkeys(wanted)], {name: form for name, form in forms.items() if name in wanted}


def table_batch(batch: RecordBatch, columns: Sequence[str], forms: Mapping[str, str]) -> pa.RecordBatch:
    """Some columns of records. Raises UndecodableValue."""
    found = arrow_batch(batch, columns)
    for name, form in forms.items():
        found = found.set_column(columns.index(name), name, _decoded(batch, name, form))
    return found


def record_batches(
    batches: Iterable[RecordBatch], columns: Sequence[str] | None, decode: Decode | None
) -> pa.RecordBatchReader:
    """The records as Arrow record batches with the types of the first one. Raises InvalidRequest.

    Reading it raises UndecodableValue, also for a record of another type than those of the first batch.
    """
    names, forms = check_table(columns, decode)
    pieces = ((batch, table_batch(batch, names, forms)) for batch in batches)
    first = next(pieces, None)
    schema = _empty(names, forms) if first is None else first[1].schema

    def typed() -> Iterator[pa.RecordBatch]:
        for batch, piece in [] if first is None else itertools.chain([first], pieces):
            if piece.schema == schema:
                yield piece
            elif _unified(schema, piece.schema) == schema:
                yield from pa.concat_tables([schema.empty_table(), _table(piece)], **PERMISSIVE).to_batches()
            else:
                raise _unlike(batch, names, forms, schema, widens=False)

    return pa.RecordBatchReader.from_batches(schema, typed())


def whole_table(batches: Iterable[RecordBatch], columns: Sequence[str] | None, decode: Decode | None) -> pa.Table:
    """All records as a table, in memory of its own: what is not asked for is dropped batch by batch.

    Raises InvalidRequest, UndecodableValue.
    """
    names, forms = check_table(columns, decode)
    schema = _empty(names, forms)
    tables = [schema.empty_table()]
    for batch in batches:
        piece = table_batch(batch, names, forms)
        unified = _unified(schema, piece.schema)
        if unified is None:
            raise _unlike(batch, names, forms, schema, widens=True)
        schema = unified
        tables.append(pa.Table.from_arrays([pa.concat_arrays([one, one.slice(0, 0)]) for one in piece], names=names))
    try:
        return pa.concat_tables(tables, **PERMISSIVE)
    except ERRORS as error:
        raise InvalidRequest(f"the decoded records have no common type ({error}): decode them as text") from None


def _table(piece: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([piece])


def _empty(names: Sequence[str], forms: Mapping[str, str]) -> pa.Schema:
    """The types of no records: those of decoded objects are unknown."""
    types = {"text": pa.string(), "json": pa.null(), "deserializer": pa.null()}
    return pa.schema([(name, types[forms[name]] if name in forms else SCHEMA.field(name).type) for name in names])


def _unified(schema: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    try:
        return pa.unify_schemas([schema, other], **PERMISSIVE)
    except ERRORS:
        return None


def _unlike(
    batch: RecordBatch, names: Sequence[str], forms: Mapping[str, str], schema: pa.Schema, *, widens: bool
) -> UndecodableValue:
    """The error of the first record whose type does not fit that of the records before it."""
    for row in range(len(batch)):
        one = table_batch(batch.take(slice(row, row + 1)), names, forms).schema
        unified = _unified(schema, one)
        if unified is None or not (widens or unified == schema):
            break
        schema = unified
    name = next(name for name in forms if widens or one.field(name).type != schema.field(name).type)
    why = f"its type {one.field(name).type} does not fit {schema.field(name).type} of the records before it"
    remedy = "" if widens else "; read_table finds a type for all of them"
    return UndecodableValue(batch.topic, batch.positions[row], why + remedy, name)


def _decoded(batch: RecordBatch, name: str, form: str) -> pa.Array:
    """The keys or values in a form. Raises UndecodableValue."""
    if form == "deserializer":
        return _column(batch, name, [_plain(record.value) for record in batch])
    blobs = batch.messages.keys if name == "key" else batch.messages.values
    decode: Callable[[bytes], Any] = bytes.decode if form == "text" else json.loads
    objects: list[Any] = []
    for row, blob in enumerate(blobs.to_list()):
        try:
            objects.append(None if blob is None else decode(blob))
        except (ValueError, RecursionError) as error:
            raise UndecodableValue(batch.topic, batch.positions[row], f"it is not {form}: {error}", name) from None
    if form == "text":
        return binary(blobs, pa.string())
    return _column(batch, name, objects)


def _column(batch: RecordBatch, name: str, objects: list[Any]) -> pa.Array:
    """Objects as a column. Raises UndecodableValue for the first one that does not fit those before it."""
    try:
        return pa.array(objects)
    except ERRORS as error:
        failed = str(error)
    fits, fails = 0, len(objects)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            pa.array(objects[:middle])
            fits = middle
        except ERRORS as error:
            fails, failed = middle, str(error)
    raise UndecodableValue(batch.topic, batch.positions[fails - 1], f"it does not fit those before it: {failed}", name)


def _plain(value: Any) -> Any:
    """What a deserializer returned, as dictionaries and lists."""
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
