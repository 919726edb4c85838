"""The picture of a topic's log: `txnbuf inspect log --plot` and `--svg`."""

from __future__ import annotations

import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import txnbuf
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer.cli.log_picture import COLUMNS, LogPicture, LogRow, as_drawing, as_text, read_picture
from txnbuffer.cli.svg import fitted, text_width
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.model import EARLIEST, Position


def write(broker: Broker) -> None:
    """A committed, an aborted and an open transaction, record sets, ordinary and late records."""
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register("orders")
        log = TopicWriter(broker, "orders")
        log.plain("7", key="limes")
        log.records(1, "3", key="apples")
        log.records(2, "5", key="pears")
        log.records(1, "1", None, key="plums")
        log.commit(1)
        log.abort(2)
        log.records(1, "late", first_seq=1)
        log.record_set(4, "a", "b", "c")
        log.commit(4)
        log.records(3, "2", key="figs")
        log.plain("9", key="kiwis")
        manager.pump()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    address = f"file:{tmp_path_factory.mktemp('logs')}/log"
    with open_broker(address) as broker:
        write(broker)
    return address


def test_plot_shows_transactions_and_what_readers_get(address: str) -> None:
    done = txnbuf("inspect", "log", address, "orders", "--plot")
    assert done.returncode == 0, done.stderr
    lines = [re.sub(" {2,}", "  ", line) for line in done.stdout.splitlines()]
    assert lines == [
        "position  transactions  message  readers get",
        "1:0  ○  limes=7  seqno 1",
        "1:1  ●  0:1 seq 1, apples=3  seqno 2",
        "1:2  │ ●  0:2 seq 1, pears=5  aborted",
        "1:3  ● │  0:1 seq 2, plums=1  seqno 3",
        "1:4  ● │  0:1 seq 3, plums=(deleted)  seqno 4",
        "1:5  ✓ │  marker COMMIT 0:1",
        "1:6  ✗  marker ABORT 0:2",
        "1:7  ○  0:1 seq 1, late  suppressed",
        "1:8  ●  0:4 seq 1, 3 records  seqno 5 to 7",
        "1:9  ✓  marker COMMIT 0:4",
        lines[11],
        "1:10  ●  0:3 seq 1, figs=2  waits",
        "1:11  │ ○  kiwis=9  waits",
        "● record of a transaction  ○ other record  ✓ commit  ✗ abort",
        "Below maxReadPosition readers wait for the end of transaction 0:3.",
        "A consumer without this library gets all 12 messages.",
    ]
    assert re.fullmatch("── maxReadPosition 1:9(:2)? ─+", lines[11])
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_plot_is_bounded_and_says_where_to_continue(address: str) -> None:
    done = txnbuf("inspect", "log", address, "orders", "--plot", "--from", "1:2", "--limit", "3")
    places = [line.split()[0] for line in done.stdout.splitlines()]
    assert places[1:4] == ["1:2", "1:3", "1:4"]
    assert "seqno 3" in done.stdout
    assert "maxReadPosition 1" not in done.stdout
    assert "continue with --from 1:5" in done.stderr


