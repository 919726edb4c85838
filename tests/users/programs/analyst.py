"""An analyst: reads all invoices that there are, and writes what each item earned into a file."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from txnbuffer import connect


def main() -> None:
    with connect(os.environ["TXNBUFFER_ADDRESS"]) as client:
        table = client.read_table("invoices", columns=["key", "value"], decode={"key": "text", "value": "json"})
    invoices = pl.DataFrame(table).unnest("value")
    report = invoices.group_by("item").agg(
        orders=pl.len(), numbers=pl.col("key").n_unique(), count=pl.sum("count"), cents=pl.sum("cents")
    )
    whole = Path(os.environ["REPORT"])
    new = whole.with_suffix(f".{os.getpid()}")
    report.sort("item").write_ndjson(new)
    new.replace(whole)  # another program reads this report or the last one, also if this one is killed


if __name__ == "__main__":
    main()
