"""Which etcd the tests use: the one on PATH, unless it may lose data when it is killed."""

from __future__ import annotations

from pathlib import Path

import etcd_server
import pytest


@pytest.mark.parametrize(
    ("version", "durable"),
    [
        ("3.4.21", False),
        ("3.4.22", True),
        ("3.4.23", True),
        ("3.5.1", False),
        ("3.5.5", False),
        ("3.5.6", True),
        ("3.5.30", True),
        ("3.6.0", True),
        ("4.0.0", True),
    ],
)
def test_etcd_on_the_path_is_used_if_it_loses_nothing(
    version: str, durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("etcd", "etcdctl"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    used = etcd_server.etcd_directory.__wrapped__()
    assert (used == tmp_path) == durable
    assert (used / "etcdctl").exists()


def test_etcd_without_its_control_program_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").write_text("#!/bin/sh\necho etcd Version: 3.5.6\n")
    (tmp_path / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert etcd_server.etcd_directory.__wrapped__() != tmp_path
