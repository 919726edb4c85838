"""The jar of the broker plug-in: the same bytes each time, and an error that names what is missing."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from java_rules import JavaRules
from source_tree import ROOT

from broker_plugin.build import (
    JARS,
    SCHEMAS,
    SOURCES,
    BuildFailed,
    build,
    compile_into,
    distribution,
    minor_version,
    pack,
)
from txnbuffer import __version__


def test_the_same_sources_give_the_same_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path / "first.jar")
    copy = tmp_path / "elsewhere" / "java"
    shutil.copytree(SOURCES, copy, copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    compile_into(tmp_path / "classes", (copy,))
    second = pack(tmp_path / "classes", tmp_path / "second.jar")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as jar:
        names = [entry.filename for entry in jar.infolist()]
        schemas = {path.name: jar.read(f"txnbuffer/schemas/{path.name}") for path in SCHEMAS}
        built = jar.read("txnbuffer/plugin.properties").decode()
    assert names == ["META-INF/MANIFEST.MF", *sorted(names[1:])]
    assert schemas == {path.name: path.read_bytes() for path in SCHEMAS}
    assert built == f"version={__version__}\npulsar={minor_version(distribution())}\n"


@pytest.mark.parametrize("with_jar", [True, False])
def test_wheel_and_sdist_have_the_jar_if_it_was_built(tmp_path: Path, *, with_jar: bool) -> None:
    tree = tmp_path / "tree"
    for name in (
        ".gitignore",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "requirements/index_page.py",
        "txnbuffer/__init__.py",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    jar = f"{JARS.relative_to(ROOT)}/txnbuffer-broker-4.0.jar"
    if with_jar:
        (tree / jar).parent.mkdir()
        (tree / jar).write_bytes(b"a jar")
    (wheel,) = WheelBuilder(str(tree)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = SdistBuilder(str(tree)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as packed:
        in_sdist = [name.partition("/")[2] for name in packed.getnames()]
    assert (jar in zipfile.ZipFile(wheel).namelist(), jar in in_sdist) == (with_jar, with_jar)


def test_methods_that_a_broker_would_never_call_are_found(java: JavaRules) -> None:
    assert java.answers(["lacking"]) == ["[StringReader.close, StringReader.gone]"]


@pytest.mark.parametrize("name", ["Hidden", "Ids", "Rules", "Snapshot"])
def test_rules_use_no_class_of_the_broker(name: str) -> None:
    text = (SOURCES / "txnbuffer" / "broker" / f"{name}.java").read_text()
    allowed = ("java.", "org.apache.avro.", "org.bouncycastle.", "org.roaringbitmap.", "txnbuffer.broker.")
    imported = re.findall(r"^import (?:static )?(\S+);", text, re.MULTILINE)
    assert imported
    assert [one for one in imported if not one.startswith(allowed)] == []


def test_brokers_that_cannot_be_filtered_serve_no_topic(java: JavaRules) -> None:
    settings = ["4.0.8 false true", "4.0.12 false true", "4.1.0 false true", "4.0.8 true true", "4.0.8 false false"]
    refusals = java.answers([f"refusal {each}" for each in settings])
    assert refusals[:2] == ["null", "null"]
    assert re.match(r"the broker plug-in was built for Pulsar 4\.0\.x, and this is 4\.1\.0: ", refusals[2])
    assert refusals[3].startswith("transactionCoordinatorEnabled=true")
    assert refusals[4].startswith("set allowOverrideEntryFilters=true")


def test_what_a_build_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(BuildFailed, match=r"/lib has no pulsar-broker jar"):
        compile_into(tmp_path, home=tmp_path)
    (tmp_path / "lib" / "org.apache.pulsar-pulsar-broker-4.0.8.jar").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match=r"^javac is missing: install a JDK 17 \(openjdk-17-jdk-headless\)$"):
        compile_into(tmp_path, home=tmp_path)
