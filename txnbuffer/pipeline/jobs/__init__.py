"""Spark jobs on committed records: export, audit, recover, profile; `txnbuf pipeline` runs them.

Each job consists of functions from data frames to data frames, and one that opens the log, runs them, reports progress
and stores the result.
"""
