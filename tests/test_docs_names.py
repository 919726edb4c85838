"""What documents and texts of the product name exists: extras, modules, files, options, commands and errors."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from source_tree import PACKAGES, ROOT

from txnbuffer.cli import app

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)
OTHER_TEXTS = [path for part in ("examples", "docker") for path in sorted((ROOT / part).iterdir()) if path.is_file()]
PLUG_IN = sorted((ROOT / "broker_plugin" / "java").rglob("*.java"))
MESSAGES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.proto"))

EXTRA = re.compile(r"txnbuffer\[([\w,-]+)\]")
DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)[`(]")
PATH = re.compile(rf"`((?:{'|'.join(PACKAGES)}|bench|docker|docs|examples|requirements|tests)/[\w./*-]*)`")
OPTION = re.compile(r"`(--[a-z][a-z-]+)[ =`]")
COMMAND = re.compile(r"(?:^ {4,}|`)txnbuf ([a-z].*?)(?:`|\||  #|$)", re.MULTILINE)
LOGGER = re.compile(r'getLogger\("([\w.]+)"\)')
CAPITALS = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]*)*)`")
FOREIGN_NAMES = {
    *("Authorization", "Host", "Livelock", "OutOfDirectMemoryError", "SortedDict", "SortedKeyList", "SortedList"),
    *("TimeoutStopSec", "TransactionConflictException"),
}
"""Names of other programs, of HTTP, and of the simulator."""
NOT_MODULES = {
    *(f"txnbuffer.{name}" for name in ("first", "note", "readable", "reason", "state", "transaction")),
    *(f"txnbuffer.v1.{name}" for name in ("Admin", "Log", "Session", "Streams")),
}
"""Properties of a topic and of a subscription, and the services of the protocol files."""
FOREIGN_OPTIONS = {"--conf", "--master"}
"""Options of spark-submit, which `txnbuf pipeline submit` hands on."""


def texts(*paths: Path) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def named(pattern: re.Pattern[str], *paths: Path) -> dict[str, str]:
    """What the pattern finds in files, and one place of each."""
    return {
        found[1]: f"{name}:{text.count(chr(10), 0, found.start()) + 1}"
        for name, text in texts(*paths)
        for found in pattern.finditer(text)
    }


def module_file(dotted: str) -> Path | None:
    base = ROOT / dotted.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


@functools.cache
def defined(path: Path) -> set[str]:
    """The names at the top level of a module, with those that it imports or lists in `__all__`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # names of lazy exports
    return found


def is_there(dotted: str) -> bool:
    """Whether a module, or a name in one, exists."""
    module, _, name = dotted.rpartition(".")
    if (ROOT / dotted.replace(".", "/")).is_dir() or module_file(dotted) is not None:
        return True
    path = module_file(module)
    return path is not None and name in defined(path)


def missing_extras(names: Iterator[str] | dict[str, str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [each for each in names if not set(each.split(",")) <= set(extras)]


def test_extras_that_are_named_exist() -> None:
    found = named(EXTRA, *PAGES, *SOURCES, *OTHER_TEXTS)
    assert {"pulsar", "jwt"} <= set(found)
    assert {each: found[each] for each in missing_extras(found)} == {}


def test_modules_that_are_named_exist() -> None:
    found = named(DOTTED, *PAGES, *SOURCES)
    assert len(found) > 50
    others = NOT_MODULES | set(named(LOGGER, *SOURCES))
    assert {each: place for each, place in found.items() if each not in others and not is_there(each)} == {}


def test_files_that_are_named_exist() -> None:
    found = named(PATH, *PAGES, *SOURCES)
    assert len(found) > 50
    assert {each: place for each, place in found.items() if not list(ROOT.glob(each.replace("TARGET", "*")))} == {}


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands with their full names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{before}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")


@functools.cache
def all_commands() -> dict[str, click.Command]:
    return dict(commands(app.app))


def options(command: click.Command) -> set[str]:
    """The options that the help of a command shows."""
    shown = [one for one in command.get_params(click.Context(command)) if not getattr(one, "hidden", False)]
    return {text for one in shown for text in (*one.opts, *one.secondary_opts) if text.startswith("-")}


def unknown(line: str) -> list[str]:
    """What a line of the command `txnbuf` has that the help does not show."""
    words = line.split()
    name = next((each for each in (" ".join(words[:2]), words[0]) if each in all_commands()), None)
    if name is None:
        return [words[0]]
    command = all_commands()[name]
    if isinstance(command, click.Group) and re.fullmatch(r"[a-z-]+", "".join(words[1:2])):
        return [" ".join(words[:2])]  # a group is named alone, or with one of its commands
    known = options(command) | options(app.app)
    return [each for word in words if (each := word.partition("=")[0]).startswith("--") and each not in known]


def test_commands_and_options_that_are_named_exist() -> None:
    found = named(COMMAND, *PAGES, *SOURCES, *OTHER_TEXTS)
    assert len(found) > 100
    assert {place: unknown(line) for line, place in found.items() if unknown(line)} == {}
    every = {each for command in (app.app, *all_commands().values()) for each in options(command)} | FOREIGN_OPTIONS
    assert {each: place for each, place in named(OPTION, *PAGES).items() if each not in every} == {}


def test_errors_and_classes_that_are_named_exist() -> None:
    words = {word for _, text in texts(*SOURCES, *MESSAGES, *PLUG_IN) for word in re.findall(r"\w+", text)}
    found = named(CAPITALS, *PAGES)
    assert {"LogRestored", "NotVisible"} <= set(found)
    assert {each: place for each, place in found.items() if each not in words | FOREIGN_NAMES} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("compact file:DIR orders", []),
        ("compact --log file:DIR", ["--log"]),
        ("cursors add orders cache --at beginning", []),
        ("cursors drop orders", ["cursors drop"]),
        ("compress orders", ["compress"]),
    ],
)
def test_what_the_help_does_not_show_is_seen(line: str, found: list[str]) -> None:
    assert unknown(line) == found


def test_what_does_not_exist_is_seen() -> None:
    assert missing_extras({"jwt": "", "yaml": "", "pulsar,yaml": ""}) == ["yaml", "pulsar,yaml"]
    assert [is_there(f"broker_io.filelog.log{name}") for name in ("", ".commit", ".commit.Replicator")] == [True] * 3
    assert [is_there(f"broker_io.filelog.log.{name}") for name in ("replicator", "commit.Repeater")] == [False] * 2