def test_svg_has_the_texts_of_the_plot(address: str, tmp_path: Path) -> None:
    file = tmp_path / "log.svg"
    done = txnbuf("inspect", "log", address, "orders", "--svg", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    root = ElementTree.parse(file).getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("1:3", "seqno 5 to 7", "suppressed", "aborted", "marker COMMIT 0:1", "waits", "topic orders"):
        assert text in texts
    assert [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")] == ["The log of topic orders"]


@pytest.mark.parametrize("arguments", [["--plot"], ["orders", "--plot", "--output", "json"], ["--svg", "log.svg"]])
def test_plot_needs_a_topic_and_no_json(address: str, arguments: list[str]) -> None:
    done = txnbuf("inspect", "log", address, *arguments)
    assert done.returncode == 2
    assert "--plot and --svg draw one topic" in done.stderr


def test_plot_of_an_empty_topic(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path}/log") as broker:
        broker.create_topic("empty")
    assert txnbuf("inspect", "log", f"file:{tmp_path}/log", "empty", "--plot").stdout == "no messages\n"


def test_topic_that_never_had_a_transaction() -> None:
    broker = MemoryBroker()
    TopicWriter(broker, "plain").plain("a", "b")
    picture = read_picture(broker, "plain", EARLIEST, 10)
    assert [(row.text, row.got) for row in picture.rows] == [("a", "seqno 1"), ("b", "seqno 2")]
    assert picture.waits_for is None
    assert "──" in [*as_text(picture, 80, coloured=False)][3]


def test_lines_fit_the_terminal() -> None:
    broker = MemoryBroker()
    TopicWriter(broker, "wide").plain("x" * 500, key="k")
    picture = read_picture(broker, "wide", EARLIEST, 10)
    lines = [*as_text(picture, 80, coloured=False)]
    assert max(map(len, lines)) <= 80
    assert "…" in lines[1]
    assert "x" * 190 in [*as_text(picture, None, coloured=False)][1]


def test_more_transactions_than_columns() -> None:
    broker = MemoryBroker()
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register("many")
        log = TopicWriter(broker, "many")
        for txn in range(1, COLUMNS + 4):
            log.records(txn, "v")
        log.commit(*range(1, COLUMNS + 4))
        log.records(99, "v")
        manager.pump()
        picture = read_picture(broker, "many", EARLIEST, 100)
    assert picture.width == COLUMNS
    assert [row.got for row in picture.rows[: COLUMNS + 3]] == [f"seqno {n}" for n in range(1, COLUMNS + 4)]
    assert [kind for kind, _ in picture.rows[COLUMNS + 3].cells] == ["commit"] * COLUMNS
    assert picture.rows[-1].cells[0] == ("record", "wait")


def test_colours_are_only_for_terminals() -> None:
    broker = MemoryBroker()
    write(broker)
    picture = read_picture(broker, "orders", EARLIEST, 50)
    coloured = "\n".join(as_text(picture, 80, coloured=True))
    assert "\x1b[32mseqno 2\x1b[0m" in coloured
    assert re.sub("\x1b\\[[0-9]+m", "", coloured) == "\n".join(as_text(picture, 80, coloured=False))


def test_max_read_position_within_an_entry() -> None:
    rows = [LogRow(Position(1, 0, index), "v", [], "", "") for index in range(3)]
    assert LogPicture("batched", rows, Position(1, 0, 1), None).decided == 2


@pytest.mark.parametrize("seed", range(10))
def test_picture_of_any_log_says_what_readers_get(seed: int) -> None:
    draw, broker = random.Random(seed), MemoryBroker()
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register("any")
        write_any(TopicWriter(broker, "any"), draw)
        manager.pump()
    ledger = broker.ledgers("any")[-1].ledger
    for start in (EARLIEST, Position(ledger, draw.randrange(30))):
        picture = read_picture(broker, "any", start, 1000)
        with CommittedReader(broker, "any", start=start) as reader:
            seqnos = [record.seqno for record in reader.read() or ()]
        shown = [[*map(int, re.findall(r"\d+", row.got))] for row in picture.rows if row.got.startswith("seqno")]
        assert seqnos == [seqno for row in shown for seqno in range(row[0], row[-1] + 1)]
        ElementTree.fromstring(as_drawing(picture, "any").svg())


def write_any(log: TopicWriter, draw: random.Random) -> None:
    """Forty messages of up to as many transactions."""
    open_txns: list[int] = []
    for txn in range(1, 41):
        step = draw.random()
        if step < 0.4 or not open_txns:
            open_txns.append(txn)
            log.records(txn, "v")
        elif step < 0.6:
            log.records(draw.choice(open_txns), "v", "w")
        elif step < 0.7:
            log.record_set(draw.choice(open_txns), "v", "w")
        elif step < 0.9:
            ended = open_txns.pop(draw.randrange(len(open_txns)))
            draw.choice([log.commit, log.commit, log.abort])(ended)
        else:
            log.plain("v")


def test_texts_of_a_drawing_are_cut_and_escaped() -> None:
    broker = MemoryBroker()
    TopicWriter(broker, "wide").plain("<&" + "x" * 500, key="k")
    svg = as_drawing(read_picture(broker, "wide", EARLIEST, 10), "wide").svg()
    ElementTree.fromstring(svg)
    assert "k=&lt;&amp;x" in svg
    assert len(svg) < 6_000
    assert text_width(fitted("x" * 500, 100)) <= 100
