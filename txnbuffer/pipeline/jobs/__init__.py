"""What Spark does with committed records: export, audit, recover, profile; `txnbuf pipeline` runs them.

Each job is functions from data frames to data frames, and a thin one around them that opens, runs, tells and keeps.
"""
