"""`txnbuf consume`: each record once for a group, whatever ends the command."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import TransactionAborted

COUNT = 30


@pytest.fixture
def log(tmp_path: Path) -> str:
    place = f"file:{tmp_path / 'log'}"
    fill(place, COUNT)
    return place


def fill(place: str, count: int, first: int = 0) -> None:
    with connect(place) as client, client.transaction() as txn:
        for number in range(first, first + count):
            txn.send("orders", f"order {number}", key=f"k{number}", properties={"n": str(number)})


def consume(log: str, *words: str, code: int = 0) -> list[int]:
    """The numbers of the records that a run prints."""
    done = txnbuf("consume", log, "orders", "--group", "g", *words)
    assert done.returncode == code, done.stderr
    return numbers(done.stdout)


def numbers(printed: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in printed.splitlines()]


def start(log: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "txnbuffer", "consume", log, "orders", "--group", "g", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], code: int) -> None:
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(60) == code, errors
    process.stderr.close()
    if process.stdout is not None:
        process.stdout.close()


def lines(process: subprocess.Popen[str], count: int) -> str:
    assert process.stdout is not None
    return "".join(process.stdout.readline() for _ in range(count))


def rest(log: str) -> list[int]:
    return consume(log, "--until-end")


# Once over all runs


def test_each_record_is_printed_once_over_runs(log: str) -> None:
    assert consume(log, "--limit", "7", "--batch", "5") == [*range(7)]
    assert consume(log, "--limit", "1") == [7]
    assert consume(log, "--until-end", "--batch", "4") == [*range(8, COUNT)]
    assert consume(log, "--until-end") == []
    fill(log, 3, COUNT)
    assert consume(log, "--idle", "0.2") == [*range(COUNT, COUNT + 3)]


def test_lines_are_those_of_tail(log: str) -> None:
    for output in ("table", "json"):
        tail = txnbuf("tail", log, "orders", "--output", output).stdout
        group = txnbuf("consume", log, "orders", "--group", output, "--until-end", "--output", output).stdout
        assert group == tail


def test_a_group_begins_where_start_says(log: str) -> None:
    assert consume(log, "--start", "28", "--until-end") == [27, 28, 29]
    assert consume(log, "--start", "end", "--idle", "0.1") == [], "the group has a position"


def test_topics_of_a_service_end_together(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        fill(address, COUNT)
        with connect(address) as client:
            client.send("payments", "payment 99")
        done = txnbuf("consume", address, "orders", "payments", "--group", "g", "--until-end")
        assert sorted(numbers(done.stdout)) == [*range(COUNT), 99]
        fill(address, 5, COUNT)
        assert consume(address, "--limit", "5") == [*range(COUNT, COUNT + 5)]


def test_a_transaction_that_aborts_prints_nothing_again(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, calls = Transaction.commit, 0

    async def failing(txn: Transaction, **named: object) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise TransactionAborted(txn.id, "the test aborts it")
        await commit(txn)

    monkeypatch.setattr(Transaction, "commit", failing)
    assert consume(log, "--until-end", "--batch", "10") == [*range(COUNT)]
    assert calls == 6
    monkeypatch.undo()
    assert rest(log) == []


# Ends


def test_what_was_printed_is_committed_when_a_signal_ends_the_command(log: str) -> None:
    for number, first in ((signal.SIGTERM, 0), (signal.SIGINT, COUNT)):
        process = start(log)
        assert numbers(lines(process, COUNT)) == [*range(first, first + COUNT)]
        process.send_signal(number)
        ended(process, 0)
        assert rest(log) == []
        fill(log, COUNT, first + COUNT)


def test_what_a_closed_pipe_has_not_passed_on_is_not_committed(log: str) -> None:
    process = start(log, "--batch", "1")
    assert process.stdout is not None
    fd = process.stdout.fileno()
    read = b""
    while read.count(b"\n") < 3:  # unbuffered, so that exactly this was read
        read += os.read(fd, 1)
    process.stdout.close()
    ended(process, 141)
    assert numbers(read.decode()) == [0, 1, 2]
    assert rest(log) == [*range(3, COUNT)]


def test_a_batch_is_committed_as_far_as_the_pipe_was_read(log: str) -> None:
    process = start(log)
    assert process.stdout is not None
    fd = process.stdout.fileno()
    read = b""
    while read.count(b"\n") < 3:
        read += os.read(fd, 1)
    process.stdout.close()
    ended(process, 141)
    assert rest(log) == [*range(3, COUNT)]


def test_a_reader_that_never_reads_gets_nothing_committed(log: str) -> None:
    process = start(log)
    assert process.stdout is not None
    fd = process.stdout.fileno()
    assert select.select([fd], [], [], 60)[0]
    process.stdout.close()
    ended(process, 141)
    assert rest(log) == [*range(COUNT)]


def test_a_closed_pipe_ends_a_command_that_waits(log: str) -> None:
    process = start(log)
    assert numbers(lines(process, COUNT)) == [*range(COUNT)]
    assert process.stdout is not None
    process.stdout.close()
    ended(process, 141)


def test_a_killed_command_repeats_no_more_than_a_batch(log: str) -> None:
    process = start(log, "--batch", "10")
    assert numbers(lines(process, 25)) == [*range(25)]
    process.kill()
    ended(process, -signal.SIGKILL)
    again = rest(log)
    assert again in ([*range(10, COUNT)], [*range(20, COUNT)], [])


# A command


def test_a_command_gets_value_and_description_of_each_record(log: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"(cat; echo; env | grep ^RECORD_ | sort) >> {out}"
    assert consume(log, "--limit", "2", "--exec", command) == []
    described = out.read_text()
    assert "order 0\nRECORD_DELETED=\n" in described
    assert 'RECORD_KEY=k1\nRECORD_POSITION=1:1\nRECORD_PROPERTIES={"n": "1"}\n' in described
    assert "RECORD_GROUP=g\n" in described
    assert rest(log) == [*range(2, COUNT)]


def test_a_command_gets_a_batch_as_lines(log: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"cat >> {out}; echo >> {out}.runs"
    assert consume(log, "--limit", "25", "--batch", "10", "--exec", command, "--output", "json") == []
    assert [json.loads(line)["value"] for line in out.read_text().splitlines()] == [f"order {n}" for n in range(25)]
    assert len(Path(f"{out}.runs").read_text().splitlines()) == 3


def test_a_command_that_fails_ends_consume_before_its_record(log: str) -> None:
    done = txnbuf("consume", log, "orders", "--group", "g", "--exec", 'test "$RECORD_SEQNO" != 4 || exit 9')
    assert done.returncode == 3
    assert "exited with 9 for the record at 1:3 of 'orders'" in done.stderr
    assert rest(log) == [*range(3, COUNT)]


def test_retries_run_the_command_for_the_failed_record_only(log: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'echo "order $((RECORD_SEQNO - 1))" >> {out}; test "$RECORD_SEQNO" != 2 -o "$(wc -l < {out})" -gt 3'
    assert consume(log, "--limit", "3", "--exec", command, "--retries", "5") == []
    assert numbers(out.read_text()) == [0, 1, 1, 1, 2]


def test_failed_records_are_skipped_or_sent_as_dead_letters(log: str) -> None:
    command = 'test "$RECORD_SEQNO" -gt 2'
    skipping = txnbuf("consume", log, "orders", "--group", "s", "--until-end", "--exec", command, "--on-error", "skip")
    assert (skipping.returncode, skipping.stderr) == (0, "2 records skipped, 0 dead letters\n")
    words = ("--group", "d", "--until-end", "--exec", command, "--on-error", "dead-letter:dead")
    letters = txnbuf("consume", log, "orders", *words)
    assert (letters.returncode, letters.stderr) == (0, "0 records skipped, 2 dead letters\n")
    (first, second) = [json.loads(line) for line in txnbuf("tail", log, "dead", "--output", "json").stdout.splitlines()]
    assert (first["value"], second["value"]) == ("order 0", "order 1")
    assert "exited with 1" in first["properties"]["dead_letter_error"]


def test_a_signal_lets_the_command_end_and_commits_its_record(log: str, tmp_path: Path) -> None:
    began = tmp_path / "began"
    process = start(log, "--exec", f"touch {began}; sleep 0.5; touch {tmp_path / 'done'}")
    while not began.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    ended(process, 0)
    assert (tmp_path / "done").exists()
    assert rest(log)[0] >= 1


def test_keys_that_are_no_text_have_a_variable_of_their_own(tmp_path: Path) -> None:
    place = f"file:{tmp_path / 'log'}"
    with connect(place) as client, client.transaction() as txn:
        txn.send("orders", b"\xff\x00", key=b"\xff")
        txn.delete("orders", "gone")
    out = tmp_path / "out"
    command = f'cat >> {out}; echo " $RECORD_KEY $RECORD_KEY_BASE64 $RECORD_DELETED" >> {out}'
    assert consume(place, "--until-end", "--exec", command) == []
    assert out.read_bytes() == b"\xff\x00  /w== \n gone  1\n"


# Refusals


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--retries", "1"], "--retries can be used with --exec only"),
        (["--on-error", "skip"], "--on-error can be used with --exec only"),
        (["--exec", "true", "--on-error", "ignore"], "'ignore' is invalid: give stop, skip or dead-letter:TOPIC"),
        (["--exec", "true", "--on-error", "dead-letter:orders"], "dead letters cannot go to 'orders'"),
        (["--start", "yesterday"], "Invalid value for --start: 'yesterday' is not a start"),
        (["--start", "1:0"], None),
    ],
)
def test_invalid_options_are_refused(words: list[str], sentence: str | None, log: str) -> None:
    done = txnbuf("consume", log, "orders", "--group", "g", "--until-end", *words)
    assert (done.returncode, sentence is None or sentence in done.stderr) == (2 if sentence else 0, True), done.stderr


def test_missing_topics_are_named(log: str) -> None:
    done = txnbuf("consume", log, "ordres", "--group", "g", "--until-end")
    assert (done.returncode, "Did you mean 'orders'?" in done.stderr) == (2, True), done.stderr


def test_lines_with_positions_let_a_reader_drop_what_kills_repeat(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    fill(log, 200)
    seen: dict[str, int] = {}
    for stop_after in (3, 50, 110, None):
        process = start(log, "--batch", "20", "--output", "json", "--until-end")
        assert process.stdout is not None
        for count, line in enumerate(process.stdout):
            row = json.loads(line)
            number = int(re.sub(r"\D", "", row["value"]))
            assert seen.setdefault(row["position"], number) == number
            if count == stop_after:
                process.kill()
                break
        ended(process, 0 if stop_after is None else -signal.SIGKILL)
    assert [*seen.values()] == [*range(200)]


def test_a_group_is_sent_to_another_place(log: str) -> None:
    assert consume(log, "--until-end") == [*range(COUNT)]
    words = ("groups", "seek", log, "g", "--topic", "orders", "--output", "json", "--to")
    dry = txnbuf(*words, "28", "--dry-run").stdout
    assert txnbuf(*words, "28").stdout == dry
    assert json.loads(dry) == [{"topic": "orders", "old": f"1:{COUNT - 1}", "new": "1:26"}]
    assert rest(log) == [27, 28, 29]
    assert txnbuf(*words, "yesterday").returncode == 2
