"""The helper of golden files: it detects different bytes, and writes only on request."""

from pathlib import Path

import golden_files
import pytest


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden_files, "GOLDEN", tmp_path)
    monkeypatch.delenv("UPDATE_GOLDEN", raising=False)
    return tmp_path


def test_equal_bytes_pass_and_others_fail(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"one")
    assert golden_files.committed("a.bin", b"one") == b"one"
    with pytest.raises(AssertionError, match=r"a\.bin"):
        golden_files.committed("a.bin", b"two")
    assert (directory / "a.bin").read_bytes() == b"one"


def test_missing_file_is_not_created_by_default(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        golden_files.committed("b.bin", b"one")
    assert not (directory / "b.bin").exists()


def test_file_is_written_on_request(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDATE_GOLDEN", "1")
    assert golden_files.committed("kind/c.bin", b"two") == b"two"
    assert (directory / "kind" / "c.bin").read_bytes() == b"two"
