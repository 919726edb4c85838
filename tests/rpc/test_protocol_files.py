"""The generated modules are those of the protocol files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from source_tree import ROOT

GENERATED = sorted(
    path.relative_to(ROOT) for package in ("broker_io", "txnbuffer") for path in (ROOT / package).rglob("*_pb2.py*")
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the modules as they are generated now."""
    spec = importlib.util.spec_from_file_location("protocols", ROOT / "requirements" / "protocols.py")
    assert spec is not None
    assert spec.loader is not None
    protocols = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocols)
    target = tmp_path_factory.mktemp("generated")
    protocols.generate(target)
    return target


def test_generated_modules_are_those_of_the_protocol_files(generated: Path) -> None:
    again = sorted(
        path.relative_to(generated) for path in generated.rglob("*_pb2.py*") if path.suffix in (".py", ".pyi")
    )
    assert again == GENERATED
    for path in GENERATED:
        assert (generated / path).read_text() == (ROOT / path).read_text(), f"{path}: run `make protocols`"
