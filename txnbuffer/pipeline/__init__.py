"""Committed records in bulk, on Spark: what is to be read, how it is cut into tasks, and what a task reads.

`ranges` is pure. `planning`, `reading` and `arrow` know brokers and Arrow, and nothing of Spark; `spark` is
the shell around them, and the only package that imports it.
"""
