"""The processes of the benchmarks run as installed ones do."""

from __future__ import annotations

import pytest

from bench.service_process import as_installed


def test_modules_of_a_benchmarked_service_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    first, second = as_installed(), as_installed()
    assert "PYTHONDONTWRITEBYTECODE" not in first
    assert first["PYTHONPYCACHEPREFIX"] == second["PYTHONPYCACHEPREFIX"]
