"""The inventory: all targets, and the functions and modules that decode but need no target, with the reasons."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fuzz.sessions import SESSIONS
from fuzz.stored import STORED
from fuzz.target import Target
from fuzz.texts import TEXTS
from fuzz.wire import WIRE
from source_tree import Module

TARGETS: dict[str, Target] = {target.name: target for target in (*STORED, *WIRE, *TEXTS, *SESSIONS)}
LISTED = {decoder for target in TARGETS.values() for decoder in target.decoders}

NAMES = re.compile(r"_?(?:decode|parse|unpack|unsealed|deserialize|read_state|of_json)(?:_\w+)?")
"""Names of functions that decode."""
PRIMITIVES = {
    "ParseFromString", "FromString", "b64decode", "deserialize", "from_bytes", "fromhex", "fromisoformat", "frombuffer",
    "iter_unpack", "loads", "decompress", "schemaless_reader", "unpack", "unpack_from",
}  # fmt: skip
"""Methods of libraries that decode."""
INSIDE = {
    "broker_io.varint.decode_varint": "reads the numbers in messages for broker_io.rpc.encoding",
    "broker_io.block._of_columns.decode_columns": "wraps the decoders of columns",
    "broker_io.errors": "reads the cause of an error, a part of what the caller unpickles",
    "broker_io.filelog.log.journal_chain": "reads files with the decoders of broker_io.filelog.log.journal",
    "broker_io.filelog.log.log": "makes a number of random bytes",
    "broker_io.filelog.log.recovery": "opens logs, which the fuzzed directories are",
    "broker_io.filelog.log.redo": "reads names of incarnations, which broker_io.filelog.log.operations has checked",
    "broker_io.filelog.log.compaction_tasks": "reads bitmaps and keys that the same compaction has found",
    "broker_io.filelog.log.key_columns": "reads columns that the same compaction has written",
    "broker_io.filelog.pair.store": "makes a number of random bytes",
    "broker_io.standalone": "answers of a broker that this process has started",
    "snapshots.shards": "hashes names, decodes nothing",
    "txnbuffer.buffer.buffer.BufferSegments.unsealed": "the items of a buffer that are not sealed",
    "txnbuffer.buffer.held_back.HeldBack.of_json": "reads an answer of the service for a command that shows it",
    "txnbuffer.buffer.buffer.decode": "chooses between decode_rows and decode_columns",
    "txnbuffer.cli.commands.AddressCommand.parse_args": "passes the arguments of a command on to click",
    "txnbuffer.client.reading.followers.UncommittedFollower._unpack": "calls follow.unpacked",
    "txnbuffer.client.reading.records": "calls the application's deserializer; any exception becomes UndecodableValue",
    "txnbuffer.client.serializers.Schema.decode": "an interface of Pulsar's client library",
    "broker_io.pulsar.credentials": "reads the key file that its own operator names, once, at opening",
    "txnbuffer.databases.publisher": "reads rows that an outbox has checked, and records that a publisher has sent",
    "txnbuffer.demo.flights": "reads the data of the demo, which a package ships",
    "txnbuffer.demo.sites": "reads lines of processes that the demo has started",
    "txnbuffer.pipeline.delta": "reads files of delta-rs, JSON by line; any ValueError becomes UnreadableExport",
    "txnbuffer.pipeline.spark.newest": "reads columns of Arrow in memory, made by the same process",
    "txnbuffer.pipeline.spark.sink": "reads columns of Arrow in memory, made by the same process",
    "txnbuffer.recovery.newest_records": "reads rows that the same audit has written",
    "txnbuffer.service.door.health": "calls protobuf alone, whose only error ends the call",
    "txnbuffer.testing": "reads lines of a process that a test has started",
}
"""Functions and modules that decode and need no target of their own, with the reasons."""


def missing(source: list[Module]) -> list[str]:
    """The functions with a name in NAMES, and the modules that call one of PRIMITIVES, that are not listed."""
    found: list[str] = []
    for module in source:
        if module.name.endswith("_pb2"):
            continue
        found += [name for name in _decoders(module.tree, module.name) if name not in LISTED and name not in INSIDE]
        calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
        decodes = any(isinstance(call, ast.Attribute) and call.attr in PRIMITIVES for call in calls)
        if decodes and module.name not in INSIDE and not any(_module_of(one) == module.name for one in LISTED):
            found.append(module.name)
    return found


def _decoders(tree: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            if not isinstance(node, ast.ClassDef) and NAMES.fullmatch(node.name) and not _is_property(node):
                yield name
            yield from _decoders(node, name)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def _module_of(dotted: str) -> str:
    parts = dotted.split(".")
    while ".".join(parts) not in sys.modules:
        parts.pop()
    return ".".join(parts)


def function_of(dotted: str) -> Any:
    """The function with a dotted name."""
    module = _module_of(dotted)
    found: Any = importlib.import_module(module)
    for name in dotted.removeprefix(module + ".").split("."):
        found = getattr(found, name)
    return found


def documentation(target: Target) -> str:
    """The docstrings of a target's decoders and of their modules."""
    functions = [*map(function_of, target.decoders)]
    modules = [importlib.import_module(_module_of(decoder)) for decoder in target.decoders]
    return "\n".join([each.__doc__ or "" for each in (*functions, *modules)])


def entered(target: Target) -> set[str]:
    """The dotted names of the functions that the valid inputs of a target enter."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")

    for seed in target.seeds():
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            target.decode(seed)
        except target.errors:
            pass
        finally:
            sys.setprofile(before)
    return found
