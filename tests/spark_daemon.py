"""The daemon that forks Spark's Python workers, with what tasks import loaded once: `spark.python.daemon.module`.

Spark's own daemon imports nothing, so that each of the hundreds of workers of a test run imports everything.
"""

import importlib
import sys

from pyspark.daemon import manager

IMPORTED = ("pandas", "pyarrow.parquet", "pyspark.sql.datasource", "txnbuffer.pipeline.spark.source")


def main() -> None:
    for name in (*IMPORTED, *sys.argv[1:2]):
        importlib.import_module(name)
    manager()


if __name__ == "__main__":
    main()
