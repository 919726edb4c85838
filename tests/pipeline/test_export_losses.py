"""An export whose topics were deleted, re-created or truncated fails, and continues only if data loss is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from writing import TopicWriter

from broker_io import open_broker
from broker_io.errors import TopicNotFound
from txnbuffer.errors import LogTruncated
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory, ExportRun
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.offsets import Offset
from txnbuffer.pipeline.options import reading_options


class Exports:
    """Runs of an export of a log in files, without writing the records."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.address = f"file:{path}/log"
        self.directory = ExportDirectory(str(path / "table"), VERSIONS)
        self.meanwhile: Callable[[], None] = lambda: None
        patch.setattr(Export, "_cores", 2)
        patch.setattr(Export, "_write", self._write)

    def _write(self, *_: object) -> int:
        self.meanwhile()
        Path(self.directory.writing).mkdir(parents=True)
        return 1

    def run(self, *, skip_lost: bool = False, topics: tuple[str, ...] = ()) -> ExportRun | None:
        options = reading_options(self.address, topics) | {"fail_on_data_loss": "false" if skip_lost else "true"}
        with self.directory.locked():
            return Export(None, options, self.directory, on_progress=lambda _: None).run()  # type: ignore[arg-type]  # not used

    def send(self, *topics: str) -> None:
        with open_broker(self.address) as broker:
            for topic in topics:
                TopicWriter(broker, topic).plain("value")

    def delete(self, topic: str) -> None:
        with open_broker(self.address) as broker:
            broker.delete_topic(topic)


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(tmp_path, monkeypatch)


def test_a_deleted_topic_is_an_error(exports: Exports) -> None:
    exports.send("a", "b")
    exports.run()
    exports.send("a", "b")
    exports.delete("a")
    with pytest.raises(TopicNotFound, match="topic a was deleted"):
        exports.run()
    with pytest.raises(TopicNotFound, match="'a'"):
        exports.run(topics=("a", "b"))
    assert exports.run(topics=("b",)) is not None
    exports.send("b")
    assert exports.run(skip_lost=True, topics=("a", "b")) is not None
    exports.send("a")
    with pytest.raises(TopicNotFound, match="created again"):
        exports.run(skip_lost=True)


def test_a_topic_re_created_during_a_run_ends_the_run(exports: Exports) -> None:
    exports.send("a")

    def re_create() -> None:
        exports.delete("a")
        exports.send("a")

    exports.meanwhile = re_create
    with pytest.raises(TopicNotFound, match="created again"):
        exports.run()
    assert exports.directory.last() is None


def test_a_truncated_log_is_an_error(exports: Exports) -> None:
    exports.send("a")
    run = exports.run()
    assert run is not None
    (reached,) = run.offset.topics.values()
    further = replace(run, number=2, offset=Offset({"a": reached._replace(at=reached.at._replace(entry=9))}))
    Path(exports.directory.writing).mkdir()
    exports.directory.publish(further)
    with pytest.raises(LogTruncated, match=f"topic a ends at {reached.at}"):
        exports.run()
    found = exports.run(skip_lost=True)
    assert found is not None
    assert found.offset == run.offset
