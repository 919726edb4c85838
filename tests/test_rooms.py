"""The rooms of the service and of the client: what each may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_tree import PACKAGES, Module, modules, within

PRODUCT = modules(*PACKAGES)
ROOMS = (
    ("service.door", "service.loop"),
    ("service.log_readers",),
    ("service.standby",),
    ("service.topics",),
    ("service.cluster", "service.streams"),
    ("service.engine",),
    ("service.servers",),
    ("service.offline", "service.process", "service.stored"),
    ("client.lifecycle", "client.producer_names", "client.serializers", "client.topic_names", "client.topic_queries"),
    ("client.path", "client.reading"),
    ("client.session",),
    ("client.admin_clients", "client.base"),
    ("client.database_transaction", "client.streams", "client.transaction"),
    ("client.groups",),
    ("client.client",),
    ("client.branches", "client.partition_streams", "client.seeking", "client.sync"),
    ("client.connection",),
)
"""The rooms of the service and of the client, and the modules beside them: each imports only those of rows before."""
ROOM_ROWS: dict[str, int] = {f"txnbuffer.{room}": row for row, rooms in enumerate(ROOMS) for room in rooms}


def against_rooms(module: Module) -> Iterator[str]:
    """The imports of a module of the service or the client from rooms that are not below its own."""
    room = _room(module.name)
    for found in module.imports() if room else ():
        other = _room(found.dotted)
        if other and other != room and _inside(other) == _inside(room) and ROOM_ROWS[room] <= ROOM_ROWS[other]:
            yield f"{module.path}:{found.line} imports {found.dotted}: rooms import only those of the rows before"


def _room(name: str) -> str:
    room = ".".join(name.split(".")[:3])
    return room if room in ROOM_ROWS else ""


def _inside(room: str) -> str:
    return room.rpartition(".")[0]


def test_rooms_say_what_belongs_there_and_what_they_import() -> None:
    inside = [module for module in PRODUCT if within(module.name, "txnbuffer.service", "txnbuffer.client")]
    assert [module.name for module in inside if module.name.count(".") > 1 and not _room(module.name)] == []
    rooms = [module for module in inside if module.name in ROOM_ROWS and module.path.endswith("/__init__.py")]
    assert [room.name for room in rooms if "It may import" not in (ast.get_docstring(room.tree) or "")] == []
    assert [text for module in inside for text in against_rooms(module)] == []


def test_imports_against_the_rooms_are_seen() -> None:
    below = Module("txnbuffer/service/door/x.py", "from txnbuffer.service.engine.engine import Engine")
    above = Module("txnbuffer/service/engine/x.py", "from txnbuffer.service.door.access import Access")
    assert [len([*against_rooms(module)]) for module in (below, above)] == [1, 0]
