"""The jar of the broker plug-in: the same bytes each time, and an error that names what is missing."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from java_rules import JavaRules

from broker_plugin.build import SCHEMAS, SOURCES, BuildFailed, compile_into, pack


def test_the_same_classes_give_the_same_jar(java: JavaRules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(java.classes, tmp_path / "first.jar")
    copy = tmp_path / "copy"
    for path in sorted((path for path in java.classes.rglob("*") if path.is_file()), reverse=True):
        target = copy / path.relative_to(java.classes)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, (0, 0))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = pack(copy, tmp_path / "second.jar")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as jar:
        names = [entry.filename for entry in jar.infolist()]
        schemas = {path.name: jar.read(f"txnbuffer/schemas/{path.name}") for path in SCHEMAS}
    assert names[2:] == sorted(names[2:])
    assert schemas == {path.name: path.read_bytes() for path in SCHEMAS}


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


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildFailed, match=r"^javac is missing: install a JDK 17 \(openjdk-17-jdk-headless\)$"):
        compile_into(tmp_path)
