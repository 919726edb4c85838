"""The latest record of each key, without a sort and without a value in an aggregation.

Before the shuffle, each task drops records that a later record of the same task supersedes, in Arrow columns, so it
sends at most one record per key. After the shuffle, the same is done with all records of a key.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from txnbuffer.pipeline.spark.newest import HELD_BYTES, newest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY = ("topic", "key")


def latest(frame: DataFrame, *, deleted: bool = False, thinned: bool = False) -> DataFrame:
    """The last record of each topic and key; records without a key are dropped.

    `frame` has the columns topic, key and position, and any others. Records whose value is null are dropped unless
    `deleted`. `thinned`: the frame was read with the option `latest`.
    """
    from pyspark.sql import functions as f

    schema = frame.schema
    if not thinned:
        cores = frame.sparkSession.sparkContext.defaultParallelism
        keyed = frame.where(f.col("key").isNotNull()).coalesce(cores)  # fewer tasks send fewer records per key
        frame = keyed.mapInArrow(partial(newest, held_bytes=HELD_BYTES), schema)
    found = frame.repartition(*KEY).mapInArrow(newest, schema)
    return found if deleted or "value" not in schema.names else found.where(f.col("value").isNotNull())
