"""Who may read an embedded log: its user, and the group of a directory that is closed to all others"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import txnbuf
from file_logs import append, numbered

from broker_io.environment import current
from broker_io.filelog.log import FileBroker
from broker_io.permissions import exposure


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(directory: Path) -> None:
    with FileBroker.open(str(directory), committer=False) as broker:
        broker.create_topics(["t"])
        append(broker, "t", numbered(3))


def modes(*places: Path) -> list[set[str]]:
    """The permissions of the files, and of the directories."""
    found = [path for place in places for path in (place, *place.rglob("*"))]
    return [{oct(path.stat().st_mode & 0o777) for path in found if path.is_dir() is kind} for kind in (False, True)]


def test_files_of_logs_and_backups_are_closed_to_other_users(tmp_path: Path) -> None:
    log, restored, backup = tmp_path / "new" / "log", tmp_path / "restored", tmp_path / "backup"
    write(log)
    assert txnbuf("backup", f"file:{log}", str(backup)).returncode == 0
    assert txnbuf("restore", str(backup), f"file:{restored}").returncode == 0
    assert modes(log, restored, backup) == [{"0o600"}, {"0o700"}]


def test_a_directory_that_mkdir_made_is_no_permission_for_its_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    write(log)
    assert modes(*log.iterdir()) == [{"0o600"}, {"0o700"}]
    assert exposure(current().disk, str(log)) is None


def test_the_group_of_a_directory_that_is_closed_to_others_may_read_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir(0o750)
    write(log)
    write(log)
    assert modes(log) == [{"0o640"}, {"0o750"}]


def test_the_owner_of_a_log_and_verify_name_the_command_that_closes_what_others_may_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    write(log)
    log.chmod(0o755)
    (log / "manifest").chmod(0o644)
    write(log)
    remedy = f"other users of this machine may read the log in {log}: chmod -R go-rwx {log}, or only o-rwx"
    assert remedy in caplog.text
    assert exposure(current().disk, str(log)) is None  # the owner has written another manifest

    (log / "topics").chmod(0o755)
    assert remedy in txnbuf("verify", f"file:{log}").stderr
    assert os.system(f"chmod -R go-rwx {log}") == 0
    caplog.clear()
    write(log)
    assert "other users" not in caplog.text + txnbuf("verify", f"file:{log}").stderr
