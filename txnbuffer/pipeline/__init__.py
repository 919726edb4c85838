"""Spark pipeline: committed records in bulk, from the planning of partitions to the jobs

`ranges` is pure. `planning`, `reading` and `arrow` know brokers and Arrow, but not Spark; `spark` and `jobs` are the
only packages that import it.
"""
