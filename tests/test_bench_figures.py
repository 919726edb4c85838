"""The figures of the repository, each run once with little work, so that a broken one is noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from bench import (
    figures_aborts,
    figures_buffer,
    figures_client,
    figures_compaction_spark,
    figures_log,
    figures_plain,
    figures_pulsar_scale,
    figures_replication,
    figures_snapshots,
    figures_streams,
    harness,
    rounds,
    sqlite_peer,
)
from broker_io import open_broker
from broker_io.memory import MemoryBroker

AGREED = {
    "access.cost",
    "access.flood.calls",
    "access.flood.connections",
    "access.flood.frames",
    "access.flood.leases",
    "access.flood.watches",
    "access.flood_mb",
    "aborts.bytes_each.10m",
    "aborts.lookup_ns",
    "embedded.commit_ms_p99",
    "embedded.commit_ms_p99.64",
    "embedded.txn_per_s.1",
    "embedded.txn_per_s.1.in_process",
    "embedded.txn_per_s.1.in_process_sync",
    "embedded.txn_per_s.512",
    "embedded.txn_per_s.64",
    "embedded.txn_per_s.named.64",
    "embedded.txn_per_s.positions.64",
    "embedded.txn_per_s.two_topics.64",
    "log.append_records_per_s",
    "log.read_records_per_s",
    "pipeline.export_records_per_s",
    "pipeline.flatness",
    "pipeline.latest_records_per_s",
    "pipeline.read_records_per_s.file",
    "pipeline.read_records_per_s.pulsar",
    "plain.cpu_us.ordinary",
    "plain.cpu_us.transactions",
    "pulsar.load_seconds.800k",
    "pulsar.takeover_seconds",
    "pulsar.topics_per_s",
    "pulsar.topics_threads",
    "pulsar.txn_per_s.1",
    "pulsar.txn_per_s.512",
    "pulsar.txn_per_s.64",
    "pulsar.txn_per_s.two_topics",
    "pulsar_scale.process_records_per_s",
    "pulsar_scale.read_records_per_s",
    "pulsar_scale.records_per_s",
    "recovery.seconds.10m",
    "recovery.seconds.1m",
    "replication.applied_per_s",
    "replication.commit_ms_p50",
    "replication.promotion_seconds",
    "replication.txn_per_s.64",
    "snapshot.bytes.800k",
    "streams.commit_to_delivery_ms_p99",
    "streams.delivered_per_s.backfill",
    "streams.delivered_per_s.memory",
    "streams.fan_out",
    "streams.queued_per_s",
}


def test_required_figures_exist_and_have_goals() -> None:
    goals = {one.name: one.goal for one in harness.figures()}
    assert {name for name in AGREED if goals.get(name) is None} == set()


def test_aborted_ids_have_the_given_density() -> None:
    assert figures_aborts.aborted_ids(5, 1).tolist() == [1, 2, 3, 4, 5]
    assert 8.5 < figures_aborts.aborted_ids(20_000, 10)[-1] / 20_000 < 11.5
    assert len(figures_aborts.filled(figures_aborts.aborted_ids(20_000, 10))) == 20_000


def test_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_aborts, "LOOKUPS", 2_000)
    assert figures_aborts.bytes_each(20_000, 10) >= 0
    assert figures_aborts.lookup_ns(20_000, 10, bulk=True) > 0
    assert figures_aborts.lookup_ns(20_000, 10, bulk=False) > 0


def test_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_buffer, "BATCHES", 20)
    assert figures_buffer.fold_long() > 0
    assert figures_buffer.fold_short() > 0
    assert figures_buffer.visible() > 0


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_streams, "BATCHES", 40)
    assert figures_streams.queued() > 0
    assert figures_streams.queued_by_few() > 0
    assert figures_streams.queued_ahead_of_cursors() > 0


def test_appending_and_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_log, "RECORDS", 5_000)
    for pair in (figures_log.append(), figures_log.read_committed()):
        assert isinstance(pair, harness.Pair)
        assert min(pair) > 0


def test_reading_fails_if_records_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures_log, "MAX_WAIT", 0.05)
    address = f"file:{tmp_path}/log"
    figures_log.write_committed(address, figures_log.batches(4_000, 1_000))
    with pytest.raises(RuntimeError, match="4000 of 5000"):
        figures_log.read_committed_seconds(address, 5_000)


def test_recovery(tmp_path: Path) -> None:
    address = f"file:{tmp_path}/log"
    with open_broker(address) as broker:
        figures_snapshots.abort_many(broker, 20_000, snapshot_every=5_000)
    assert figures_snapshots.recover(address, 20_000) > 0
    with pytest.raises(RuntimeError, match="20000 of 20001 aborts were recovered"):
        figures_snapshots.recover(address, 20_001)


def test_cost_of_snapshots_follows_the_changes() -> None:
    sizes = []
    for aborts in (40_000, 80_000):
        broker = MemoryBroker()
        figures_snapshots.abort_many(broker, aborts, snapshot_every=1_000)
        sizes.append(sum(ledger.bytes for ledger in broker.ledgers(figures_snapshots.SNAPSHOT_TOPIC)))
    assert sizes[1] < 2.2 * sizes[0]


def test_rate_of_the_peer_is_that_of_its_last_interval() -> None:
    told = "INFO ... - Throughput produced: {} msg --- {}.5 msg/s ---     99.8 Mbit/s  --- failure      0.0 msg/s\n"
    assert figures_pulsar_scale.last_rate(told.format(10, 1000) + told.format(20, 2000) + "Aggregated") == 2000.5
    with pytest.raises(RuntimeError, match="no rate"):
        figures_pulsar_scale.last_rate("Exception in thread main")


def test_figures_of_the_client_measure_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_client, "SECONDS", 0.1)
    monkeypatch.setattr(figures_client, "RECORDS", 5000)
    measured = [
        figures_client.sync_transactions_of_one_record(),
        figures_client.records_read(),
        figures_client.some_in_flight_in_process(),
    ]
    assert min(measured) > 0  # type: ignore[type-var]  # none of them has a peer


def test_both_sides_are_warm_and_take_turns() -> None:
    calls = list[tuple[str, float, int]]()

    def side(name: str, rates: list[float]) -> rounds.Round:
        def run(seconds: float, least: int) -> float:
            calls.append((name, seconds, least))
            return rates.pop(0)

        return run

    medians = rounds.alternated(side("one", [9, 1, 5, 2]), side("peer", [0, 8, 6, 7]), 1.0, 2000)
    assert medians == (2, 7)
    assert calls == [("one", 0.0, 2000), ("peer", 0.0, 2000), *[("one", 1.0, 1), ("peer", 1.0, 1)] * rounds.ROUNDS]


def test_brokers_with_the_plug_in_and_without_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[bool]()
    cold = [99] * figures_plain.WARM_UP
    rates = {True: iter([*cold, 1, 9, 3, 7, 5]), False: iter([*cold, 20, 40, 60, 80, 100])}

    def run_round(*, plug_in: bool, transactions: bool) -> figures_plain.Round:
        assert transactions
        calls.append(plug_in)
        return figures_plain.Round(next(rates[plug_in]), 1.0)

    monkeypatch.setattr(figures_plain, "run_round", run_round)
    medians = figures_plain.measured.__wrapped__(transactions=True)
    assert [one.cpu_us for one in medians] == [5, 60]
    assert calls == [True, False, False, True] * (len(calls) // 4)
    assert len(calls) == 2 * (figures_plain.WARM_UP + figures_plain.ROUNDS)


def test_each_row_of_the_peer_is_a_durable_commit(tmp_path: Path) -> None:
    path = str(tmp_path / "peer.sqlite")
    with sqlite_peer.durable(path) as connection:
        modes = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert modes == ["wal", 2]
    path = str(tmp_path / "rows.sqlite")
    with sqlite_peer.committing(path, b"key", b"value") as commit:
        assert commit(0.0, 3) > 0
        other = sqlite3.connect(path)
        assert other.execute("SELECT key, value FROM log").fetchall() == [(b"key", b"value")] * 3
        other.close()


def test_rounds_of_transactions_measure_something(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds, "CONSUMED", 4000)
    measured = [
        rounds.to_sqlite(f"file:{tmp_path}/one", 2, 0.02, 2),
        rounds.sync_to_sqlite(f"file:{tmp_path}/sync", 0.02, 2),
        rounds.times(f"file:{tmp_path}/times", 2, 0.02, 2),
        *(rounds.to_one_topic(f"file:{tmp_path}/{kind}", kind, 2, 0.02, 2) for kind in (*rounds.WORK, "positions")),
    ]
    assert min(min(pair) for pair in measured) > 0
    assert 100 < rounds.bytes_each(str(tmp_path / "bytes"), 8, 16, 160) < 10_000


def test_a_group_without_enough_records_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds, "CONSUMED", 6)
    monkeypatch.setattr(rounds, "IDLE_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="stopped after 6 records"):
        rounds.to_one_topic(f"file:{tmp_path}/log", "positions", 2, 0.0, 100)


def test_a_compaction_on_spark_is_compared_with_one_that_did_the_same(tmp_path: Path) -> None:
    address = f"file:{tmp_path}/log"
    figures_compaction_spark.write_log(address, 3_000, 600)
    with open_broker(address) as broker:
        figures_compaction_spark.reset_decisions(broker, figures_compaction_spark.Shard(0, 1), "test")
    before = figures_compaction_spark.digest(address)
    done = figures_compaction_spark.in_one_process(address)
    assert done["records_out"] < done["records_in"]
    figures_compaction_spark.check(before, address, done, done)
    with pytest.raises(AssertionError, match="not of the same compaction"):
        figures_compaction_spark.check(before, address, done, {**done, "records_out": done["records_out"] - 1})
    with pytest.raises(AssertionError, match="nothing was compacted"):
        same = {**done, "records_out": done["records_in"]}
        figures_compaction_spark.check(before, address, same, same)
    other = before._replace(keys=type(before.keys)(before.keys.seed, before.keys.total + 1))
    with pytest.raises(AssertionError, match="other newest records"):
        figures_compaction_spark.check(other, address, done, done)


def test_a_backup_applies_and_is_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_replication, "APPENDS", 32)
    monkeypatch.setattr(figures_replication, "TIMES", 2)
    assert figures_replication.applied_per_second(2) > 0
    assert figures_replication.promotion_seconds(2) > 0
