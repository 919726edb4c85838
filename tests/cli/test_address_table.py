"""Each command answers, or refuses in one sentence, at a directory and at a service: the rows of the table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from command_table import ROWS, Place, Row, commands_with_address, filled, names_in_table
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.cli import output

LINE = attrgetter("line")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ServiceProcess(tmp_path_factory.mktemp("service") / "log") as process:
        address = f"txnbuf://127.0.0.1:{process.port}"
        with connect(address) as client, filled(client) as transactions:
            yield Place("service", address, transactions)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The directory of a service that was killed, and the transactions that are open there."""
    directory = tmp_path_factory.mktemp("killed") / "log"
    process = ServiceProcess(directory).wait_serving()
    with connect(f"txnbuf://127.0.0.1:{process.port}", max_unavailable=1.0) as client, filled(client) as transactions:
        process.kill()
    return directory, transactions


@pytest.fixture
def directory(killed: tuple[Path, dict[str, str]], tmp_path: Path) -> Place:
    return Place("file", f"file:{shutil.copytree(killed[0], tmp_path / 'log')}", killed[1])


def test_every_command_with_an_address_is_in_the_table() -> None:
    assert commands_with_address() - names_in_table() == set()
    assert "topics create" in names_in_table()


@pytest.mark.parametrize("row", ROWS, ids=LINE)
def test_a_directory(row: Row, directory: Place, tmp_path: Path) -> None:
    directory.check(row, tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=LINE)
def test_a_service(row: Row, service: Place, tmp_path: Path) -> None:
    service.check(row, tmp_path)


@pytest.mark.parametrize("row", [row for row in ROWS if row.file[0] == 0], ids=LINE)
def test_no_line_is_wider_than_a_terminal(
    row: Row, directory: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    assert [line for line in directory.printed(row, tmp_path).stdout.splitlines() if len(line) > 80] == []
