"""An analyst: reads all invoices that there are, and writes what each item earned into a file."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from txnbuffer import connect

INVOICE = pl.Struct({"item": pl.String, "count": pl.Int64, "cents": pl.Int64})


def main() -> None:
    with connect(os.environ["TXNBUFFER_ADDRESS"]) as client, client.reader("invoices", until="now") as reader:
        batches = [batch.to_polars() for batch in reader.batches()]
    columns = pl.concat(batches).select("key", pl.col("value").cast(pl.String).str.json_decode(INVOICE))
    invoices = columns.unnest("value")
    report = invoices.group_by("item").agg(
        orders=pl.len(), numbers=pl.col("key").n_unique(), count=pl.sum("count"), cents=pl.sum("cents")
    )
    whole = Path(os.environ["REPORT"])
    new = whole.with_suffix(f".{os.getpid()}")
    report.sort("item").write_ndjson(new)
    new.replace(whole)  # another program reads this report or the last one, also if this one is killed


if __name__ == "__main__":
    main()
