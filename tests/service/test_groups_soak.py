"""A short soak of groups, and that its checker finds the errors that it looks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import groups_soak
import pytest
from group_member import DONE
from groups_soak import Report, embedded, judge, made_up

from txnbuffer import SyncClient, connect


def test_each_record_counts_once_while_members_come_and_go(tmp_path: Path) -> None:
    report = embedded(tmp_path, events=7, seed=4, flights=made_up())
    assert report.wrong == []
    assert report.records == 240
    assert report.happened.total() == 7
    assert report.generation > 1


def put(client: SyncClient, *rows: tuple[bytes, str]) -> None:
    for value, at in rows:
        client.send(DONE, value, properties={"from": "flights-0", "at": at})


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([(b"A", "1:1"), (b"B", "1:2")], []),
        ([(b"A", "1:1")], ["lost: b'b'"]),
        ([(b"A", "1:1"), (b"B", "1:2"), (b"B", "1:3")], ["doubled or never committed: b'b'"]),
        ([(b"B", "1:2"), (b"A", "1:1")], ["1:1 of flights-0 follows 1:2"]),
    ],
)
def test_the_checker_of_groups_finds_errors(
    rows: list[tuple[bytes, str]], wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_soak, "LONG", 2.0)
    with connect("memory:") as client:
        put(client, *rows)
        report = Report()
        judge(client, Counter([b"a", b"b"]), report)
        assert report.wrong == wrong
