"""Build 1 of what users expect: a typed API, errors at one place, and optional packages as extras."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ForwardRef

import pytest
from source_tree import ROOT, modules, within
from users.doc_blocks import PAGES, blocks_of, published_code

import broker_io
import txnbuffer
from broker_io.errors import Error
from broker_io.filelog.log import FileBroker
from broker_io.pulsar.broker import PulsarBroker
from broker_io.remote.broker import RemoteBroker
from broker_io.remote.service import LogService

ERROR_HOMES = ("broker_io.errors", "snapshots.errors", "txnbuffer.errors")
PUBLIC_MODULES = ("broker_io", "txnbuffer", "txnbuffer.sinks", "txnbuffer.testing")
"""The modules whose names applications import."""
TESTING = ("broker_io.testing", "txnbuffer.testing")


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and methods of the public API, with their dotted names."""
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", None) or public_names(module):
            value = getattr(module, each)
            if inspect.isclass(value):
                yield from ((f"{name}.{each}.{one}", method) for one, method in methods_of(value))
            elif callable(value):
                yield f"{name}.{each}", value


def public_names(module: object) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def methods_of(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in inspect.getmembers(kind, callable):
        defined = getattr(value, "__module__", None) or ""
        if within(defined, "broker_io", "snapshots", "txnbuffer") and (not name.startswith("_") or name == "__init__"):
            yield name, value


def untyped(function: Callable[..., Any]) -> list[str]:
    """The parameters without a type, and options of any name and type."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.name not in ("self", "cls", "_")]
    bare = [each.name for each in named if each.annotation is each.empty]
    return bare + [each.name for each in named if each.kind is each.VAR_KEYWORD and each.annotation in ("Any", Any)]


def test_no_function_of_the_api_has_untyped_parameters() -> None:
    found = {name: wrong for name, function in public_functions() if (wrong := untyped(function))}
    assert found == {}


def test_untyped_parameters_are_seen() -> None:
    def function(one, two: int, **options: Any) -> None: ...

    assert untyped(function) == ["one", "options"]
    names = [name for name, _ in public_functions()]
    assert {"broker_io.open_broker", "txnbuffer.connect", "txnbuffer.Client.process"} <= {*names}


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (broker_io.FileOptions, FileBroker.open),
        (broker_io.RemoteOptions, RemoteBroker),
        (broker_io.PulsarOptions, PulsarBroker),
        (broker_io.LogServiceOptions, LogService),
    ],
)
def test_typed_options_are_those_of_the_backend(options: type, backend: Callable[..., Any]) -> None:
    declared = {name: hint.__forward_arg__ for name, hint in options.__annotations__.items()}
    assert all(isinstance(hint, ForwardRef) for hint in options.__annotations__.values())
    _, *taken = inspect.signature(backend).parameters.values()
    assert declared == {each.name: each.annotation for each in taken}


# Errors


def all_errors() -> dict[str, type[Error]]:
    """The errors of the three modules that define them, by name."""
    values = [value for home in ERROR_HOMES for value in vars(importlib.import_module(home)).values()]
    return {value.__name__: value for value in values if inspect.isclass(value) and issubclass(value, Error)}


def words(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Z]\w+\b", text))


def documented() -> str:
    """All pages, and the docstrings of the public API, of which the reference is made."""
    described = [(ROOT / "CHANGELOG.md").read_text()]
    described += [inspect.getdoc(function) or "" for _, function in public_functions()]
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        described += [inspect.getdoc(getattr(module, each)) or "" for each in getattr(module, "__all__", ())]
    return "\n".join([*(page.read_text() for page in PAGES), *described])


def test_errors_that_the_documentation_names_can_be_imported_from_txnbuffer() -> None:
    errors = all_errors()
    named = words(documented()) & {*errors}
    assert {"TransactionAborted", "InvalidRequest", "Locked", "CallerError"} <= named
    assert sorted(named - {*txnbuffer.__all__}) == [], "add them to txnbuffer/__init__.py"
    assert [name for name in named if getattr(txnbuffer, name) is not errors[name]] == []


def test_what_a_page_calls_an_error_exists() -> None:
    """A class in backticks in the first column of a table whose head says error."""
    tables = re.compile(r"^\| errors? \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", re.MULTILINE)
    named = {
        name
        for page in PAGES
        for rows in tables.findall(page.read_text())
        for row in rows.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert len(named) > 3
    assert named <= {*all_errors()}


# Blocks of the pages


FOREIGN = ("confluent_kafka",)
"""Packages that published code uses and the tests do not install."""


def mypy(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Check files as a user does, who has txnbuffer installed: strictly, without this repository's settings."""
    config = [f"[mypy-{package}.*]\nignore_missing_imports = true\n" for package in FOREIGN]
    (directory / "mypy.ini").write_text("[mypy]\n" + "".join(config))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-color-output"]
    command += [f"--cache-dir={ROOT / '.mypy_cache' / 'blocks'}", *arguments]
    command += ["--follow-imports=silent"]  # as for installed packages
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


WRONG = """
from broker_io import open_broker, serve_broker
from txnbuffer import Error, connect, connections
connect("file:x", serialiser=None)
connect("file:x", timeout="10")
connect("pulsar://x", broker_options={"admin": "http://x"})
open_broker("file:x", segment_byte=1)
open_broker("file:x", segment_bytes="1")
open_broker("file:x", segment_bytes=1, hashing="java")
serve_broker(open_broker("file:x"), limit=1)
connect("file:x").open_sync().reader("orders", start="start")
connect("file:x").open_sync().reader("orders", until="end")
connect("file:x").open_sync().reader("orders", isolation="committed")
connect("file:x").open_sync().stream("orders", to="end")
connect("file:x").open_sync().transaction(database="shop", number=1)
def order(txn) -> None: ...
"""
"""Each line after the first import is a type error, so options are typed and `txnbuffer` is a typed package."""


def test_published_code_passes_mypy_strict_and_wrong_calls_do_not(tmp_path: Path) -> None:
    code = published_code()
    assert [block.place for block in code if block.place.startswith("README.md:")]
    assert [block.place for block in code if block.place.startswith("docs/guide.md:")]
    places = {}
    for number, block in enumerate(code):
        name = Path(block.place).name if block.place.endswith(".py") else f"block_{number}.py"
        (tmp_path / name).write_text(block.source)
        places[name] = block.place
    assert len(places) == len(code)
    (tmp_path / "wrong.py").write_text(WRONG)
    lines = mypy(tmp_path, "wrong.py", *places).stdout.splitlines()
    wrong = [found[1] for line in lines if (found := re.match(r"wrong\.py:(\d+): error", line))]
    assert {*map(int, wrong)} == {*range(3, 17)}
    others = [line for line in lines if not line.startswith("wrong.py:")]
    assert others == [], [re.sub(r"^(\w+\.py):", lambda file: f"{places[file[1]]} line ", line) for line in others]


def test_blocks_of_a_page_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```text\n```\n```python\na = 1\n```\n- item\n    ```python\n    if a:\n        b = 2\n    ```\n")
    monkeypatch.setattr("users.doc_blocks.ROOT", tmp_path)
    assert blocks_of(page) == [("page.md:3", "a = 1\n"), ("page.md:7", "if a:\n    b = 2\n")]


# Extras


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_product_needs_nothing_of_testing() -> None:
    users = [
        module.path
        for module in modules("broker_io", "snapshots", "txnbuffer")
        if not within(module.name, *TESTING) and any(within(found.dotted, *TESTING) for found in module.imports())
    ]
    assert users == []


def test_testing_needs_only_its_extra() -> None:
    """What modules for tests import besides the standard library, the package and its requirements."""
    extra = {re.split(r"[<>=]", each)[0] for each in project()["optional-dependencies"]["testing"]}
    own = {"broker_io", "snapshots", "txnbuffer", "numpy", *sys.stdlib_module_names}
    imported = {
        found.dotted.partition(".")[0]
        for module in modules(*(name.replace(".", "/") for name in TESTING))
        for found in module.imports()
    }
    assert imported - own == extra


def test_typed_packages_say_so_in_the_wheel(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    packed = zipfile.ZipFile(built).namelist()
    assert [name for name in packed if name.endswith("py.typed")] == [
        "broker_io/py.typed", "snapshots/py.typed", "txnbuffer/py.typed",
    ]  # fmt: skip
    assert [name for name in packed if name.startswith("tests/")] == []


def test_names_of_txnbuffer_are_declared_once_for_types_and_for_imports() -> None:
    tree = ast.parse((ROOT / "txnbuffer" / "__init__.py").read_text())
    declared = [
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "typing")
        for alias in node.names
    ]
    assert sorted(name for name, _ in declared) == sorted(txnbuffer.__all__) == sorted({*txnbuffer.__all__})
    for name, home in declared:
        assert getattr(txnbuffer, name) is getattr(importlib.import_module(str(home)), name), name
